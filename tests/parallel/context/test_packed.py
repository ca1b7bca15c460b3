"""Packed documents, windows and sinks under every method on real ranks: against float64, and bytes against the plan."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel.context import METHODS
from parallel.context.circulation import Needed
from parallel.context.heads import HeadExchange
from testing.ranks import run_ranks
from tests.parallel.context.packed import MASKS, Ranks, attended, error, one_process_sdpa, truth

VARIANTS: dict[int, list[tuple[str, dict[str, Any]]]] = {
    1: [],
    2: [("exchange", {"layout": "striped"}), ("zigzag", {"ulysses_degree": 2})],
    4: [
        ("wallfacer", {"team_size": 2}),
        ("double_ring", {"ranks_per_node": 2}),
        ("exchange", {"ranks_per_node": 2, "layout": "zigzag"}),
        ("exchange", {"ulysses_degree": 2, "layout": "contiguous"}),
        ("allgather", {"layout": "balanced"}),
        ("striped", {"ulysses_degree": 2}),
    ],
    8: [
        ("wallfacer", {"team_size": 2, "layout": "striped"}),
        ("wallfacer", {"team_size": 2, "ulysses_degree": 2, "placement": "p2p_intra"}),
        ("double_ring", {"ranks_per_node": 4, "ulysses_degree": 2, "layout": "striped"}),
        ("exchange", {"ranks_per_node": 4}),
        ("exchange", {"ranks_per_node": 4, "ulysses_degree": 2}),
        ("exchange", {"ranks_per_node": 2, "layout": "contiguous"}),
    ],
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
MOVES = ("kv", "queries")
FULL_CASE = MASKS["sinks + window + documents"]
DSINKS = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
"""Relative error of dsinks, which torch's SDPA does not have; each rank rounds its own to the dtype."""

Case = tuple[str, dict[str, Any], str, torch.dtype]


def some_cases(world_size: int) -> list[Case]:
    """Every method under every mask (on 8 ranks under every other), by turns in each dtype and backward."""
    methods = [*((name, {}) for name in METHODS), *VARIANTS[world_size]]
    apart = 2 if world_size == 8 else 1
    return [
        (method, {**options, "backward": MOVES[(i + world_size // 2) % 2]}, mask, DTYPES[(i + j) % 3])
        for i, (method, options) in enumerate(methods)
        for j, mask in [*enumerate(MASKS)][i % apart :: apart]
    ]


def all_cases(world_size: int) -> list[Case]:
    methods = [*((name, {}) for name in METHODS), *VARIANTS[world_size]]
    return [
        (method, {**options, "backward": moves}, mask, dtype)
        for (method, options), moves, mask, dtype in product(methods, MOVES, MASKS, DTYPES)
    ]


def attend(rank: int, world_size: int, cases: list[Case]) -> list[tuple[list[Tensor], bool]]:
    """What each case attends to, on rank 0, and whether this rank sent what its plan says."""
    ranks, found = Ranks(), []
    for method, options, mask, dtype in cases:
        tensors, as_planned = attended(ranks, method, options, MASKS[mask], dtype)
        found.append((tensors if rank == 0 else [], as_planned))
    return found


def check(world_size: int, cases: list[Case]) -> None:
    results = run_ranks(attend, world_size, cases)
    for index, case in enumerate(cases):
        assert all(result[index][1] for result in results), f"{case}: bytes sent are not the plan's"
        *_, mask, dtype = case
        want = truth(MASKS[mask], dtype)
        if dtype == torch.float64:
            limits = [1e-12] * len(want)
        else:
            limits = [1.2 * limit for limit in error(one_process_sdpa(MASKS[mask], dtype), want[:4])]
            limits += [DSINKS[dtype]] * (len(want) - 4)
        names = ("out", "dq", "dk", "dv", "dsinks")
        for name, measured, limit in zip(names, error(results[0][index][0], want), limits, strict=False):
            assert measured <= limit, f"{case}: {name} has {measured:.3g}, the limit is {limit:.3g}"


@pytest.mark.parametrize("world_size", VARIANTS)
def test_every_method_is_exact_under_every_mask_and_sends_what_the_plan_says(world_size: int) -> None:
    check(world_size, some_cases(world_size))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", VARIANTS)
def test_the_same_for_every_dtype_and_both_directions_of_the_backward(world_size: int) -> None:
    check(world_size, all_cases(world_size))


def attend_broken(rank: int, world_size: int, method: str, options: dict[str, Any], broken: list[str]) -> Any:
    """Attend with sinks, a window and documents, each time with something else broken."""
    ranks, found = Ranks(), []
    own, filled = HeadExchange.own, Needed._filled

    def one_row_short(self: Needed, *args: Any) -> Any:
        tensors = tuple(x.clone() for x in filled(self, *args))
        for x in tensors:
            x[:, -1:] = 0
        return tensors

    for what in broken:
        masked = {
            "a boundary": FULL_CASE._replace(documents=(0, 7, 30, 80, 123)),
            "a window too narrow": FULL_CASE._replace(window=(8, 0)),
            "a window too wide": FULL_CASE._replace(window=(10, 0)),
        }.get(what, FULL_CASE)
        with pytest.MonkeyPatch.context() as patch:
            if what == "the halo":
                patch.setattr(Needed, "_filled", one_row_short)
            if what == "the heads of sinks":
                patch.setattr(HeadExchange, "own", lambda self, sinks: own(self, sinks).roll(1))
            found.append(attended(ranks, method, options, masked, torch.float64)[0])
    return found if rank == 0 else []


@pytest.mark.parametrize(
    ("method", "options"), [("exchange", {}), ("zigzag", {}), ("exchange", {"ulysses_degree": 2, "ranks_per_node": 2})]
)
def test_what_is_wrong_in_silence_is_seen(method: str, options: dict[str, Any]) -> None:
    """Negative controls of all comparisons here."""
    broken = ["nothing", "a boundary", "a window too narrow", "a window too wide", "the halo", "the heads of sinks"]
    want = truth(FULL_CASE, torch.float64)
    found = run_ranks(attend_broken, 4, method, options, broken)[0]
    for what, got in zip(broken, found, strict=True):
        errors = error(got, want)
        assert max(errors) < 1e-12 if what == "nothing" else min(errors[:4]) > 1e-3, (what, errors)
