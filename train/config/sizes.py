"""Check that a configuration's sizes fit each other and the number of processes.

Each message names the size that does not fit and the nearest sizes that do: users find a mesh by
trying sizes, and on a cluster every attempt has to wait for nodes.
"""

import math
import os
from dataclasses import replace

from model.config import DecoderConfig
from model.dit_config import DiTConfig
from parallel.context.config import HybridConfig
from parallel.context.layout import ContextError
from parallel.context.methods import LINEAR_METHODS, METHODS, STATE_METHODS, method_of
from parallel.recompute import RecomputeConfig
from runtime.errors import divisors, nearest, with_article
from train.config.common import CommonConfig
from train.config.entries import Config
from train.config.fields import ConfigError, ConfigField, config_fields, value_of
from train.config.flags import spelled

LARGEST = {
    "num_layers": 10**5,
    "num_virtual_stages_per_pipeline_rank": 10**5,
    "num_attention_heads": 10**6,
    "num_query_groups": 10**6,
    "hidden_size": 10**7,
    "ffn_hidden_size": 10**7,
    "kv_channels": 10**7,
}
"""Upper bounds on sizes: no machine holds larger models, and building one would take hours."""
LARGEST_ELSEWHERE = 10**9 - 1
MAX_BYTES = 10**13
"""Upper bound on the bytes per process; the largest machines have about 10^12."""


def validate_magnitude(config: CommonConfig, world_size: int) -> None:
    """Raise ConfigError for sizes that no machine can hold, before anything is allocated.

    Iterations, intervals and seeds take no memory and have no bound here.
    """
    for name, field in config_fields(config).items():
        if _takes_memory(field):
            value = value_of(config, name)
            largest = LARGEST.get(name, LARGEST_ELSEWHERE)
            values = value if field.many else (value,)
            if any((number or 0) > largest for number in values or ()):
                raise ConfigError(
                    f"{name} is {value}, which no machine can hold; it must be at most {largest:,}"
                )

    workers = config.data.num_workers
    max_workers = max(64, 8 * (os.cpu_count() or 1))
    if workers > max_workers:
        raise ConfigError(
            f"num_workers (processes that read ahead for each rank) is {workers}, but there are "
            f"only {os.cpu_count()} cores; set num_workers to {max_workers} at most"
        )
    _validate_bytes(config, world_size)


def _takes_memory(field: ConfigField) -> bool:
    counts_time = field.name.endswith(("_iters", "_interval", "_step"))
    return field.base is int and field.name != "seed" and not counts_time


def _validate_bytes(config: CommonConfig, world_size: int) -> None:
    """Check that the model state and one layer's hidden states stay below ``MAX_BYTES``."""
    model = config.model
    width = model.hidden_size
    attention = model.num_attention_heads * model.head_dim
    matrices = model.num_layers * width * 2 * (attention + model.ffn_size)
    embedding = (getattr(model, "vocab_size", None) or 0) * width
    # float32 weights and gradients, and the optimizer's state
    weight_bytes = 8 + config.optimizer.spec.state_bytes(config.optimizer)
    state = weight_bytes * (matrices + embedding) // world_size

    shards = config.mesh.context_parallel_size * config.mesh.tensor_model_parallel_size
    hidden = 4 * config.train.micro_batch_size * config.sequence_length * width // shards

    for names, tensors, size in (
        ("num_layers, hidden_size and vocab_size", "the state of the model", state),
        ("micro_batch_size, the length and hidden_size", "the hidden states of one layer", hidden),
    ):
        if size > MAX_BYTES:
            raise ConfigError(
                f"{names} make {tensors} {size / 1e12:,.0f} TB in each process, which no machine "
                "has; lower them, or start more processes"
            )


def validate_sizes(config: CommonConfig, world_size: int) -> None:
    """Raise UserError if a run's sizes do not fit the processes, the model or each other.

    The message names the sizes and the nearest ones that fit. Works for both entry scripts.
    """
    validate_magnitude(config, world_size)
    if not isinstance(config, Config):
        validate_mesh(config, world_size)
        return

    length = config.train.seq_length
    table = config.model.position_table
    if table is not None and length > table:
        raise ConfigError(
            f"seq_length is {length}, but the table of learned positions ends at "
            f"max_position_embeddings {table}; lower seq_length, raise max_position_embeddings, or "
            "give --position-embedding-type rope --max-position-embeddings none"
        )
    validate_method(config)
    validate_mesh(config, world_size)

    schedule = config.pipeline.pipeline_schedule
    staged = config.mesh.pipeline_model_parallel_size > 1
    if config.model.softmax_type == "learnable" and schedule == "InterleavedZeroBubble" and staged:
        raise ConfigError(
            f"pipeline_schedule is {schedule}, which splits each backward pass in two parts, but "
            "with softmax_type learnable the backward pass of attention would run in both; use "
            "Interleaved1F1B, or softmax_type off-by-one"
        )
    validate_hybrid(config)

    tp = config.mesh.tensor_model_parallel_size
    if config.model.vocab_size is not None:
        validate_entries(config.model.vocab_size, tp)
    if table is not None:
        validate_entries(table, tp, "max_position_embeddings")


