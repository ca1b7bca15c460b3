"""Shrink a run to few and narrow layers of every kind, for a small mesh and one process."""

import math
from functools import singledispatch
from typing import Any

from model.config import DELTA_SIZES
from parallel.mesh import SIZES
from parallel.pipeline.stages import PipelineConfig
from runtime.errors import UserError
from train.config.common import CommonConfig
from train.config.entries import Config, DiTRunConfig
from train.config.fields import config_fields
from train.config.flags import build
from train.optimizers import OPTIMIZERS
from train.optimizers.config import OptimizerConfig
from train.tasks.registry import task_of

PP, CP, TP = SIZES
COPIES = "num_distributed_optimizer_instances"
MAX_PROCESSES = 8
HEAD_DIM = 16
VOCABULARY = 499
"""Number of entries of the small vocabulary: odd, so that its shards are uneven."""
TOKENS_PER_RANK = 64
"""Number of tokens of the short sequence for each context-parallel rank."""
NUM_HEADS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Numbers of key heads to try; the small model gets the first that its checks accept."""
NOT_COMPUTED = ("checkpoint", "logging", "profiling", "dry", "health")
"""Configuration sections about a run's files and output; the small run takes their defaults."""
SHARED = ("mesh", "pipeline", "data_parallel", "context", "recompute", "hybrid")
"""Configuration sections about parallelism and memory; one process takes their defaults."""
Values = dict[str, Any]


def shrunk(
    requested: CommonConfig, world_size: int | None = None
) -> tuple[CommonConfig, CommonConfig, int]:
    """Shrink a run to at most 8 processes, two iterations and heads of 16 channels.

    It runs in float32 on the CPU. Its layers are the fewest that have every kind of layer and
    stage. It keeps the ratio of query to key heads, and those of windows, chunks and scaled rope to
    the sequence; a length that the ranks do not divide stays indivisible. A mesh dimension becomes
    1 if 8 processes are too few for it.

    Args:
        world_size: number of processes of the run; by default enough for its mesh with 2
            data-parallel ranks, if these fit.

    Returns:
        The small run; the same run in one process, with the plainest attention and one sample at a
        time; the number of processes of the small run.

    Raises UserError if ``world_size`` does not suit the mesh, or if no sizes keep every kind.
    """
    sections = {name: field.section for name, field in config_fields(requested).items()}
    old = {name: getattr(getattr(requested, section), name) for name, section in sections.items()}
    new = {name: value for name, value in old.items() if sections[name] not in NOT_COMPUTED}
    new["compile"] = False  # outputs of single modules are compared

    ranks = _mesh(old, new, world_size)
    length = _shrink_samples(requested, old, new)
    _shrink_layers(requested, old, new)
    rank_ratio = length / new[CP] / (requested.sequence_length / old[CP])
    _shrink_run(old, new, ranks, rank_ratio)
    config = _with_heads(requested, old, new, ranks)
    return config, _one_process(config, new, sections), ranks


def _one_process(config: CommonConfig, new: Values, sections: dict[str, str]) -> CommonConfig:
    """Return the small run for one process, with the plainest attention."""
    values = {}
    for name in new:
        if sections[name] not in SHARED:
            values[name] = getattr(getattr(config, sections[name]), name)

    linear = config.model.linear_attention
    plain = not config.packed
    values["device"] = "cpu"
    values["micro_batch_size"] = 1
    values["attention_backend"] = "reference"
    if plain and not linear:
        values["attention_backend"] = "auto"
    if not linear:
        values["context_parallel_method"] = "none" if plain else "ring"
    return _built(config, values)


def _built(like: CommonConfig, values: Values) -> CommonConfig:
    return build(type(like), {name: value for name, value in values.items() if value is not None})


def _mesh(old: Values, new: Values, world_size: int | None) -> int:
    """Set the sizes of the small mesh; return its number of processes."""
    pp, cp, tp = (old[name] for name in SIZES)
    model_size = pp * cp * tp
    processes = 2 * model_size if world_size is None else world_size
    dp, rest = divmod(processes, model_size)
    if rest or dp < 1:
        raise UserError(
            f"world_size is {world_size}, but the mesh needs a multiple of {model_size}; "
            "give such a --world-size"
        )

    if world_size is None and old["global_batch_size"]:
        num_micro_batches = old["global_batch_size"] // old["micro_batch_size"]
        if num_micro_batches % 2:
            dp = 1

    sizes = {"dp": min(dp, 2), "pp": min(pp, 2), "tp": min(tp, 2), "cp": 1}
    if cp > 1:
        requested_dp = 1 if world_size is None else sizes["dp"]
        room = MAX_PROCESSES // (sizes["pp"] * sizes["tp"] * requested_dp)
        sizes["cp"] = _context_ranks(old, new, cp, room)

    for name in ("dp", "pp", "tp"):
        if math.prod(sizes.values()) > MAX_PROCESSES:
            sizes[name] = 1

    has_copies = old[COPIES] > 1 and sizes["dp"] * sizes["cp"] % 2 == 0
    new |= {
        PP: sizes["pp"],
        TP: sizes["tp"],
        CP: sizes["cp"],
        "device": "cpu",
        "distributed_backend": "auto",
        "cluster": None,
        COPIES: 2 if has_copies else 1,
    }
    return math.prod(sizes.values())


