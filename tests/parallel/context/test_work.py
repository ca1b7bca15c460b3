"""Plans are made of runs alone: a twin that writes every position out agrees, and a million tokens take no longer."""

import random

import numpy as np
import pytest

from parallel.context import METHODS, ContextError, layout, make_plan
from parallel.context.tiles import Piece, tiles
from parallel.context.traffic import bytes_of_all, sizes, whole_traffic
from tests.parallel.context.sparse.play import drawn

MILLION = 1 << 20


def written_out(positions, stride, boundaries):
    """The pieces of ascending positions, found by looking at each of them."""
    documents = np.searchsorted(boundaries, positions, side="right")
    breaks = np.flatnonzero((np.diff(positions) != stride) | (np.diff(documents) != 0)) + 1
    starts, stops = [0, *breaks.tolist()], [*breaks.tolist(), len(positions)]
    return [
        Piece(int(positions[start]), start, stop - start, int(documents[start]))
        for start, stop in zip(starts, stops, strict=True)
    ]


def plans(seeds):
    """Any methods, sizes, options and masks that go together."""
    for draw in map(random.Random, seeds):
        yield drawn(draw, draw.choice(sorted(METHODS)), draw.choice([*range(1, 19), 64]))


@pytest.mark.parametrize("first", [0, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("moves", ["kv", "queries"])
def test_tiles_are_those_of_positions_written_out_and_all_ranks_at_once_those_of_each(first, moves):
    for plan in plans(range(first, first + 60)):
        check_tiles(plan, moves)


def check_tiles(plan, moves):
    def positions(ranks):
        return np.sort(np.concatenate([plan.positions(rank).numpy() for rank in ranks]))

    stride, everyone = plan.layout.stride, plan.work(moves)
    apart = plan.geometry.method.name == "allgather" and stride > 1  # whose keys are joined rank by rank
    for rank in range(plan.size):
        place = plan.geometry.place(rank)
        for index, step in enumerate(plan.rounds(rank, moves)):
            found = everyone.pairs[index, place], everyone.tiles[index, place]
            assert found == (step.pairs, len(step.tiles))
            areas = sum((tile.q.stop - tile.q.start) * (tile.k.stop - tile.k.start) for tile in step.tiles)
            assert everyone.hidden[index, place] == areas - step.pairs
            if step.gradient is None or apart:
                continue
            sides = [written_out(positions(r), stride, plan.boundaries) for r in (plan.geometry.team(rank), step.holds)]
            assert step.tiles == tiles(*(sides if moves == "kv" else sides[::-1]), stride, plan.mask.reach)


@pytest.mark.parametrize("moves", [None, "kv", "queries"])
def test_bytes_of_all_ranks_are_the_sum_of_each(moves):
    for seed, plan in enumerate(plans(range(40))):
        per_node = 1 + seed % 8
        of = sizes(plan.geometry, 1, 8 * plan.geometry.ulysses_degree, 8 * plan.geometry.ulysses_degree, 16, 2)
        inside = between = 0
        for rank in range(plan.size):
            sent = whole_traffic(plan.geometry, rank, of, moves, plan.boundaries)
            crossing = sent.between_nodes(rank, per_node)
            inside, between = inside + sent.total - crossing, between + crossing
        assert bytes_of_all(plan.geometry, of, moves, per_node, plan.boundaries) == (inside, between)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("zigzag", {}),
        ("striped", {}),
        ("wallfacer", {"team_size": 4}),
        ("double_ring", {"ranks_per_node": 8}),
        ("ulysses", {}),
    ],
)
def test_a_million_tokens_on_512_ranks_take_no_positions(method, options, monkeypatch):
    """Every unmasked pair is counted once over all ranks, and nobody asks where each token lies."""
    monkeypatch.delattr(layout.Layout, "positions")
    plan = make_plan(method, seq_len=MILLION, size=512, **options)
    work = plan.work()
    assert int(work.pairs.sum()) == MILLION * (MILLION + 1) // 2
    assert [step.pairs for step in plan.rounds(77)] == work.pairs[:, plan.geometry.place(77)].tolist()
    assert plan.cost(77, batch=1, heads=512, kv_heads=512, head_dim=128, element_size=2).forward.total > 0
    with pytest.raises(AttributeError):
        plan.positions(77)


def test_a_rank_outside_is_refused():
    with pytest.raises(ContextError, match="rank 4 is not among 4"):
        make_plan("zigzag", seq_len=64, size=4).rounds(4)
