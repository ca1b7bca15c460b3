"""A run shrunk in width but not in kind: the small one, and the same in one process, to compare it
with.
"""

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
MOST, HEAD, VOCABULARY, PER_RANK = 8, 16, 499, 64
"""Processes; channels of a head; entries (odd: uneven shards); tokens of a context-parallel rank.
"""
ELSEWHERE = ("checkpoint", "logging", "profiling", "dry", "health")
"""Sections that say where a run is kept and shown, not what it computes."""
SHARED = ("mesh", "pipeline", "data_parallel", "context", "recompute", "hybrid")
"""Sections that one process takes the defaults of."""
Values = dict[str, Any]


def shrunk(
    asked: CommonConfig, world_size: int | None = None
) -> tuple[CommonConfig, CommonConfig, int]:
    """Shrink a run to at most 8 processes, two iterations and heads of 16 channels, in float32 on
    the CPU.

    Layers are the fewest that have every kind of layer and stage. Ratios stay: of query to key
    heads, of windows, chunks and scaled rope to the sequence, and what divides what. A dimension
    that has no room beside others is 1.

    Args:
        world_size: processes of the run; by default those of its mesh, and 2 data-parallel ranks
            where there is room.

    Returns:
        The small run; the same in one process, by the plainest attention, one sample at a time; the
        processes.

    Raises UserError: no sizes keep every kind.
    """
    sections = {name: field.section for name, field in config_fields(asked).items()}
    old = {name: getattr(getattr(asked, section), name) for name, section in sections.items()}
    new = {name: value for name, value in old.items() if sections[name] not in ELSEWHERE}
    new["compile"] = False  # modules are looked at one by one
    ranks = _mesh(old, new, world_size)
    short = _shrink_samples(asked, old, new)
    _shrink_layers(asked, old, new)
    _shrink_run(old, new, ranks, short / new[CP] / (asked.sequence_length / old[CP]))
    config = _with_heads(asked, old, new, ranks)
    one = {
        name: getattr(getattr(config, sections[name]), name)
        for name in new
        if sections[name] not in SHARED
    }
    linear, plain = config.model.linear_attention, not config.packed
    backend = "auto" if plain and not linear else "reference"
    one |= {"device": "cpu", "micro_batch_size": 1, "attention_backend": backend}
    one |= {} if linear else {"context_parallel_method": "none" if plain else "ring"}
    return config, _built(asked, one), ranks


def _built(like: CommonConfig, values: Values) -> CommonConfig:
    return build(type(like), {name: value for name, value in values.items() if value is not None})


def _mesh(old: Values, new: Values, world_size: int | None) -> int:
    """Set the mesh's sizes; return the processes."""
    pp, cp, tp = (old[name] for name in SIZES)
    dp, rest = divmod(2 * pp * cp * tp if world_size is None else world_size, pp * cp * tp)
    if rest or dp < 1:
        raise UserError(
            f"world_size is {world_size}, and the mesh takes multiples of {pp * cp * tp}; give one of them"
        )
    if (
        world_size is None
        and old["global_batch_size"]
        and old["global_batch_size"] // old["micro_batch_size"] % 2
    ):
        dp = 1
    sizes = {"dp": min(dp, 2), "pp": min(pp, 2), "tp": min(tp, 2), "cp": 1}
    if cp > 1:
        room = MOST // (sizes["pp"] * sizes["tp"] * (1 if world_size is None else sizes["dp"]))
        sizes["cp"] = _context_ranks(old, new, cp, room)
    for name in ("dp", "pp", "tp"):
        sizes[name] = 1 if math.prod(sizes.values()) > MOST else sizes[name]
    new |= {
        PP: sizes["pp"],
        TP: sizes["tp"],
        CP: sizes["cp"],
        "device": "cpu",
        "distributed_backend": "auto",
    }
    new |= {
        "cluster": None,
        COPIES: 2 if old[COPIES] > 1 and sizes["dp"] * sizes["cp"] % 2 == 0 else 1,
    }
    return math.prod(sizes.values())


