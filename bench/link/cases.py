"""The models and context-parallel configurations to compare, and the command line that trains them."""

import argparse
from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np

from data.latents.writer import write_latents
from parallel.context import ContextConfig

ROOT = Path(__file__).resolve().parents[2]
VOCAB_SIZE = 512  # small, since the embedding's gradient crosses the link too

# Small layers and many tokens, so that keys and values outweigh all else that crosses. Eight heads, for Ulysses on
# 8 ranks.
_COMMON = ("--num-layers", "2", "--hidden-size", "128", "--num-attention-heads", "8")
MODELS: dict[str, tuple[str, ...]] = {
    "gpt": ("--config", str(ROOT / "configs/gpt_tiny.toml"), *_COMMON),
    "llama": (
        *("--config", str(ROOT / "configs/llama_tiny.toml"), *_COMMON),
        *("--num-query-groups", "4", "--ffn-hidden-size", "352"),
    ),
    "transnormer": ("--config", str(ROOT / "configs/transnormer_tiny.toml"), *_COMMON),
}
DIT = ("--config", str(ROOT / "configs/dit_tiny.toml"), *_COMMON)
FRAME = (32, 32)
"""Of the videos that the model ``dit`` is trained on: 256 patches of 2 x 2."""


def _method(name: str, *, team: int = 1, placement: str = "collect_intra", degree: int = 1) -> tuple[str, ...]:
    found: tuple[str, ...] = ("--context-parallel-method", name)
    if team > 1:
        found += ("--context-parallel-team-size", str(team), "--context-parallel-placement", placement)
    return found + (("--ulysses-degree", str(degree)) if degree > 1 else ())


CASES: dict[str, tuple[str, ...]] = {
    "ring": _method("ring"),
    "striped": _method("striped"),
    "zigzag": _method("zigzag"),
    "allgather": _method("allgather"),
    "allgather_u4": _method("allgather", degree=4),
    "ulysses": _method("ulysses", degree=8),
    "double_ring": _method("double_ring"),
    "wallfacer_c2": _method("wallfacer", team=2),
    "wallfacer_c2_p2p_intra": _method("wallfacer", team=2, placement="p2p_intra"),
    "zigzag_u2": _method("zigzag", degree=2),
    "zigzag_u4": _method("zigzag", degree=4),
    "double_ring_u2": _method("double_ring", degree=2),
    "wallfacer_c2_u2": _method("wallfacer", team=2, degree=2),
}


def name_of(context: ContextConfig) -> str:
    """Return the name that ``CASES`` has, or would have, for what the planner proposes."""
    team, degree = context.context_parallel_team_size, context.ulysses_degree
    name = context.context_parallel_method + (f"_c{team}" if team > 1 else "")
    name += "_p2p_intra" if context.context_parallel_placement == "p2p_intra" else ""
    return name + (f"_u{degree}" if degree > 1 else "")


def method_flags(context: ContextConfig, ranks: int) -> tuple[str, ...]:
    """Return the flags of what the planner proposes on that many ranks."""
    name, team, degree = context.context_parallel_method, context.context_parallel_team_size, context.ulysses_degree
    return _method(
        name, team=team, placement=context.context_parallel_placement, degree=ranks if name == "ulysses" else degree
    )


# Linear attention: LASP and what its paper compares it with. Megatron-SP is tensor parallelism on all ranks.
LINEAR_CASES: dict[str, tuple[str, ...]] = {
    "lasp": _method("lasp"),
    "lasp2": _method("lasp2"),
    "ulysses": _method("ulysses", degree=8),
    "megatron_sp": ("--tensor-model-parallel-size", "8"),
}


def batch_of(args: argparse.Namespace, length: int) -> int:
    """Return the sequences of a step: --batch-size if given, else --tokens over the length."""
    return args.batch_size or args.tokens // length


def cases_of(model: str) -> dict[str, tuple[str, ...]]:
    """Return a model's configurations by name."""
    return LINEAR_CASES if model == "transnormer" else CASES


def reference_of(model: str) -> str:
    """Return the configuration that a model's others are compared with."""
    return "lasp" if model == "transnormer" else "ring"


def command_line(
    model: str, method: Sequence[str], data: Path, *, size: int, seq_length: int, batch: int, iterations: int
) -> list[str]:
    """Return the flags of pretrain_gpt.py or, for the model ``dit``, of pretrain_dit.py.

    ``data`` is what ``data_of`` returns, and ``seq_length`` of ``dit`` the patches of a video.
    Every node has a copy of the weights, and gradients are summed over the link once; with tensor parallelism each rank
    has its own weights, and no matrix's gradient crosses.
    """
    mesh: tuple[str, ...] = ("--context-parallel-size", str(size), "--num-distributed-optimizer-instances", "2")
    if "--tensor-model-parallel-size" in method:
        mesh = ()
    if model == "dit":
        own = [*DIT, "--data-path", str(data), "--latent-shape", *map(str, latent_shape(seq_length))]
    else:
        own = [*MODELS[model], "--data-path", str(data), "--tokenizer-model", f"{data}.model"]
        own += ["--seq-length", str(seq_length)]
        own += ["--max-position-embeddings", str(seq_length)] if model == "gpt" else []
    return [
        *own,
        *method,
        *mesh,
        *("--micro-batch-size", str(batch), "--global-batch-size", str(batch), "--train-iters", str(iterations)),
        *("--lr-warmup-iters", "1", "--eval-iters", "0", "--save", "none", "--save-interval", "none"),
    ]


def latent_shape(patches: int) -> tuple[int, ...]:
    """Return the shape of a video's latents."""
    return 4, 4 * patches // prod(FRAME), *FRAME


def data_of(model: str, text: Path, seq_length: int) -> Path:
    """Return what a model reads: the prefix of ``text``, or a folder of noise beside it, written if it is not there."""
    if model != "dit":
        return text
    folder = text.parent / f"latents_{seq_length}"
    if not folder.exists():
        noise, shape = np.random.default_rng(0), (16, *latent_shape(seq_length))
        write_latents(folder, [(noise.standard_normal(shape, np.float32), np.arange(16) % 10)])
    return folder
