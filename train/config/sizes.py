"""Check that a configuration's sizes fit each other and the number of processes."""

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
from train.config.fields import config_fields
from train.config.flags import ConfigError, spelled, value_of

LARGEST = dict.fromkeys(("num_layers", "num_virtual_stages_per_pipeline_rank"), 10**5)
LARGEST |= dict.fromkeys(("num_attention_heads", "num_query_groups"), 10**6)
LARGEST |= dict.fromkeys(("hidden_size", "ffn_hidden_size", "kv_channels"), 10**7)
"""Larger models fit nowhere, and would take hours to build module by module."""
LARGEST_ELSEWHERE = 10**9 - 1
MOST_BYTES = 10**13
"""Per process: the largest machines have some 10^12."""


def validate_magnitude(config: CommonConfig, world_size: int) -> None:
    """Raise ConfigError for sizes that no machine can hold, before anything is planned or
    allocated.

    Iterations, intervals and seeds take no memory and have no bound here.
    """
    for name, field in config_fields(config).items():
        if (
            field.base is not int
            or name == "seed"
            or name.endswith(("_iters", "_interval", "_step"))
        ):
            continue
        value = value_of(config, name)
        largest = LARGEST.get(name, LARGEST_ELSEWHERE)
        if max((value or (0,)) if field.many else (value or 0,)) > largest:
            raise ConfigError(
                f"{name} is {value}, which no machine can hold; it can be {largest:,} at most"
            )
    readers, most = config.data.num_workers, max(64, 8 * (os.cpu_count() or 1))
    if readers > most:
        raise ConfigError(
            f"num_workers is {readers}, processes that read ahead for each rank, on {os.cpu_count()} cores; it can "
            f"be {most} at most"
        )
    model, mesh = config.model, config.mesh
    width, shared = model.hidden_size, mesh.context_parallel_size * mesh.tensor_model_parallel_size
    matrices = (
        model.num_layers * width * 2 * (model.num_attention_heads * model.head_dim + model.ffn_size)
    )
    entries = (getattr(model, "vocab_size", None) or 0) * width
    # float32 weights and gradients, and the optimizer's state
    state = (8 + config.optimizer.spec.state_bytes) * (matrices + entries) // world_size
    hidden = 4 * config.train.micro_batch_size * config.sequence_length * width // shared
    for names, what, size in (
        ("num_layers, hidden_size and vocab_size", "the state of the model", state),
        ("micro_batch_size, the length and hidden_size", "the hidden states of one layer", hidden),
    ):
        if size > MOST_BYTES:
            raise ConfigError(
                f"{names} make {what} {size / 1e12:,.0f} TB in each process, which no machine has; lower them, or "
                "start more processes"
            )


def validate_sizes(config: CommonConfig, world_size: int) -> None:
    """Raise UserError for sizes of either entry's run that do not fit; name them and the nearest
    that do.
    """
    validate_magnitude(config, world_size)
    if not isinstance(config, Config):
        validate_mesh(config, world_size)
        return
    length, table = config.train.seq_length, config.model.position_table
    if table is not None and length > table:
        raise ConfigError(
            f"seq_length is {length} with max_position_embeddings {table}, the table of learned positions; lower the "
            "one, raise the other, or give --position-embedding-type rope --max-position-embeddings none"
        )
    validate_method(config)
    validate_mesh(config, world_size)
    schedule, pp = config.pipeline.pipeline_schedule, config.mesh.pipeline_model_parallel_size
    if config.model.softmax_type == "learnable" and schedule == "InterleavedZeroBubble" and pp > 1:
        raise ConfigError(
            f"pipeline_schedule is {schedule}, which takes each backward in two parts, and softmax_type is learnable, "
            "for whose gradient attention's backward would run in both; use Interleaved1F1B, or softmax_type off-by-one"
        )
    validate_hybrid(config)
    for name, entries in (
        ("vocab_size", config.model.vocab_size),
        ("max_position_embeddings", table),
    ):
        if entries is not None:
            validate_entries(entries, config.mesh.tensor_model_parallel_size, name)