def _context_ranks(old: Values, new: Values, cp: int, room: int) -> int:
    """Set the shape of the method; return as many ranks as it has kinds of rounds: 4 if they fit
    into the room.
    """
    degree, method = old["ulysses_degree"], old["context_parallel_method"]
    team, heads = min(old["context_parallel_team_size"], 2), min(degree, 2)
    new["context_parallel_team_size"], new["ulysses_degree"] = team, heads
    least = heads * (1 if degree == cp else team**2 if team > 1 else 2)
    if method == "double_ring" and cp >= 2 * least:
        least, new["context_parallel_ranks_per_node"] = 2 * least, 2
    return max(least, min(cp, room, 4)) if least < 4 <= min(cp, room) or cp == 3 <= room else least


@singledispatch
def _shrink_samples(asked: CommonConfig, old: Values, new: Values) -> int:
    """Shrink the samples and what is measured by them; return the tokens of one."""
    raise TypeError(f"no small samples of {type(asked)}")


@_shrink_samples.register
def _shrink_text(asked: Config, old: Values, new: Values) -> int:
    """Shrink the sequence and what is measured by it, the vocabulary and adapters. Return the
    tokens.
    """
    length = old["seq_length"]
    # Where ranks do not divide the length, they do not divide the short one.
    short = min(length, PER_RANK * max(new[CP], 2) - 5 * bool(length % (2 * old[CP] * old[TP])))
    for name in (
        "max_position_embeddings",
        "rope_scaling_original_max_position_embeddings",
        "rope_scaling_seq_length",
    ):
        if old.get(name) is not None:
            new[name] = max(8 * new[TP], math.ceil(old[name] * short / length))
    if (window := next(filter(None, asked.windows), None)) is not None:
        new["window_size"] = f"{max(4, window[0] * short // length)},0"
    if old["lora_rank"] is not None:
        new["lora_rank"] = min(old["lora_rank"], 4)
        new["lora_alpha"] = (
            old["lora_alpha"] and old["lora_alpha"] * new["lora_rank"] / old["lora_rank"]
        )
    new |= {"seq_length": short, "vocab_size": min(old["vocab_size"] or VOCABULARY, VOCABULARY)}
    # ranks get samples, not files
    new |= {
        "data_path": ("own",),
        "tokenizer_model": "own",
        "mock_data": False,
        "data_cache_path": None,
    }
    return short


@_shrink_samples.register
def _shrink_latents(asked: DiTRunConfig, old: Values, new: Values) -> int:
    """Shrink the latents to a few patches along each axis, and the classes. Return the patches."""
    *time, height, width = asked.model.patch_grid[0 if asked.model.video else 1 :]
    grid = [
        *(min(frames, 2) for frames in time),
        min(height, 4 if time or height < width else 8),
        min(width, 8),
    ]
    patch = asked.model.patch_shape[-len(grid) :]
    new["latent_shape"] = (
        min(old["latent_shape"][0], 4),
        *(n * size for n, size in zip(grid, patch, strict=True)),
    )
    new |= {"num_classes": min(old["num_classes"], 10), "data_path": ("own",)}
    return math.prod(grid)


