"""Fine-tune on packed chats by TRL's SFTTrainer, each sequence on two ranks; answers alone have a
loss.

torchrun --nproc-per-node 4 -m docs.examples.finetune_chats       # 2 ranks for a sequence, 2 groups
of them torchrun --nproc-per-node 1 -m docs.examples.finetune_chats       # the same losses
"""

import os
import sys
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from docs.examples.finetune_text import made_model
from parallel.transformers import ContextParallelTrainer

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% generation %}a {{ message.content }} <end>{% endgeneration %}"
    "{% else %}u {{ message.content }} {% endif %}{% endfor %}"
)
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


class LongTrainer(ContextParallelTrainer, SFTTrainer):
    """TRL's trainer, in which ranks share sequences."""


def tokenizer() -> PreTrainedTokenizerFast:
    """Return one whose tokens are words."""
    words = {
        word: i
        for i, word in enumerate(["<unknown>", "<end>", "u", "a", "after", "comes", *NUMBERS])
    }
    made = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unknown>", eos_token="<end>", pad_token="<unknown>"
    )
    found.chat_template = TEMPLATE
    return found


def chats(count: int) -> Dataset:
    """Return chats in which a user counts and the assistant goes on."""
    rows = []
    for i in range(count):
        asked = [NUMBERS[(i + j) % 10] for j in range(2 + i % 5)]
        told = [NUMBERS[(i + len(asked) + j) % 10] for j in range(1 + i % 7)]
        rows.append(
            [
                {"role": "user", "content": " ".join(asked)},
                {"role": "assistant", "content": " ".join(told)},
            ]
        )
    return Dataset.from_dict({"messages": rows})


def trained(
    folder: str,
    processes: int,
    ranks: int,
    kind: type = LongTrainer,
    steps: int = 20,
    **others: Any,
) -> SFTTrainer:
    """Return the trainer after steps of 8 packs of chats in two halves, each on ``ranks`` of the
    processes.

    ``others`` go to the trainer, such as the ``peft_config`` of adapters.
    """
    arguments = SFTConfig(
        output_dir=folder,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        max_steps=steps,
        per_device_train_batch_size=4 * ranks // processes,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        packing=True,
        max_length=32,
        assistant_only_loss=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = kind(
        made_model(),
        arguments,
        train_dataset=chats(120),
        processing_class=tokenizer(),
        context_parallel_size=ranks,
        **others,
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    world = int(os.environ["WORLD_SIZE"])
    trained(
        sys.argv[1] if sys.argv[1:] else "runs/finetune_chats", world, 2 if world > 1 else 1
    ).end()