def validate_mesh(config: CommonConfig, world_size: int) -> None:
    """Raise UserError for mesh sizes that do not fit the processes, the model or the batch."""
    if config.mesh.balance_over == "dp_cp" and not config.packed:
        raise ConfigError(
            "balance_over is dp_cp, which balances the documents of all data-parallel processes as one sequence, and "
            "here none attend apart; give pretrain_gpt.py --reset-attention-mask or pretrain_dit.py --pack-samples, or "
            "leave it out"
        )
    tp, cp = config.mesh.tensor_model_parallel_size, config.mesh.context_parallel_size
    pp = config.mesh.pipeline_model_parallel_size
    _validate_fit("tensor_model_parallel_size", tp, world_size, "")
    _validate_fit("context_parallel_size", cp, world_size, f"tensor_model_parallel_size {tp}", tp)
    within = f"tensor_model_parallel_size {tp} x context_parallel_size {cp}"
    _validate_fit("pipeline_model_parallel_size", pp, world_size, within, tp * cp)
    if config.context.context_parallel_method == "none" and cp > 1:
        raise ConfigError(
            f"context_parallel_method is none with context_parallel_size {cp}; choose a method, or size 1"
        )
    _validate_shares(config.model, tp)
    # With allow_resize the cluster is what the mesh is chosen for.
    context = replace(config.context, cluster=None) if config.mesh.allow_resize else config.context
    context.check(
        seq_len=config.joined_length,
        size=cp,
        heads=config.model.num_attention_heads // tp,
        kv_heads=max(1, config.model.query_groups // tp),
        ranks_per_node=config.mesh.context_ranks_per_node,
        causal=config.causal,
    )
    dp, micro, batch = (
        world_size // (pp * cp * tp),
        config.train.micro_batch_size,
        config.train.global_batch_size,
    )
    if batch is not None and batch % (micro * dp):
        below = batch // (micro * dp)
        raise ConfigError(
            f"global_batch_size is {batch}, not a multiple of micro_batch_size {micro} x data-parallel size {dp}; "
            f"nearest that work: {nearest(batch, (n * micro * dp for n in (below, below + 1) if n))}"
        )
    config.pipeline.check(
        config.model.num_layers,
        pp,
        config.train.micro_batches(dp),
        config.data_parallel.strategy,
        batch=micro * dp,
        tp=tp,
        recompute=config.recompute != RecomputeConfig(),
    )
    copies, ranks = config.data_parallel.num_distributed_optimizer_instances, dp * cp
    if ranks % copies:
        raise ConfigError(
            f"num_distributed_optimizer_instances is {copies}, which does not divide the {ranks} data- and "
            f"context-parallel processes; nearest that work: {nearest(copies, divisors(ranks))}"
        )


def validate_method(config: Config) -> None:
    """Raise ConfigError for a method that does not support the model's kind of attention."""
    kind, linear = config.model.model_type, config.model.linear_attention
    method, cp = config.context.context_parallel_method, config.mesh.context_parallel_size
    if config.model.delta_rule and cp > 1 and method in METHODS:
        asked = config.context.context_parallel_layout
        if (method_of(method).layout(causal=True) if asked == "auto" else asked) == "striped":
            raise ConfigError(
                f"context_parallel_method is {method} in the layout striped, and model_type {kind} has layers with a "
                "delta rule, whose states pass along consecutive tokens, which no rank of that layout has; use zigzag, "
                "or exchange for packed documents"
            )
    if not config.model.delta_rule and (schedule := config.context.delta_rule_schedule) != "auto":
        raise ConfigError(
            f"delta_rule_schedule is {schedule}, and model_type {kind} has no layers with a delta rule; leave it out"
        )
    if linear and cp > 1 and method not in (*LINEAR_METHODS, "auto"):
        raise ConfigError(
            f"context_parallel_method is {method} with context_parallel_size {cp}, and model_type {kind} has linear "
            f"attention: that method neither passes states on nor gives a rank whole sequences; use one of "
            f"{', '.join(LINEAR_METHODS)}"
        )
    if linear and (chunks := config.context.ulysses_head_chunks) > 1:
        raise ConfigError(
            f"ulysses_head_chunks is {chunks}, and model_type {kind} has linear attention, which takes all heads of a "
            "rank at once; leave it out"
        )
    layout = config.context.context_parallel_layout
    if linear and method == "ulysses" and layout not in ("auto", "contiguous"):
        raise ConfigError(
            f"context_parallel_layout is {layout} with method ulysses, and model_type {kind} has linear attention, of "
            "which a rank has whole sequences of some heads in any layout; leave it out, or use lasp or lasp2"
        )
    if not linear and method in STATE_METHODS:
        raise ConfigError(
            f"context_parallel_method is {method}, which passes states of linear attention on, and model_type {kind} "
            f"has softmax attention; use {', '.join(METHODS)}"
        )
    if (
        linear
        and cp > 1
        and method in STATE_METHODS
        and config.context.attention_backend == "reference"
    ):
        raise ConfigError(
            f"attention_backend is reference with context_parallel_size {cp} and method {method}, and that form of "
            "linear attention takes whole sequences; use auto, chunked or triton, or method ulysses"
        )


def validate_hybrid(config: Config) -> None:
    """Check that a softmax method and layout have softmax layers, and fit the ranks and heads."""
    model, hybrid, tp = config.model, config.hybrid, config.mesh.tensor_model_parallel_size
    if not model.own_softmax_layout:
        for name in ("hybrid_softmax_method", "hybrid_softmax_layout"):
            if (value := getattr(hybrid, name)) != getattr(HybridConfig, name):
                raise ConfigError(
                    f"{name} is {value} and softmax_every is not set, so that no layer has softmax attention beside "
                    "others of linear attention; leave it out, or give --softmax-every"
                    if not model.delta_rule
                    else f"{name} is {value}, and all layers of {with_article(model.model_type)} have one layout; "
                    "leave it out, and give --context-parallel-method"
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
        # The plan knows one method and names its options.
        raise ConfigError(
            f"hybrid_softmax_method is {hybrid.hybrid_softmax_method}: {error}"
        ) from error


def _validate_fit(name: str, size: int, world_size: int, others: str, taken: int = 1) -> None:
    """Check that ``size`` divides the world_size / ``taken`` processes that ``others`` leave."""
    processes = world_size // taken
    if processes % size:
        if world_size == 1:
            raise ConfigError(
                f"{name} is {size}, and this is one process; start it with torchrun --nproc-per-node "
                f"{taken * size}, or a multiple of that, or give {spelled(name, 1)}"
            )
        left = f" that {others} leaves of {world_size}" if taken > 1 else ""
        raise ConfigError(
            f"{name} is {size}, which does not divide the {processes} processes{left}; sizes that fit them: "
            f"{', '.join(map(str, divisors(processes)))}; or start a multiple of {taken * size} processes"
        )


def _validate_shares(model: DecoderConfig | DiTConfig, tp: int) -> None:
    """Check that a layer's heads and channels divide among ``tp`` ranks."""
    size, heads, groups = (
        f"tensor_model_parallel_size {tp}",
        model.num_attention_heads,
        model.query_groups,
    )
    shared = model.shared_sizes
    for name, value in shared.items():
        if value % tp:
            sizes = ", ".join(map(str, divisors(math.gcd(*shared.values()))))
            raise ConfigError(
                f"{size} does not divide {name} {value}; sizes that fit this model: {sizes}"
            )
    if isinstance(model, DecoderConfig) and model.joint_qk_norm and groups % tp:
        raise ConfigError(
            f"num_query_groups is {groups}, not a multiple of {size}, and {with_article(model.model_type)} normalises "
            f"all keys of a token at once, each by one rank; sizes that fit: {', '.join(map(str, divisors(groups)))}"
        )
    if groups % tp and tp % groups:
        fitting = (g for g in divisors(heads) if g % tp == 0 or tp % g == 0)
        raise ConfigError(
            f"num_query_groups is {groups}, neither a multiple nor a divisor of {size}; "
            f"nearest that work: {nearest(groups, fitting)}"
        )


def validate_entries(entries: int, tp: int, name: str = "vocab_size") -> None:
    """Check that all ``tp`` ranks hold entries; each but the last ones holds entries / tp, rounded
    up.
    """
    fits = next(
        size for size in range(entries, entries + tp * tp) if -(-size // tp) * (tp - 1) < size
    )
    if fits > entries:
        raise ConfigError(
            f"{name} is {entries}, of which tensor_model_parallel_size {tp} leaves nothing to its last process; "
            f"nearest that works: --{name.replace('_', '-')} {fits}"
        )
