"""Checks across the sections that the configurations of both entry scripts have.

All of them run before the process group is formed, so that a contradiction costs a second on the
machine that starts the job instead of the minutes until the first step on all of its nodes.
"""

import os
from shutil import which

import torch

from data.text.config import split_shares
from kernels.backends import BACKENDS, LINEAR, SOFTMAX, listed
from parallel.context.layout import can_split
from parallel.context.methods import METHODS
from train.config.common import CommonConfig
from train.config.fields import ConfigError, value_of
from train.schedule import schedule_of

NEEDS = (
    ("save_interval", "save"),
    ("async_save", "save"),
    ("keep_last", "save"),
    ("keep_every", "save"),
    ("non_persistent_save_interval", "save"),
    ("non_persistent_save_interval", "non_persistent_local_ckpt_dir"),
    ("non_persistent_local_ckpt_dir", "non_persistent_save_interval"),
    ("wandb_exp_name", "wandb_project"),
)
"""Pairs of fields: if the first is set, the second must be set too."""


def validate_run(config: CommonConfig) -> None:
    """Check the learning rate schedule, the kernels, and that no setting lacks one that it needs.

    Raises ConfigError for the first contradiction, naming the fields, their values and the fix.
    """
    _check_schedule(config)

    if config.recompute.recompute_offload and config.mesh.device_type == "cpu":
        raise ConfigError(
            "recompute_offload is set, but device is cpu: the activations are in host memory "
            "already; leave out --recompute-offload, or use --device cuda"
        )
    if config.recompute.layer_chunk_size:
        check_slices(config)
    optimizer = config.optimizer
    optimizer.spec.check(optimizer, config.mesh.device_type)
    if config.train.compile:
        _check_compile(config)
    config.float8.check(config)

    eval_iters = config.train.eval_iters
    if eval_iters and not split_shares(config.data.split)[1]:
        raise ConfigError(
            f"split is {config.data.split}, which has no validation data, but eval_iters is "
            f"{eval_iters}; give a split such as 95,5,0, or --eval-iters 0"
        )
    _check_needs(config)
    _check_backend(config)


def _check_schedule(config: CommonConfig) -> None:
    """Check that the warm-up and the decay lie within the learning rate's schedule."""
    optimizer = config.optimizer
    end = optimizer.lr_decay_iters
    if end is None:
        return
    if optimizer.lr_warmup_iters >= end:
        raise ConfigError(
            f"lr_warmup_iters is {optimizer.lr_warmup_iters}, but the schedule ends at "
            f"lr_decay_iters {end}; give --lr-warmup-iters {end // 10}, or raise lr_decay_iters"
        )

    decay = optimizer.lr_wsd_decay_iters
    warmup = schedule_of(optimizer, config.train.train_iters).lr_warmup_iters
    if decay is not None and decay > end - warmup:
        raise ConfigError(
            f"lr_wsd_decay_iters is {decay}, but only {end - warmup} iterations lie between the "
            f"warm-up and lr_decay_iters {end}; lower lr_wsd_decay_iters"
        )


def _check_needs(config: CommonConfig) -> None:
    needs = list(NEEDS)
    if config.health.bad_step_policy == "rollback":
        needs.append(("bad_step_policy", "save_interval"))
    for name, other in needs:
        value = value_of(config, name)
        if value and not value_of(config, other):
            flag = other.replace("_", "-")
            raise ConfigError(
                f"{name} is {value}, but {other} is not set; give --{flag}, or leave {name} out"
            )


def _check_compile(config: CommonConfig) -> None:
    """Check that torch.compile can work: nothing inspects operators, a CPU has a C++ compiler."""
    policy = config.recompute
    setting = ""
    if policy.recompute_offload:
        setting = "recompute_offload"
    elif policy.recompute_granularity == "attention_boundary":
        setting = "recompute_granularity attention_boundary"
    if setting:
        raise ConfigError(
            f"compile is set with {setting}, which inspects each operator while a layer runs, but "
            "the operators of a compiled layer cannot be inspected; use recompute_granularity full "
            "or selective, or leave compile out"
        )

    compilers = (os.environ.get("CXX", "g++"), "g++", "clang++")
    if config.mesh.device_type == "cpu" and not any(map(which, compilers)):
        raise ConfigError(
            "compile is set, but no C++ compiler is installed, and torch.compile needs one on a "
            "CPU; install one (Debian: apt-get install g++), name it in CXX, or leave compile out"
        )


