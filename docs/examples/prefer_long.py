"""Prefer answers with TRL's DPOTrainer and a LoRA, each batch of chats packed over two ranks.

torchrun --nproc-per-node 4 -m docs.examples.prefer_long  # 2 groups of 2 ranks for a batch
torchrun --nproc-per-node 1 -m docs.examples.prefer_long  # the same losses
"""

import os

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer

from docs.examples.finetune_chats import chats, tokenizer
from docs.examples.finetune_text import made_model
from parallel.transformers import ContextParallelPreferenceTrainer


class LongTrainer(ContextParallelPreferenceTrainer, DPOTrainer):
    """TRL's trainer, in which ranks share rows."""


rows = []
for user, answer in chats(120)["messages"]:
    backwards = " ".join(reversed(answer["content"].split()))
    rejected = {"role": "assistant", "content": f"{backwards} zero"}
    rows.append({"prompt": [user], "chosen": [answer], "rejected": [rejected]})

world_size = int(os.environ["WORLD_SIZE"])
ranks = min(world_size, 2)  # that share a batch
arguments = DPOConfig(
    output_dir="runs/prefer_long",
    use_cpu=not torch.cuda.is_available(),
    bf16=False,
    max_steps=20,
    per_device_train_batch_size=8 * ranks // world_size,
    learning_rate=1e-2,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
)
trainer = LongTrainer(
    made_model(),
    args=arguments,
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer(),
    peft_config=LoraConfig(r=4, target_modules="all-linear"),
    context_parallel_size=ranks,
)
trainer.train()
