"""Windows and sinks on every kind of mesh: one step is that of one process with plain SDPA."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from model.attention import HybridAttention, sdpa
from model.config import ModelConfig
from parallel.context.heads import HeadExchange
from parallel.mesh import distributed_mesh
from parallel.recompute import RecomputeConfig
from parallel.tensor.styles import OwnHeads
from runtime.ranks import run_ranks
from tests.parallel.split import Step, config, difference, mesh_config, plain, split_step, whole_step

LOSS, GRADIENT = 2e-6, 1e-7
"""Bounds of the differences from one process."""
WINDOWED = config(num_layers=3, window_size="5,0", window_attn_skip_freq="2", softmax_type="learnable")
OFF_BY_ONE = config(model_type="gpt", max_position_embeddings=17, window_size="5,0", softmax_type="off-by-one")
HYBRID = replace(WINDOWED, model_type="transnormer", num_query_groups=None, softmax_every=2, window_attn_skip_freq=None)
# [ranks, tp, method, recompute]; the rest is context parallel.
MESHES: dict[str, tuple[int, int, str, str]] = {
    "ulysses": (2, 1, "ulysses", "none"),
    "tp2 ulysses": (4, 2, "ulysses", "full"),
    "ring": (2, 1, "ring", "selective"),
    "striped": (4, 1, "striped", "attention_boundary"),
    "tp2 allgather": (4, 2, "allgather", "attention_boundary"),
}


def steps(rank: int, world_size: int, tp: int, method: str, granularity: Any, *models: ModelConfig) -> list[Step]:
    recompute = RecomputeConfig(recompute_granularity=granularity)
    with distributed_mesh(mesh_config(tp, world_size // tp)) as mesh:
        return [split_step(mesh, model, recompute, method=method)[1] for model in models]


def one_process(model: ModelConfig) -> Step:
    attend = HybridAttention() if model.softmax_every is not None else sdpa
    return whole_step(model, plain(model, attend))


def check(results: list[list[Step]], *models: ModelConfig) -> None:
    for index, model in enumerate(models):
        want = one_process(model)
        for step in (result[index] for result in results):
            assert abs(step.loss - want.loss) < LOSS
            assert difference(step, want) < GRADIENT


@pytest.mark.parametrize("mesh", MESHES)
def test_windows_and_sinks_are_those_of_one_process(mesh: str) -> None:
    ranks, *settings = MESHES[mesh]
    check(run_ranks(steps, ranks, *settings, WINDOWED, OFF_BY_ONE), WINDOWED, OFF_BY_ONE)


def test_softmax_layers_of_a_hybrid_have_windows_and_sinks_over_ranks() -> None:
    check(run_ranks(steps, 4, 2, "lasp2", "none", HYBRID), HYBRID)


def with_sinks_of_other_heads(rank: int, world_size: int, tp: int, method: str) -> list[Step]:
    """Ranks that split heads among them take each other's sinks."""
    own = HeadExchange.own
    HeadExchange.own = lambda self, x: own(self, x.roll(len(x) // 2))  # type: ignore[method-assign]
    return steps(rank, world_size, tp, method, "none", WINDOWED)


def with_sinks_one_head_off(rank: int, world_size: int, tp: int, method: str) -> list[Step]:
    """Each tensor-parallel rank takes its own, in another order."""
    split = OwnHeads._apply

    def off(self: OwnHeads, module: Any, mesh: Any) -> Any:
        module = split(self, module, mesh)
        own = module.own_sinks
        module.own_sinks = lambda like: own(like).roll(1)
        return module

    OwnHeads._apply = off  # type: ignore[method-assign]
    return steps(rank, world_size, tp, method, "none", WINDOWED)


def with_a_window_one_off(rank: int, world_size: int, tp: int, method: str) -> list[Step]:
    return steps(rank, world_size, tp, method, "none", replace(WINDOWED, window_size="6,0"))


@pytest.mark.parametrize(
    ("wrong", "tp", "method"),
    [
        (with_sinks_of_other_heads, 1, "ulysses"),
        (with_sinks_one_head_off, 2, "zigzag"),
        (with_a_window_one_off, 1, "ulysses"),
        (with_a_window_one_off, 1, "zigzag"),
    ],
)
def test_sinks_of_other_heads_and_windows_one_off_would_be_seen(
    wrong: Callable[..., list[Step]], tp: int, method: str
) -> None:
    ((step,), *_) = run_ranks(wrong, 2, tp, method)
    assert difference(step, one_process(WINDOWED)) > 1000 * GRADIENT
