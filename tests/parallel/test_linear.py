"""A step of the models with linear attention, whose ranks pass states on, is that of one process."""

from functools import cache
from typing import Any

import pytest
from torch import Tensor

from model.attention import linear
from model.config import ModelConfig
from parallel.context.transport import Transport
from parallel.data import DataParallelConfig, Strategy
from parallel.mesh import joined
from parallel.recompute import RecomputeConfig
from tests.parallel.split import PLAIN, Step, config, difference, mesh_config, plain, split_step, whole_step
from tests.ranks import run_ranks

LOSS, GRADIENT = 2e-6, 1e-7
Case = tuple[str, str, int, Strategy, str]
"""Kind of model, method, cp, data-parallel strategy, recompute policy."""
# Ranks to cases: every strategy with either method, on cp alone and on dp 2 x cp 2.
CASES: dict[int, list[Case]] = {
    2: [
        ("transnormer", "lasp", 2, "zero3", "attention_boundary"),
        ("linear_transformer", "lasp", 2, "legacy_ddp", "full"),
        ("linear_transformer", "lasp2", 2, "zero2", "selective"),
    ],
    4: [
        ("transnormer", "lasp", 4, "ddp", "none"),
        ("linear_transformer", "lasp2", 4, "zero3", "none"),
        ("transnormer", "lasp2", 4, "zero3", "full"),
        *(("transnormer", "lasp", 2, strategy, "none") for strategy in ("ddp", "zero1", "zero3")),
        *(("linear_transformer", "lasp2", 2, strategy, "none") for strategy in ("legacy_ddp", "zero2")),
    ],
}


def shape(kind: str) -> ModelConfig:
    return config(model_type=kind, num_query_groups=None)


@cache
def one_process(kind: str) -> Step:
    return whole_step(shape(kind), plain(shape(kind), linear))


def steps(rank: int, world_size: int, cases: list[Case]) -> list[tuple[Step, int]]:
    """The step of every case and how many states this rank sent in it to its neighbours."""
    found = []
    sent: list[int] = []
    send = Transport.send

    def counted(self: Transport, tensor: Tensor, target: int) -> Any:
        sent.append(target)
        return send(self, tensor, target)

    Transport.send = counted  # type: ignore[method-assign]
    for kind, method, cp, strategy, policy in cases:
        sent.clear()
        recompute = PLAIN if policy == "none" else RecomputeConfig(recompute_granularity=policy)  # type: ignore[arg-type]
        with joined(mesh_config(cp=cp)) as mesh:
            sharding = DataParallelConfig(data_parallel_sharding_strategy=strategy)
            found.append((split_step(mesh, shape(kind), recompute, sharding, method=method)[1], len(sent)))
    return found


@pytest.mark.parametrize("ranks", CASES)
def test_a_step_over_ranks_is_that_of_one_process(ranks: int) -> None:
    for result in run_ranks(steps, ranks, CASES[ranks]):
        for case, (got, _) in zip(CASES[ranks], result, strict=True):
            want = one_process(case[0])
            assert abs(got.loss - want.loss) < LOSS, case
            assert difference(got, want) < GRADIENT, case


def test_a_kept_state_is_not_passed_on_again() -> None:
    """Rank 0 of 2 sends one state per layer forward; a policy that computes the attention again sends it again."""
    cases: list[Case] = [
        ("transnormer", "lasp", 2, "ddp", policy) for policy in ("none", "attention_boundary", "full", "selective")
    ]
    first, last = run_ranks(steps, 2, cases)
    assert [count for _, count in first] == [2, 2, 4, 4]
    assert [count for _, count in last] == [2, 2, 2, 2]


def undecayed(rank: int, world_size: int, cases: list[Case]) -> list[tuple[Step, int]]:
    from parallel.context import state

    state.passed_on = lambda carried, *_: carried
    return steps(rank, world_size, cases)


def test_a_state_that_does_not_decay_on_its_way_would_be_seen() -> None:
    case: Case = ("transnormer", "lasp", 4, "ddp", "none")
    ((got, _),) = run_ranks(undecayed, 4, [case])[0]
    assert difference(got, one_process("transnormer")) > 100 * GRADIENT
