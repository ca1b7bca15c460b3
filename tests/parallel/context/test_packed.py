"""Packed documents, windows and sinks under every method on real ranks: against float64, and bytes against the plan."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel.context import METHODS
from parallel.context.circulation import Needed
from parallel.context.heads import HeadExchange
from runtime.ranks import run_ranks
from tests.parallel.context.packed import MASKS, Masked, Ranks, attended, error, one_process_sdpa, truth

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
TINY = {
    "documents": Masked((0, 2, 5), length=5),
    "full mask + documents": Masked((0, 4, 5), causal=False, length=5),
    "sinks + window + documents": Masked((0, 1, 5), (1, 0), sinks=True, length=5),
}
DSINKS = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
"""Relative error of dsinks, which torch's SDPA does not have; each rank rounds its own to the dtype."""

Case = tuple[str, dict[str, Any], str, torch.dtype]


def some_cases(world_size: int) -> list[Case]:
    """Every method under every mask, of which 4 and 8 ranks share the work; dtypes and backwards by turns."""
    methods = [*((name, {}) for name in METHODS), *VARIANTS[world_size]]
    first, apart = {4: (0, 2), 8: (1, 2)}.get(world_size, (0, 1))
    return [
        (method, {**options, "backward": MOVES[(i + world_size // 2) % 2]}, mask, DTYPES[(i + j) % 3])
        for i, (method, options) in enumerate(methods)
        for j, mask in [*enumerate(MASKS)][(i + first) % apart :: apart]
    ]


def all_cases(world_size: int) -> list[Case]:
    methods = [*((name, {}) for name in METHODS), *VARIANTS[world_size]]
    return [
        (method, {**options, "backward": moves}, mask, dtype)
        for (method, options), moves, mask, dtype in product(methods, MOVES, MASKS, DTYPES)
    ]


def attend(rank: int, world_size: int, cases: list[Case], masks: dict[str, Masked]) -> list[tuple[list[Tensor], bool]]:
    """What each case attends to, on rank 0, and whether this rank sent what its plan says."""
    ranks, found = Ranks(), []
    for method, options, mask, dtype in cases:
        tensors, as_planned = attended(ranks, method, options, masks[mask], dtype)
        found.append((tensors if rank == 0 else [], as_planned))
    return found


def check(world_size: int, cases: list[Case], masks: dict[str, Masked] = MASKS) -> None:
    results = run_ranks(attend, world_size, cases, masks)
    for index, case in enumerate(cases):
        assert all(result[index][1] for result in results), f"{case}: bytes sent are not the plan's"
        *_, mask, dtype = case
        want = truth(masks[mask], dtype)
        if dtype == torch.float64:
            limits = [1e-12] * len(want)
        else:
            limits = [1.2 * limit for limit in error(one_process_sdpa(masks[mask], dtype), want[:4])]
            limits += [DSINKS[dtype]] * (len(want) - 4)
        names = ("out", "dq", "dk", "dv", "dsinks")
        for name, measured, limit in zip(names, error(results[0][index][0], want), limits, strict=False):
            assert measured <= limit, f"{case}: {name} has {measured:.3g}, the limit is {limit:.3g}"


@pytest.mark.parametrize("world_size", [1, 2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_every_method_is_exact_under_every_mask_and_sends_what_the_plan_says(world_size: int) -> None:
    check(world_size, some_cases(world_size))


def test_ranks_without_a_token_of_the_sequence_take_part() -> None:
    """Five tokens on four ranks: one holds padding alone, some send and receive nothing."""
    methods = [*((name, {}) for name in METHODS), *VARIANTS[4]]
    moves = {"documents": "kv", "full mask + documents": "queries", "sinks + window + documents": "queries"}
    cases = [
        (method, {**options, "backward": moves[mask]}, mask, torch.float64)
        for method, options in methods
        for mask in TINY
    ]
    check(4, cases[::2], TINY)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", VARIANTS)
def test_the_same_for_every_dtype_and_both_directions_of_the_backward(world_size: int) -> None:
    for dtype in DTYPES:  # not all tensors at once
        check(world_size, [case for case in all_cases(world_size) if case[-1] == dtype])


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