def validate_mesh(config: CommonConfig, world_size: int) -> None:
    """Raise UserError for mesh sizes that do not fit the processes, the model or the batch."""
    if config.mesh.balance_over == "dp_cp" and not config.packed:
        raise ConfigError(
            "balance_over is dp_cp, which balances documents over all data-parallel processes, but "
            "attention is not masked between documents; give pretrain_gpt.py "
            "--reset-attention-mask or pretrain_dit.py --pack-samples, or leave out --balance-over"
        )
    tp = config.mesh.tensor_model_parallel_size
    cp = config.mesh.context_parallel_size
    pp = config.mesh.pipeline_model_parallel_size
    _validate_fit("tensor_model_parallel_size", tp, world_size, "")
    _validate_fit("context_parallel_size", cp, world_size, f"tensor_model_parallel_size {tp}", tp)
    inner = f"tensor_model_parallel_size {tp} x context_parallel_size {cp}"
    _validate_fit("pipeline_model_parallel_size", pp, world_size, inner, tp * cp)

    if config.context.context_parallel_method == "none" and cp > 1:
        raise ConfigError(
            f"context_parallel_method is none, but context_parallel_size is {cp}; choose a method, "
            "or set context_parallel_size to 1"
        )
    _validate_shares(config.model, tp)
    context = config.context
    if config.mesh.allow_resize:
        # With allow_resize the cluster only guides the choice of the mesh.
        context = replace(context, cluster=None)
    context.check(
        seq_len=config.joined_length,
        size=cp,
        heads=config.model.num_attention_heads // tp,
        kv_heads=max(1, config.model.query_groups // tp),
        ranks_per_node=config.mesh.context_ranks_per_node,
        causal=config.causal,
    )

    dp = world_size // (pp * cp * tp)
    _validate_batch(config, dp)
    config.pipeline.check(
        config.model.num_layers,
        pp,
        config.train.micro_batches(dp),
        config.data_parallel.strategy,
        batch=config.train.micro_batch_size * dp,
        tp=tp,
        recompute=config.recompute != RecomputeConfig(),
    )
    instances = config.data_parallel.num_distributed_optimizer_instances
    ranks = dp * cp
    if ranks % instances:
        raise ConfigError(
            f"num_distributed_optimizer_instances is {instances}, which does not divide the "
            f"{ranks} data- and context-parallel processes; nearest that work: "
            f"{nearest(instances, divisors(ranks))}"
        )


def _validate_batch(config: CommonConfig, dp: int) -> None:
    """Check that the global batch is a multiple of one micro-batch on each of ``dp`` ranks."""
    micro = config.train.micro_batch_size
    batch = config.train.global_batch_size
    if batch is None or batch % (micro * dp) == 0:
        return
    below = batch // (micro * dp) * micro * dp
    multiples = [size for size in (below, below + micro * dp) if size]
    raise ConfigError(
        f"global_batch_size is {batch}, not a multiple of micro_batch_size {micro} x data-parallel "
        f"size {dp}; nearest that work: {nearest(batch, multiples)}"
    )


def validate_method(config: Config) -> None:
    """Raise ConfigError for a method that does not support the model's kind of attention."""
    _validate_delta_rule(config)
    if config.model.linear_attention:
        _validate_linear_method(config)
    elif config.context.context_parallel_method in STATE_METHODS:
        raise ConfigError(
            f"context_parallel_method is {config.context.context_parallel_method}, which passes "
            f"states of linear attention on, but model_type {config.model.model_type} has softmax "
            f"attention; use one of {', '.join(METHODS)}"
        )


def _validate_delta_rule(config: Config) -> None:
    """Check that a delta rule's ranks hold consecutive tokens, and that its schedule is used."""
    family = config.model.model_type
    context = config.context
    if not config.model.delta_rule:
        if context.delta_rule_schedule != "auto":
            raise ConfigError(
                f"delta_rule_schedule is {context.delta_rule_schedule}, but model_type {family} "
                "has no layers with a delta rule; leave out --delta-rule-schedule"
            )
        return

    method = context.context_parallel_method
    if config.mesh.context_parallel_size == 1 or method not in METHODS:
        return
    layout: str = context.context_parallel_layout
    if layout == "auto":
        layout = method_of(method).layout(causal=True)
    if layout == "striped":
        raise ConfigError(
            f"context_parallel_method {method} uses the striped layout, but model_type {family} "
            "has delta-rule layers, which need consecutive tokens on each rank; use "
            "--context-parallel-method zigzag, or exchange for packed documents"
        )


def _validate_linear_method(config: Config) -> None:
    """Check that the context-parallel method supports linear attention.

    It must hand states from rank to rank, or give ranks whole sequences.
    """
    family = config.model.model_type
    context = config.context
    method = context.context_parallel_method
    cp = config.mesh.context_parallel_size
    if cp > 1 and method not in (*LINEAR_METHODS, "auto"):
        raise ConfigError(
            f"context_parallel_method is {method} with context_parallel_size {cp}, but model_type "
            f"{family} has linear attention, and that method neither passes its states on nor "
            f"gives a rank whole sequences; use one of {', '.join(LINEAR_METHODS)}"
        )
    if context.ulysses_head_chunks > 1:
        raise ConfigError(
            f"ulysses_head_chunks is {context.ulysses_head_chunks}, but model_type {family} has "
            "linear attention, which takes all heads of a rank at once; leave out "
            "--ulysses-head-chunks"
        )
    layout = context.context_parallel_layout
    if method == "ulysses" and layout not in ("auto", "contiguous"):
        raise ConfigError(
            f"context_parallel_layout is {layout}, but with method ulysses and the linear "
            f"attention of model_type {family} a rank has whole sequences of some heads in any "
            "layout; leave out --context-parallel-layout, or use method lasp or lasp2"
        )
    if cp > 1 and method in STATE_METHODS and context.attention_backend == "reference":
        raise ConfigError(
            f"attention_backend is reference with context_parallel_size {cp} and method {method}, "
            "but the reference form of linear attention needs whole sequences; use "
            "attention_backend auto, chunked or triton, or method ulysses"
        )


def validate_hybrid(config: Config) -> None:
    """Check that the hybrid settings apply: softmax layers exist, and ranks and heads fit."""
    model = config.model
    hybrid = config.hybrid
    tp = config.mesh.tensor_model_parallel_size
    if not model.own_softmax_layout:
        for name in ("hybrid_softmax_method", "hybrid_softmax_layout"):
            value = getattr(hybrid, name)
            if value == getattr(HybridConfig, name):
                continue
            if model.delta_rule:
                raise ConfigError(
                    f"{name} is {value}, but all layers of {with_article(model.model_type)} have "
                    f"one layout; leave out {name}, and give --context-parallel-method"
                )
            raise ConfigError(
                f"{name} is {value}, but softmax_every is not set, so the model does not mix "
                f"softmax layers with linear attention; leave out {name}, or give --softmax-every"
            )
        return

    try:
        hybrid.check(
            config.context.context_parallel_layout,
            seq_len=config.joined_length,
            size=config.mesh.context_parallel_size,
            heads=model.num_attention_heads // tp,
            kv_heads=model.query_groups // tp,
        )
    except ContextError as error:
        # The error comes from the plan and does not name the configuration's field.
        raise ConfigError(
            f"hybrid_softmax_method is {hybrid.hybrid_softmax_method}: {error}"
        ) from error


def _validate_fit(name: str, size: int, world_size: int, inner: str, inner_size: int = 1) -> None:
    """Check that ``size`` divides the processes left over by the ``inner`` mesh dimensions."""
    processes = world_size // inner_size
    if processes % size == 0:
        return
    if world_size == 1:
        raise ConfigError(
            f"{name} is {size}, but this is one process; start the run with torchrun "
            f"--nproc-per-node {inner_size * size}, or a multiple of that, or give "
            f"{spelled(name, 1)}"
        )
    remaining = ""
    if inner_size > 1:
        remaining = f" that {inner} leaves of {world_size}"
    raise ConfigError(
        f"{name} is {size}, which does not divide the {processes} processes{remaining}; sizes that "
        f"fit them: {_listed(divisors(processes))}; or start a multiple of {inner_size * size} "
        "processes"
    )


def _validate_shares(model: DecoderConfig | DiTConfig, tp: int) -> None:
    """Check that a layer's heads and channels divide evenly among ``tp`` ranks."""
    size = f"tensor_model_parallel_size {tp}"
    for name, value in model.shared_sizes.items():
        if value % tp:
            fitting = divisors(math.gcd(*model.shared_sizes.values()))
            raise ConfigError(
                f"{size} does not divide {name} {value}; sizes that fit this model: "
                f"{_listed(fitting)}"
            )

    groups = model.query_groups
    if isinstance(model, DecoderConfig) and model.joint_qk_norm and groups % tp:
        raise ConfigError(
            f"num_query_groups is {groups}, not a multiple of {size}, but "
            f"{with_article(model.model_type)} normalises all keys of a token together, so each "
            f"head must be on exactly one rank; sizes that fit: {_listed(divisors(groups))}"
        )
    if groups % tp and tp % groups:
        fitting = divisors(model.num_attention_heads)
        fitting = [count for count in fitting if count % tp == 0 or tp % count == 0]
        raise ConfigError(
            f"num_query_groups is {groups}, neither a multiple nor a divisor of {size}; "
            f"nearest that work: {nearest(groups, fitting)}"
        )


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes))


def validate_entries(entries: int, tp: int, name: str = "vocab_size") -> None:
    """Check that no tensor-parallel rank is left without entries of an embedding table.

    Each of the ``tp`` ranks holds entries / tp, rounded up; the last ones get the rest, if any.
    """
    size = entries
    while -(-size // tp) * (tp - 1) >= size:
        size += 1
    if size > entries:
        raise ConfigError(
            f"{name} is {entries}, but with tensor_model_parallel_size {tp} the last process "
            f"would have no entries; nearest that works: --{name.replace('_', '-')} {size}"
        )