def check_slices(config: CommonConfig) -> None:
    """Check that the layers can take the sequence in slices, and the ranks can share each slice.

    Raises ConfigError for the first contradiction, naming the fields, their values and the fix.
    """
    size = config.recompute.layer_chunk_size
    method = config.context.context_parallel_method
    ranks = config.mesh.context_parallel_size
    unit = config.slice_unit
    layout = config.layout_of_slices
    layouts = config.layouts_of_slices
    head_chunks = config.context.ulysses_head_chunks
    schedule = config.context.delta_rule_schedule
    takes_slices = method == "auto" or (method in METHODS and METHODS[method].takes_slices)

    without = "leave out --layer-chunk-size"
    refusals = [
        (
            not config.causal,
            "attention is full, so the first slice would need the keys of the last; " + without,
        ),
        (
            config.model.linear_attention,
            f"model_type {getattr(config.model, 'model_type', None)} has linear attention, whose "
            f"states are not handed from slice to slice; {without}",
        ),
        (
            method == "none",
            "context_parallel_method is none, and torch's SDPA takes whole sequences; choose a "
            "method (any runs on one process)",
        ),
        (
            ranks > 1 and not takes_slices,
            f"context_parallel_method is {method}, which would send the keys of all earlier "
            "slices again for each slice; use --context-parallel-method ulysses (allgather_q for "
            f"more ranks than heads, auto to choose), with which they stay on their rank, or "
            f"{without}",
        ),
        (
            layout not in layouts,
            f"context_parallel_layout is {layout}, which slices of {_described(config)} cannot "
            f"have; use {' or '.join(layouts)}, or leave out --context-parallel-layout",
        ),
        (
            head_chunks > 1,
            f"ulysses_head_chunks is {head_chunks}, which divides the same memory by heads; leave "
            "out one of the two",
        ),
        (
            config.train.compile,
            "compile is set, and a compiled layer cannot end early, once its keys are stored; "
            "leave out one of the two",
        ),
        (
            config.float8.fp8_format is not None,
            f"fp8_format is {config.float8.fp8_format}, whose scales would differ from slice to "
            "slice; leave out one of the two",
        ),
        (
            size % unit,
            f"it must be a multiple of {unit}, since {_sharing(config)} share a slice; nearest "
            f"that works: {max(1, round(size / unit)) * unit}",
        ),
        (
            config.delta and schedule != "auto",
            f"delta_rule_schedule is {schedule}, and ranks that share a slice pass no states on; "
            "leave out --delta-rule-schedule",
        ),
    ]
    for is_refused, reason in refusals:
        if is_refused:
            raise ConfigError(f"layer_chunk_size is {size}, but {reason}")
    if config.delta and ranks > 1:
        _check_delta_slices(config)


def _described(config: CommonConfig) -> str:
    """Describe what limits the layout of slices."""
    if config.delta:
        return "a model with a delta rule"
    return f"method {config.context.context_parallel_method}"


def _sharing(config: CommonConfig) -> str:
    """Name what shares a slice evenly."""
    tp = config.mesh.tensor_model_parallel_size
    sequences = config.sharded_sequences
    shares = []
    if sequences > 1:
        shares.append(f"the {sequences} sequences of a micro-batch")
    if tp > 1:
        shares.append(f"{tp} tensor-parallel ranks")
    if config.slice_unit > sequences * tp:
        shares.append("two chunks of each rank in the zigzag layout")
    return " and ".join(shares)


def _check_delta_slices(config: CommonConfig) -> None:
    """Check that context-parallel ranks can split the heads of a delta rule."""
    model = config.model
    ranks = config.mesh.context_parallel_size
    tp = config.mesh.tensor_model_parallel_size
    keys = model.key_heads // tp
    values = model.value_heads // tp
    if not can_split(values, keys, ranks):
        raise ConfigError(
            f"layer_chunk_size is {config.recompute.layer_chunk_size}, with which "
            f"context_parallel_size {ranks} splits the heads of the delta rule, but each "
            f"tensor-parallel rank has {keys} key and {values} value heads; use a "
            "context_parallel_size that divides them, or leave out --layer-chunk-size"
        )


def _check_backend(config: CommonConfig) -> None:
    """Check that attention_backend has an effect, and fits the model's attention and dtype."""
    backend = config.context.attention_backend
    if backend == "auto":
        return

    linear = config.model.linear_attention
    family = getattr(config.model, "model_type", None)
    if linear and backend not in LINEAR:
        raise ConfigError(
            f"attention_backend is {backend}, which computes softmax attention, but model_type "
            f"{family} has linear attention; use {listed(LINEAR)}"
        )
    if family and not linear and backend not in SOFTMAX:
        raise ConfigError(
            f"attention_backend is {backend}, which computes linear attention, but model_type "
            f"{family} has softmax attention; use {listed(SOFTMAX)}"
        )
    if not linear and config.context.context_parallel_method == "none":
        raise ConfigError(
            f"attention_backend is {backend}, but context_parallel_method none always uses torch's "
            "own SDPA; choose a method, or leave out --attention-backend"
        )
    if not config.train.bf16 and torch.float32 not in BACKENDS[backend].dtypes:
        raise ConfigError(
            f"attention_backend is {backend}, which does not support float32; give --bf16 or "
            "--attention-backend auto"
        )
