"""Plans are made of runs alone: a twin that writes every position out agrees, and a million tokens take no longer."""

import random
from itertools import product
from typing import Any

import numpy as np
import pytest

from parallel.context import METHODS, ContextError, Plan, layout, make_plan
from parallel.context.tiles import Piece, pieces, tiles
from parallel.context.traffic import Moves, bytes_of_all, sizes, whole_traffic
from parallel.context.work import Sets, Work, work

MILLION = 1 << 20


def written_out(positions: np.ndarray, stride: int, boundaries: tuple[int, ...]) -> list[Piece]:
    """The pieces of ascending positions, found by looking at each of them."""
    documents = np.searchsorted(boundaries, positions, side="right")
    breaks = np.flatnonzero((np.diff(positions) != stride) | (np.diff(documents) != 0)) + 1
    starts, stops = [0, *breaks.tolist()], [*breaks.tolist(), len(positions)]
    return [
        Piece(int(positions[start]), start, stop - start, int(documents[start]))
        for start, stop in zip(starts, stops, strict=True)
    ]


def any_plan(seed: int) -> Plan:
    """Any method, size, team, degree, layout, mask and documents that go together."""
    draw = random.Random(seed)
    method, size = draw.choice(sorted(METHODS)), draw.randint(1, 18)
    able, divisors = METHODS[method].capabilities(), [n for n in range(1, size + 1) if size % n == 0]
    options: dict[str, Any] = {"causal": draw.random() < 0.7}
    if not able.splits_heads:
        options["ulysses_degree"] = draw.choice([1, draw.choice(divisors)])
    places = size // options.get("ulysses_degree", 1)
    if able.teams:
        options["team_size"] = draw.choice([n for n in range(1, 5) if places % n**2 == 0])
        options["placement"] = draw.choice(["collect_intra", "p2p_intra"])
    if able.nodes:
        inner = draw.choice([n for n in divisors if places % n == 0])
        options["ranks_per_node"] = inner * options["ulysses_degree"]
    options["layout"] = draw.choice(["auto", *able.layouts])
    length = draw.randint(1, 12 * size)
    cuts = sorted(draw.sample(range(1, length), draw.randint(0, min(4, length - 1))))
    documents = (0, *cuts, length) if cuts else None
    return make_plan(method, seq_len=length, size=size, documents=documents, **options)


@pytest.mark.parametrize("first", range(0, 120, 40))
@pytest.mark.parametrize("moves", ["kv", "queries"])
def test_tiles_are_those_of_positions_written_out_and_all_ranks_at_once_those_of_each(first: int, moves: Moves) -> None:
    for plan in map(any_plan, range(first, first + 40)):
        check_tiles(plan, moves)


def check_tiles(plan: Plan, moves: Moves) -> None:
    def positions(ranks: tuple[int, ...]) -> np.ndarray:
        return np.sort(np.concatenate([plan.positions(rank).numpy() for rank in ranks]))

    stride, everyone = plan.geometry.layout.stride, plan.work(moves)
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
            reach = (None, 0 if plan.causal else None)
            assert step.tiles == tiles(*(sides if moves == "kv" else sides[::-1]), stride, reach)


@pytest.mark.parametrize("layout_name", layout.LAYOUTS)
@pytest.mark.parametrize("ahead", [0, None, 2])
def test_windows_documents_and_padding_of_all_places_at_once_are_those_of_each(
    layout_name: str, ahead: int | None
) -> None:
    draw = random.Random(f"{layout_name} {ahead}")
    for size in (1, 2, 5, 16, 64):
        length = layout.padded_length(layout_name, draw.randint(4 * size, 12 * size), size)
        cuts = tuple(sorted(draw.sample(range(1, length), 3)))
        placed = layout.Layout(layout_name, length, size)
        held = [pieces(placed.strides(rank), placed.stride, cuts) for rank in range(size)]
        held = [[p._replace(document=-1) if p.document == 3 else p for p in pieces] for pieces in held]
        ranks = np.arange(size)
        pairings = [(ranks, (ranks - shift) % size) for shift in {0, 1, size // 2}]
        for behind in (None, 0, draw.randint(1, size), length // 4):
            reach = behind, ahead
            everyone = work(Sets(held), Sets(held), [None, *pairings], placed.stride, reach)
            for index, rank in product(range(1, 1 + len(pairings)), range(size)):
                made = tiles(held[rank], held[pairings[index - 1][1][rank]], placed.stride, reach)
                got = everyone.pairs[index, rank], everyone.tiles[index, rank]
                assert got == (sum(tile.pairs for tile in made), len(made))


@pytest.mark.parametrize("moves", [None, "kv", "queries"])
def test_bytes_of_all_ranks_are_the_sum_of_each(moves: Moves | None) -> None:
    for seed in range(40):
        plan, per_node = any_plan(seed), 1 + seed % 8
        of = sizes(plan.geometry, 1, 8 * plan.geometry.ulysses_degree, 8 * plan.geometry.ulysses_degree, 16, 2)
        inside = between = 0
        for rank in range(plan.size):
            arguments = plan.geometry, rank, of
            if moves is None:
                sent = whole_traffic(*arguments, None, plan.boundaries)
            else:
                sent = whole_traffic(*arguments, moves, plan.boundaries)
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
def test_a_million_tokens_on_512_ranks_take_no_positions(
    method: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every unmasked pair is counted once over all ranks, and nobody asks where each token lies."""
    monkeypatch.delattr(layout.Layout, "positions")
    plan = make_plan(method, seq_len=MILLION, size=512, **options)
    work: Work = plan.work()
    assert int(work.pairs.sum()) == MILLION * (MILLION + 1) // 2
    assert [step.pairs for step in plan.rounds(77)] == work.pairs[:, plan.geometry.place(77)].tolist()
    assert plan.cost(77, batch=1, heads=512, kv_heads=512, head_dim=128, element_size=2).forward.total > 0
    with pytest.raises(AttributeError):
        plan.positions(77)


def test_a_rank_outside_is_refused() -> None:
    with pytest.raises(ContextError, match="rank 4 is not among 4"):
        make_plan("zigzag", seq_len=64, size=4).rounds(4)
