"""Short runs of TRL's preference trainers, over ranks by our mixin or in one process unchanged."""

import os
from collections.abc import Callable, Mapping
from contextlib import contextmanager, nullcontext
from copy import copy, deepcopy
from functools import wraps
from importlib import import_module
from typing import NamedTuple

import torch
import torch.distributed as dist
from datasets import Dataset, disable_progress_bars, load_dataset
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
)
from trl.trainer import utils as trl_utils

from docs.examples.finetune_chats import NUMBERS, tokenizer
from docs.examples.finetune_text import made_model
from parallel.comparison import Float64Mode
from parallel.transformers import ContextParallelPreferenceTrainer
from parallel.transformers.batch import IGNORED
from tests.parallel.transformers.mistakes import mistaken

shard_module = import_module("parallel.transformers.shard")
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
    if not dist.is_initialized() or dist.get_rank() == 0:
        Dataset.from_list(rows).to_json(path)
    if dist.is_initialized():
        dist.barrier()
    return load_dataset("json", data_files=path, split="train", cache_dir=f"{folder}/cache")


def at_border(count, folder):
    """Answers of two tokens, all rows of one length: two ranks are cut where an answer ends."""
    rows = []
    for i in range(count):
        prompt = f"u {words(i, 15)} a "
        rows.append(
            {"prompt": prompt, "chosen": NUMBERS[(i + 5) % 10], "rejected": NUMBERS[i % 10]}
        )
    return on_disk(rows, folder)


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


class LongGRPO(ContextParallelPreferenceTrainer, GRPOTrainer):
    """TRL's trainer over ranks."""


class GivenRLOO(RLOOTrainer):
    """TRL's trainer, which has no rollout_func, with given completions."""

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields):
        return given_completions(prompt_ids, self)["completion_ids"]


class LongRLOO(ContextParallelPreferenceTrainer, GivenRLOO):
    """TRL's trainer over ranks, with given completions."""


class LongGeneratingRLOO(ContextParallelPreferenceTrainer, RLOOTrainer):
    """TRL's trainer over ranks."""


def prompts(count, folder):
    """Prompts alone, long and short."""
    rows = [{"prompt": f"u {words(i, (3, 4, 17, 9)[i % 4])} a"} for i in range(count)]
    return on_disk(rows, folder)


def given_completions(prompts, trainer):
    """A completion of 1 to 6 tokens for each row of the global batch, by its number there."""
    ids = prompts
    if isinstance(prompts[0], str):
        ids = trainer.processing_class(text=prompts)["input_ids"]
    first = trainer.accelerator.process_index * len(ids)
    completions = []
    for row, prompt in enumerate(ids):
        number = first + row
        length = (5, 0, 3, 1)[number % 4]
        completion = [6 + (sum(prompt) * (number + 1) + i * i) % 10 for i in range(length)]
        completions.append([*completion, 1])
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}


def other_completions(prompts, trainer):
    """Completions that differ between ranks."""
    output = given_completions(prompts, trainer)
    for completion in output["completion_ids"]:
        completion.insert(0, 6 + dist.get_rank())
    return output


def reward(completions, **others):
    """More for a completion that begins with a late number."""
    rewards = []
    for completion in completions:
        numbers = completion.split()
        rewards.append(NUMBERS.index(numbers[0]) / 10 if numbers else 0.3)
    return rewards


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


