"""Short runs of TRL's preference trainers, over ranks by our mixin or in one process unchanged."""

import os
from copy import copy
from contextlib import nullcontext
from functools import wraps

import torch
import torch.distributed as dist
from datasets import Dataset, disable_progress_bars, load_dataset
from transformers import set_seed
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.trainer import utils as trl_utils

from docs.examples.finetune_chats import NUMBERS, tokenizer
from docs.examples.finetune_text import made_model
from parallel.comparison import Float64Mode
from parallel.transformers import ContextParallelPreferenceTrainer

TIMES = ("runtime", "per_second", "step_time", "flos")
PAIRS = 2
"""Pairs, or completions, of a batch of a group."""


def words(start, count):
    return " ".join(NUMBERS[(start + i) % 10] for i in range(count))


def pairs(count, folder):
    """Preferences for counting on over counting at random, on disk as text.

    A prompt is long or short; the second chosen answer of each four is one token, the end.
    """
    rows = []
    for i in range(count):
        rows.append(
            {
                "prompt": f"u {words(i, (3, 4, 17, 9)[i % 4])} a ",
                "chosen": words(i + 5, (4, 0, 2, 6)[i % 4]),
                "rejected": words(3 * i, (5, 7, 1, 3)[i % 4]),
            }
        )
    return on_disk(rows, folder)


def on_disk(rows, folder):
    """The rows as a dataset whose file all ranks read, so that they share what TRL caches."""
    path = f"{folder}/rows.json"
    if dist.get_rank() == 0:
        Dataset.from_list(rows).to_json(path)
    dist.barrier()
    return load_dataset("json", data_files=path, split="train", cache_dir=f"{folder}/cache")


def marked(count, folder):
    """Completions with a label, good or bad, of which a batch may have only one kind."""
    rows = []
    for i in range(count):
        good = i % 5 in (0, 1, 3)
        rows.append(
            {
                "prompt": f"u {words(i, (3, 4, 17, 9)[i % 4])} a ",
                "completion": words(i + 5 if good else 3 * i, (4, 0, 2, 6)[i % 4]),
                "label": good,
            }
        )
    return on_disk(rows, folder)


class LongDPO(ContextParallelPreferenceTrainer, DPOTrainer):
    """TRL's trainer over ranks."""


class LongKTO(ContextParallelPreferenceTrainer, KTOTrainer):
    """TRL's trainer over ranks."""


class PlainKTO(KTOTrainer):
    """TRL's trainer, with the prompts of the KL term paired as in batches of PAIRS."""

    def _prepare_dataset(self, dataset, processing_class, args, dataset_name):
        pairing = copy(args)
        pairing.per_device_train_batch_size = PAIRS
        return super()._prepare_dataset(dataset, processing_class, pairing, dataset_name)


def float64_heads():
    """Let TRL's head compute in float64 in the backward pass too, which no mode reaches."""
    function = trl_utils._ChunkedLogProbFunction
    plain = function.backward

    @wraps(plain)
    def backward(ctx, *gradients):
        if gradients[0] is not None and gradients[0].dtype != torch.float64:
            return plain(ctx, *gradients)
        with Float64Mode():
            return plain(ctx, *gradients)

    function.backward = staticmethod(backward)


def arguments(config, folder, groups, world_size, steps, **others):
    """Arguments of a trainer whose step takes PAIRS samples for each of ``groups``."""
    defaults = {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "max_steps": steps,
        "per_device_train_batch_size": PAIRS * groups if world_size == 1 else PAIRS,
        "learning_rate": 2e-2,
        "beta": 0.5,
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "max_grad_norm": 1e9,
        "gradient_checkpointing": False,
    }
    return config(**{**defaults, **others})


def model_in(dtype):
    return made_model().to(dtype)


def history(trainer):
    """What the trainer logged, without times."""
    entries = []
    for entry in trainer.state.log_history:
        kept = {}
        for name, value in entry.items():
            if not any(word in name for word in TIMES):
                kept[name] = value
        entries.append(kept)
    return entries


def trained(rank, world_size, folder, groups, runs):
    """Histories of runs: (kind, dtype, steps, arguments, adapters, precision of the reference)."""
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    os.environ["TQDM_DISABLE"] = "1"
    disable_progress_bars()
    os.makedirs(folder, exist_ok=True)
    float64_heads()
    histories = []
    for index, (kind, dtype, steps, others, reference) in enumerate(runs):
        torch.set_default_dtype(dtype)  # of TRL's empty tensors, which no mode reaches
        with Float64Mode() if dtype == torch.float64 else nullcontext():
            histories.append(
                run(kind, dtype, steps, others, reference, f"{folder}/{index}", groups, world_size)
            )
    return histories


def run(kind, dtype, steps, others, reference, folder, groups, world_size):
    base, long, config, data = {
        "dpo": (DPOTrainer, LongDPO, DPOConfig, pairs),
        "kto": (PlainKTO, LongKTO, KTOConfig, marked),
    }[kind]
    os.makedirs(folder, exist_ok=True)
    given = {"model": model_in(dtype), "processing_class": tokenizer()}
    if reference == "lora":
        from peft import LoraConfig

        given["peft_config"] = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    if reference == "model":
        set_seed(7)
        given["ref_model"] = model_in(dtype)
        with torch.no_grad():
            for x in given["ref_model"].parameters():
                x.mul_(1.1)
    args = arguments(config, folder, groups, world_size, steps, **others)
    given |= {"args": args, "train_dataset": data(40, folder)}
    if world_size == 1:
        trainer = base(**given)
    else:
        trainer = long(**given, context_parallel_size=world_size // groups)
    if dtype == torch.float64:
        trainer.model.double()
    trainer.train()
    return history(trainer)