def _context_ranks(old: Values, new: Values, cp: int, room: int) -> int:
    """Choose the method's options and the fewest ranks that exercise every kind of round.

    At least 4 ranks are used, even if fewer would do, if the run has that many and ``room`` (the
    maximum) allows it; a run with 3 keeps 3.
    """
    degree = old["ulysses_degree"]
    team = min(old["context_parallel_team_size"], 2)
    heads = min(degree, 2)
    new["context_parallel_team_size"] = team
    new["ulysses_degree"] = heads

    if degree == cp:
        min_ranks = heads
    elif team > 1:
        min_ranks = heads * team**2
    else:
        min_ranks = heads * 2

    if old["context_parallel_method"] == "double_ring" and cp >= 2 * min_ranks:
        min_ranks = 2 * min_ranks
        new["context_parallel_ranks_per_node"] = 2

    if min_ranks < 4 <= min(cp, room) or cp == 3 <= room:
        return max(min_ranks, min(cp, room, 4))

    return min_ranks


@singledispatch
def _shrink_samples(requested: CommonConfig, old: Values, new: Values) -> int:
    """Shrink the samples and the settings that depend on them; return the tokens per sample."""
    raise TypeError(
        f"_shrink_samples does not support {type(requested)}; register a function for it"
    )


@_shrink_samples.register
def _shrink_text(requested: Config, old: Values, new: Values) -> int:
    """Shrink sequence, positions, windows, vocabulary and adapters; return the short length."""
    length = old["seq_length"]
    short = TOKENS_PER_RANK * max(new[CP], 2)
    if length % (2 * old[CP] * old[TP]):  # ranks must not divide the short length either
        short -= 5
    short = min(length, short)

    for name in (
        "max_position_embeddings",
        "rope_scaling_original_max_position_embeddings",
        "rope_scaling_seq_length",
    ):
        if old.get(name) is not None:
            new[name] = max(8 * new[TP], math.ceil(old[name] * short / length))

    for window in requested.windows:
        if window:
            new["window_size"] = f"{max(4, window[0] * short // length)},0"
            break

    if old["lora_rank"] is not None:
        new["lora_rank"] = min(old["lora_rank"], 4)
        alpha = old["lora_alpha"]
        new["lora_alpha"] = alpha and alpha * new["lora_rank"] / old["lora_rank"]

    new["seq_length"] = short
    new["vocab_size"] = min(old["vocab_size"] or VOCABULARY, VOCABULARY)
    # The ranks are given samples and read no files, but the configuration must name some.
    new["data_path"] = ("own",)
    new["tokenizer_model"] = "own"
    new["mock_data"] = False
    new["data_cache_path"] = None
    return short


@_shrink_samples.register
def _shrink_latents(requested: DiTRunConfig, old: Values, new: Values) -> int:
    """Shrink the classes, and latents to a few patches per axis; return the number of patches."""
    grid = [*requested.model.patch_grid]  # [time,] height, width
    if not requested.model.video:
        grid = grid[1:]
    *time, height, width = grid

    small_grid = [min(frames, 2) for frames in time]
    max_height = 8
    if time or height < width:
        max_height = 4
    small_grid.append(min(height, max_height))
    small_grid.append(min(width, 8))

    latent_shape = [min(old["latent_shape"][0], 4)]
    patch_shape = requested.model.patch_shape[-len(small_grid) :]
    for count, size in zip(small_grid, patch_shape, strict=True):
        latent_shape.append(count * size)

    new["latent_shape"] = tuple(latent_shape)
    new["num_classes"] = min(old["num_classes"], 10)
    new["data_path"] = ("own",)
    return math.prod(small_grid)