def arguments(config, folder, samples, steps, **others):
    """Arguments of a trainer whose step takes ``samples`` on each group."""
    defaults = {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "max_steps": steps,
        "per_device_train_batch_size": samples,
        "per_device_eval_batch_size": samples,
        "learning_rate": 1e-2,
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


def model_on_disk(folder):
    path = f"{folder}/model"
    if dist.get_rank() == 0:
        made_model().save_pretrained(path)
    dist.barrier()
    return path


def history(trainer):
    """Everything that the trainer logged, without times."""
    entries = []
    for entry in trainer.state.log_history:
        numbers = {}
        for name, value in entry.items():
            if not any(word in name for word in TIMES):
                numbers[name] = value
        entries.append(numbers)
    return entries


class Run(NamedTuple):
    """A short training."""

    kind: str
    dtype: torch.dtype = torch.float64
    steps: int = 2
    reference: str | None = None
    """A model, the base of adapters (lora), a path, or None."""
    data: Callable | None = None
    """Other rows than the kind's."""
    samples: int = PAIRS
    """Samples of a group's batch."""
    method: str = "exchange"
    mistake: str | None = None
    """A deliberate error of mistakes.MISTAKES."""
    generates: bool = False
    """Completions are generated instead of given."""
    differs: bool = False
    """Each rank gets other completions."""
    arguments: Mapping | tuple = ()


KINDS = {
    "dpo": (DPOTrainer, LongDPO, DPOConfig, pairs),
    "kto": (PlainKTO, LongKTO, KTOConfig, marked),
    "grpo": (GRPOTrainer, LongGRPO, GRPOConfig, prompts),
    "rloo": (GivenRLOO, LongRLOO, RLOOConfig, prompts),
}


def trained(rank, world_size, folder, groups, runs):
    """Histories of runs, and of each rank's batches (tokens with a label, ends at a border)."""
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    os.environ["TQDM_DISABLE"] = "1"
    disable_progress_bars()
    float64_heads()
    histories = []
    for index, each in enumerate(runs):
        path = f"{folder}/{index}"
        os.makedirs(path, exist_ok=True)
        with recorded() as batches, mistaken(each.mistake):
            histories.append((run(each, path, groups, world_size), batches))
    return histories


@contextmanager
def recorded():
    """Record how each batch was cut."""
    plain = shard_module.shard_batch
    batches = []

    def shard_batch(packed, context):
        batch = plain(packed, context)
        labelled = int((batch.labels != IGNORED).sum())
        batches.append((labelled, int(batch.context.positions[-1]) + 1 in packed.cu_seqlens[1:-1]))
        return batch

    shard_module.shard_batch = shard_batch
    try:
        yield batches
    finally:
        shard_module.shard_batch = plain


def run(each, folder, groups, world_size):
    """Train, and return what was logged."""
    base, long, config, rows = KINDS[each.kind]
    if each.kind == "rloo" and each.generates:
        base, long = RLOOTrainer, LongGeneratingRLOO
    settings = {"model": made_model().to(each.dtype), "processing_class": tokenizer()}
    if each.reference == "model":
        settings["ref_model"] = made_model().to(each.dtype)
        with torch.no_grad():
            for x in settings["ref_model"].parameters():
                x.mul_(1.1)
    if each.reference == "lora":
        from peft import LoraConfig

        settings["peft_config"] = LoraConfig(
            r=4, target_modules="all-linear", init_lora_weights=False
        )
    if each.reference == "path":  # TRL loads the reference from where the model was
        settings["model"].config._name_or_path = model_on_disk(folder)
    if each.kind in ("grpo", "rloo"):
        settings["reward_funcs"] = [reward]
    if each.kind == "grpo" and not each.generates:
        settings["rollout_func"] = other_completions if each.differs else given_completions

    settings["train_dataset"] = (each.data or rows)(40, folder)
    if "eval_strategy" in each.arguments:
        settings["eval_dataset"] = settings["train_dataset"].select(range(7))
    samples = each.samples
    if world_size == 1:
        samples *= groups
    else:
        settings["context_parallel_size"] = world_size // groups
        settings["context_parallel_method"] = each.method
    settings["args"] = arguments(config, folder, samples, each.steps, **dict(each.arguments))

    torch.set_default_dtype(each.dtype)  # of TRL's empty tensors, which no mode reaches
    try:
        with Float64Mode() if each.dtype == torch.float64 else nullcontext():
            trainer = (base if world_size == 1 else long)(**settings)
            shrink_adapters(trainer.model)
            if each.dtype == torch.float64:  # adapters
                trainer.model.double()
            trainer.train()
    finally:
        torch.set_default_dtype(torch.float32)
    return history(trainer)


def prepared(kind, folder, others):
    """A trainer of one process by our mixin, from arguments for it or for its configuration."""
    _, long, config, rows = KINDS[kind]
    settings = {"model": made_model(), "processing_class": tokenizer(), "context_parallel_size": 1}
    for_config = {}
    for name, value in others.items():
        target = for_config if name in config.__dataclass_fields__ else settings
        target[name] = value
    if kind in ("dpo", "kto"):
        settings["ref_model"] = deepcopy(settings["model"])
    if kind == "grpo":
        settings["reward_funcs"] = [reward]
        settings["rollout_func"] = given_completions
        for_config["num_generations"] = 2

    # TRL itself checks this number, but for all processes.
    completions = for_config.pop("generation_batch_size", None)
    args = arguments(config, folder, PAIRS, 1, **for_config)
    if completions is not None:
        args.generation_batch_size = completions
    return long(**settings, args=args, train_dataset=rows(8, folder))


def shrink_adapters(model):
    """Make peft's random adapters small beside the model, whose gradients they would blow up."""
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "lora_" in name:
                x.mul_(0.3)


def errors(mine, expected):
    """The largest error of each number of two histories, relative if the number is above 1.

    That of kl is relative to the log-probabilities of whole completions, whose difference it is.
    """
    assert len(mine) == len(expected)
    worst = {}
    for x, y in zip(mine, expected, strict=True):
        assert x.keys() == y.keys()
        for name in x:
            scale = abs(y[name])
            if name.endswith("kl"):
                scale = max(abs(y.get(f"logps/{kind}", 0)) for kind in ("chosen", "rejected"))
            error = abs(x[name] - y[name]) / max(1, scale)
            worst[name] = max(worst.get(name, 0), error)
    return worst
