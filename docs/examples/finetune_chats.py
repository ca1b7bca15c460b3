"""Fine-tune on packed chats with TRL's SFTTrainer, each sequence on two ranks.

torchrun --nproc-per-node 4 -m docs.examples.finetune_chats  # 2 groups of 2 ranks for a sequence
torchrun --nproc-per-node 1 -m docs.examples.finetune_chats  # the same losses

Only the tokens of answers carry loss.
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
    """Return a tokenizer whose tokens are words."""
    words = ["<unknown>", "<end>", "u", "a", "after", "comes", *NUMBERS]
    vocabulary = {word: index for index, word in enumerate(words)}
    word_level = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    word_level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=word_level,
        unk_token="<unknown>",
        eos_token="<end>",
        pad_token="<unknown>",
    )
    fast.chat_template = TEMPLATE
    return fast


def chats(count: int) -> Dataset:
    """Return chats in which a user counts and the assistant continues."""
    rows = []
    for i in range(count):
        user = [NUMBERS[(i + j) % 10] for j in range(2 + i % 5)]
        assistant = [NUMBERS[(i + len(user) + j) % 10] for j in range(1 + i % 7)]
        rows.append(
            [
                {"role": "user", "content": " ".join(user)},
                {"role": "assistant", "content": " ".join(assistant)},
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
    """Return the trainer after steps of 8 packs of chats, each pack on ``ranks`` processes.

    A step accumulates two halves. ``others`` go to the trainer, such as the ``peft_config`` of
    adapters.
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
    world_size = int(os.environ["WORLD_SIZE"])
    folder = sys.argv[1] if sys.argv[1:] else "runs/finetune_chats"
    trained(folder, world_size, ranks=2 if world_size > 1 else 1).end()