def _shrink_layers(asked: CommonConfig, old: Values, new: Values) -> None:
    """Keep the fewest layers that have softmax attention and linear, windows and none, in every
    kind of stage.
    """
    pp, layers = new[PP], old["num_layers"]
    if pp == 1:
        new |= {name: getattr(PipelineConfig, name) for name in PipelineConfig.__dataclass_fields__}
    virtual = new["num_virtual_stages_per_pipeline_rank"] = min(
        new["num_virtual_stages_per_pipeline_rank"], 2
    )
    stages, every, windows = pp * virtual, None, tuple(asked.windows)
    if alternating := asked.model.alternating:
        every = 2
        new |= alternating
    uneven = len(set(old["pipeline_layers"])) > 1 or layers % asked.pipeline.stages(old[PP])
    fewest = max(2, stages + bool(uneven and pp > 1), len(windows) * (every or 1))
    new["num_layers"] = fewest = min(layers, fewest + (fewest % 2 if every else 0))
    if old["pipeline_layers"] and pp > 1:
        new["pipeline_layers"] = (*[1] * (stages - 1), fewest - stages + 1)
    if "window_attn_skip_freq" in old:
        new["window_attn_skip_freq"] = None
    if len(windows) > 1:
        new["window_attn_skip_freq"] = str(
            [int(bool(windows[n // (every or 1) % 2])) for n in range(fewest)]
        )


def _shrink_run(old: Values, new: Values, ranks: int, ratio: float) -> None:
    """Set two iterations of few micro-batches at a constant rate, a validation, and chunks
    ``ratio`` times as long.
    """
    dp, micro = ranks // math.prod(new[name] for name in SIZES), min(old["micro_batch_size"], 2)
    many = (old["global_batch_size"] or 0) > old["micro_batch_size"] * dp
    for name in ("loss_chunk_size", "ffn_chunk_size"):
        new[name] = old[name] and max(8, math.ceil(old[name] * ratio))
    numeric = ("lr", *OPTIMIZERS[old["optimizer"]].compared_settings)
    for name in OptimizerConfig.__dataclass_fields__.keys() - numeric:
        del new[name]
    new |= {
        "micro_batch_size": micro,
        "global_batch_size": micro * dp * max(new[PP], 1 + many),
        "split": "50,50",
    }
    new |= {"train_iters": 2, "eval_iters": 1, "eval_interval": 2, "bf16": False, "num_workers": 0}
    new |= {"lr_decay_style": "constant", "exit_interval": None, "exit_duration_in_mins": None}


def _with_heads(asked: CommonConfig, old: Values, new: Values, ranks: int) -> CommonConfig:
    """Return the run with the fewest heads that it accepts, as many to a key head, and shared by
    ranks, as before.
    """
    shape: Any = asked.model
    tp, refused = old[TP], list[UserError]()
    ratio, groups = min(shape.num_attention_heads // shape.query_groups, 8), shape.query_groups
    for found in (1, 2, 3, 4, 6, 8, 12, 16):
        if (found == 1) != (groups == 1 or groups < tp) or (found < new[TP]) != (groups < tp):
            continue
        width = found * ratio * HEAD
        wide = {"num_attention_heads": found * ratio, "hidden_size": width}
        wide |= {} if old.get("num_query_groups") is None else {"num_query_groups": found}
        if old.get("kv_channels") is not None:
            same = old["kv_channels"] * shape.num_attention_heads == shape.hidden_size
            wide["kv_channels"] = HEAD if same else 3 * HEAD // 2
        if old["ffn_hidden_size"] is not None:
            wide["ffn_hidden_size"] = 8 * math.ceil(width * shape.ffn_size / shape.hidden_size / 8)
        if asked.delta:
            value_dim = (
                HEAD if shape.value_dim == shape.key_dim else 3 * HEAD // 2
            )  # as many value heads to a key's
            sizes = (
                found * ratio,
                found * ratio * shape.value_heads // shape.key_heads,
                HEAD,
                value_dim,
            )
            wide |= dict(zip(DELTA_SIZES, sizes, strict=True))
        try:
            config = _built(asked, new | wide)
            # A small run may offload to what the CPU has already, and have adapters beside random
            # weights.
            task_of(config).validate(config.updated(recompute_offload=False, load="."), ranks)
        except UserError as error:
            refused.append(error)
        else:
            return config
    raise UserError(
        f"no small model is of this one's kind; change what its smallest one is refused for: {refused[0]}"
    )
