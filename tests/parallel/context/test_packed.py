"""Packed documents, windows and sinks under every method on real ranks: against float64, and bytes against the plan."""

from itertools import product

import pytest
import torch

from parallel.context import METHODS
from parallel.context.circulation import Needed
from parallel.context.transport import HeadExchange
from runtime.ranks import run_ranks
from tests.parallel.context.attended import DOCUMENTS, Masked, Ranks, attended, check, error, truth

VARIANTS = {
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
FULL_CASE = Masked(DOCUMENTS, (9, 0), sinks=True)
MASKS = (
    Masked(DOCUMENTS),
    Masked(window=(9, 0)),
    Masked(DOCUMENTS, (9, 0)),
    Masked(sinks=True),
    Masked(DOCUMENTS, causal=False),
    FULL_CASE,
    Masked(window=(9, 4), causal=False),
)
TINY = {
    Masked((0, 2, 5), length=5): "kv",
    Masked((0, 4, 5), causal=False, length=5): "queries",
    Masked((0, 1, 5), (1, 0), sinks=True, length=5): "queries",
}
"""Masks of five tokens, and what their backwards move."""


def methods(world_size):
    """Every method alone, and with options."""
    return [*((name, {}) for name in METHODS), *VARIANTS[world_size]]


def by_turns(world_size, masks):
    """Every method under one of these masks, and with one of the backwards."""
    return [
        (method, {**options, "backward": MOVES[i % 2]}, masks[i % len(masks)])
        for i, (method, options) in enumerate(methods(world_size))
    ]


def some_cases(world_size):
    """Every method under every mask, of which 4 and 8 ranks share the work; dtypes and backwards by turns."""
    first, apart = {4: (0, 2), 8: (1, 2)}.get(world_size, (0, 1))
    return [
        (method, {**options, "backward": MOVES[(i + world_size // 2) % 2]}, mask, DTYPES[(i + j) % 3])
        for i, (method, options) in enumerate(methods(world_size))
        for j, mask in [*enumerate(MASKS)][(i + first) % apart :: apart]
    ]


@pytest.mark.parametrize("world_size", [1, 2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_every_method_is_exact_under_every_mask_and_sends_what_the_plan_says(world_size):
    check(world_size, some_cases(world_size))


def test_ranks_without_a_token_of_the_sequence_take_part():
    """Five tokens on four ranks: one holds padding alone, some send and receive nothing."""
    cases = [
        (method, {**options, "backward": moves}, mask, torch.float64)
        for method, options in methods(4)
        for mask, moves in TINY.items()
    ]
    check(4, cases[::2])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", VARIANTS)
def test_the_same_for_every_dtype_and_both_directions_of_the_backward(world_size):
    for dtype in DTYPES:  # not all tensors at once
        every = product(methods(world_size), MOVES, MASKS)
        check(world_size, [(name, {**options, "backward": on}, mask, dtype) for (name, options), on, mask in every])


def attend_broken(rank, world_size, method, options, broken):
    """Attend with sinks, a window and documents, each time with something else broken."""
    ranks, found = Ranks(), []
    own, filled = HeadExchange.own, Needed._filled

    def one_row_short(self, *args):
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
def test_what_is_wrong_in_silence_is_seen(method, options):
    """Negative controls of all comparisons here."""
    broken = ["nothing", "a boundary", "a window too narrow", "a window too wide", "the halo", "the heads of sinks"]
    want = truth(FULL_CASE, torch.float64)
    found = run_ranks(attend_broken, 4, method, options, broken)[0]
    for what, got in zip(broken, found, strict=True):
        errors = error(got, want)
        assert max(errors) < 1e-12 if what == "nothing" else min(errors[:4]) > 1e-3, (what, errors)
