"""Fine-tune a model of transformers on packed text, each sequence on two ranks.

torchrun --nproc-per-node 4 -m docs.examples.finetune_text  # 2 groups of 2 ranks for a sequence
torchrun --nproc-per-node 1 -m docs.examples.finetune_text  # the same losses

With the installed package, use its name in place of `parallel`. The model and its text are small,
and made on the spot.
"""

import os
import sys
from typing import Any

import torch
from transformers import (
    DataCollatorWithFlattening,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

from parallel.transformers import ContextParallelTrainer

LETTERS = 128
TEXT = (
    "A rank has its own tokens of every sequence, "
    "and attention brings it what it needs of the others. "
)


class LongTrainer(ContextParallelTrainer, Trainer):
    """transformers' trainer, in which ranks share sequences."""


def made_model() -> PreTrainedModel:
    """Return a model of two layers with the same random weights on every rank."""
    set_seed(1)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=LETTERS,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
        )
    )


def documents(count: int) -> list[dict[str, list[int]]]:
    """Return documents of several lengths, with one token per letter."""
    samples = []
    for index in range(count):
        text = TEXT[5 * index :] + TEXT
        length = 16 + 8 * (index % 3)
        samples.append({"input_ids": [ord(letter) for letter in text[:length]]})
    return samples


def trained(
    folder: str,
    processes: int,
    ranks: int,
    kind: type = LongTrainer,
    resume: str | None = None,
    **others: Any,
) -> Trainer:
    """Return the trainer after 6 steps of 8 documents, each sequence on ``ranks`` processes.

    A step accumulates two halves. ``others`` are more arguments of training, such as ``fsdp=True``
    on GPUs.
    """
    arguments = TrainingArguments(
        folder,
        use_cpu=not torch.cuda.is_available(),
        max_steps=6,
        per_device_train_batch_size=4 * ranks // processes,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_steps=3,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **others,
    )
    trainer = kind(
        made_model(),
        arguments,
        # concatenates documents, and restarts positions at each
        DataCollatorWithFlattening(),
        documents(20),
        documents(7),
        context_parallel_size=ranks,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


if __name__ == "__main__":
    world_size = int(os.environ["WORLD_SIZE"])
    folder = sys.argv[1] if sys.argv[1:] else "runs/finetune_text"
    trained(folder, world_size, ranks=2 if world_size > 1 else 1).end()