def _shrink_layers(requested: CommonConfig, old: Values, new: Values) -> None:
    """Keep the fewest layers with every kind of attention and window, in every kind of stage."""
    pp = new[PP]
    if pp == 1:
        for name in PipelineConfig.__dataclass_fields__:
            new[name] = getattr(PipelineConfig, name)

    virtual = min(new["num_virtual_stages_per_pipeline_rank"], 2)
    new["num_virtual_stages_per_pipeline_rank"] = virtual
    stages = pp * virtual

    period = 1  # number of layers after which the kinds of attention repeat
    alternating = requested.model.alternating
    if alternating:
        period = 2
        new |= alternating

    windows = tuple(requested.windows)
    old_stages = requested.pipeline.stages(old[PP])
    uneven = len(set(old["pipeline_layers"])) > 1 or old["num_layers"] % old_stages
    num_layers = stages
    if uneven and pp > 1:
        num_layers += 1
    num_layers = max(2, num_layers, len(windows) * period)
    if period == 2:
        num_layers += num_layers % 2
    num_layers = min(old["num_layers"], num_layers)
    new["num_layers"] = num_layers

    if old["pipeline_layers"] and pp > 1:
        new["pipeline_layers"] = (*[1] * (stages - 1), num_layers - stages + 1)
    if "window_attn_skip_freq" in old:
        new["window_attn_skip_freq"] = None
    if len(windows) > 1:
        has_window = [int(bool(windows[n // period % 2])) for n in range(num_layers)]
        new["window_attn_skip_freq"] = str(has_window)


def _shrink_run(old: Values, new: Values, ranks: int, rank_ratio: float) -> None:
    """Shorten the run to two iterations with few micro-batches, and one validation.

    The learning rate is constant. The loss and feed-forward chunk sizes shrink by ``rank_ratio``,
    like the number of tokens per rank.
    """
    dp = ranks // math.prod(new[name] for name in SIZES)
    micro_batch_size = min(old["micro_batch_size"], 2)
    accumulates = (old["global_batch_size"] or 0) > old["micro_batch_size"] * dp
    num_micro_batches = max(new[PP], 2 if accumulates else 1)

    if old["layer_chunk_size"]:
        raise UserError(
            f"layer_chunk_size is {old['layer_chunk_size']}, but the modules' outputs are compared "
            "for whole sequences; give --layer-chunk-size 0 (slices change no result)"
        )
    for name in ("loss_chunk_size", "ffn_chunk_size"):
        new[name] = old[name] and max(8, math.ceil(old[name] * rank_ratio))

    compared = ("lr", *OPTIMIZERS[old["optimizer"]].compared_settings)
    for name in OptimizerConfig.__dataclass_fields__.keys() - compared:
        del new[name]

    new |= {
        "micro_batch_size": micro_batch_size,
        "global_batch_size": micro_batch_size * dp * num_micro_batches,
        "split": "50,50",
        "train_iters": 2,
        "eval_iters": 1,
        "eval_interval": 2,
        "bf16": False,
        "num_workers": 0,
        "lr_decay_style": "constant",
        "exit_interval": None,
        "exit_duration_in_mins": None,
    }


def _with_heads(requested: CommonConfig, old: Values, new: Values, ranks: int) -> CommonConfig:
    """Return the small run with the fewest heads that its checks accept.

    Each key head keeps its number of query heads (at most 8), and tensor-parallel ranks share key
    heads only if they did before.
    """
    num_groups = requested.model.query_groups
    old_tp = old[TP]
    refusals: list[UserError] = []
    for key_heads in NUM_HEADS:
        # A single key head stays single, and several stay several.
        same_kind = (key_heads == 1) == (num_groups == 1 or num_groups < old_tp)
        same_sharing = (key_heads < new[TP]) == (num_groups < old_tp)
        if not (same_kind and same_sharing):
            continue
        try:
            config = _built(requested, new | _widths(requested, old, key_heads))
            # Hide two settings that are refused in other runs but do no harm in this one: offload
            # from a CPU to its own memory, and adapters beside random weights.
            task_of(config).validate(config.updated(recompute_offload=False, load="."), ranks)
        except UserError as error:
            refusals.append(error)
        else:
            return config

    raise UserError(
        "no small model has all properties of this one; change the setting that the "
        "smallest was refused for: "
        f"{refusals[0]}"
    )


def _widths(requested: CommonConfig, old: Values, key_heads: int) -> Values:
    """Return the width settings of a model with ``key_heads`` key heads, keyed by field.

    Their ratios are those of the requested model.
    """
    shape: Any = requested.model
    heads_per_group = min(shape.num_attention_heads // shape.query_groups, 8)
    num_heads = key_heads * heads_per_group
    hidden_size = num_heads * HEAD_DIM
    widths: Values = {"num_attention_heads": num_heads, "hidden_size": hidden_size}
    if old.get("num_query_groups") is not None:
        widths["num_query_groups"] = key_heads

    other_dim = 3 * HEAD_DIM // 2
    if old.get("kv_channels") is not None:
        widths["kv_channels"] = other_dim
        if old["kv_channels"] * shape.num_attention_heads == shape.hidden_size:
            widths["kv_channels"] = HEAD_DIM
    if old["ffn_hidden_size"] is not None:
        eighths = hidden_size * shape.ffn_size / shape.hidden_size / 8
        widths["ffn_hidden_size"] = 8 * math.ceil(eighths)
    if requested.delta:
        value_heads = num_heads * shape.value_heads // shape.key_heads
        value_dim = other_dim
        if shape.value_dim == shape.key_dim:
            value_dim = HEAD_DIM
        sizes = (num_heads, value_heads, HEAD_DIM, value_dim)
        widths |= dict(zip(DELTA_SIZES, sizes, strict=True))

    return widths
