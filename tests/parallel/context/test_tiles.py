"""Tiles and work against brute force, for random documents, windows and runs.

A million tokens take no longer.
"""

import random

import numpy as np
import pytest

from kernels.attention import ANTI, CAUSAL, FULL
from kernels.blocks import Tile
from parallel.context import METHODS, ContextError, layout, make_plan
from parallel.context.layout import Stride
from parallel.context.tiles import Piece, pieces, tiles
from parallel.context.traffic import bytes_of_all, sizes, whole_traffic
from tests.parallel.context.sparse.play import drawn

MASKS = {CAUSAL: np.tril, ANTI: np.triu, FULL: lambda block: block}


def spelled_out(piece_list, stride):
    """Positions and documents of the pieces, row by row."""
    positions = [np.arange(p.start, p.start + p.length * stride, stride) for p in piece_list]
    return np.concatenate(positions), np.repeat(
        [p.document for p in piece_list], [p.length for p in piece_list]
    )


def visible(queries, keys, stride, reach):
    (q, q_document), (k, k_document) = spelled_out(queries, stride), spelled_out(keys, stride)
    behind, ahead = (10**9 if limit is None else limit for limit in reach)
    distance = k - q[:, None]
    return (
        (q_document[:, None] == k_document)
        & (q_document >= 0)[:, None]
        & (-behind <= distance)
        & (distance <= ahead)
    )


def covered(tile_list, shape):
    """The times that each pair is computed.

    No tile has a wrong shape or count, or a masked row or column.
    """
    counts = np.zeros(shape, dtype=np.int64)
    for tile in tile_list:
        mask = MASKS[tile.kind](
            np.ones((tile.q.stop - tile.q.start, tile.k.stop - tile.k.start), dtype=np.int64)
        )
        assert tile.kind == FULL or mask.shape[0] == mask.shape[1]
        assert mask.sum() == tile.pairs
        assert mask.any(axis=0).all()
        assert mask.any(axis=1).all()
        counts[tile.q, tile.k] += mask
    return counts


def any_pieces(draw, length, stride):
    runs, start = [], draw.randrange(stride)
    while start < length:
        run = Stride(start, draw.randint(1, 1 + (length - start) // stride))
        runs.append(run)
        start += run.length * stride + draw.choice([0, 1, 2, stride])
    return pieces(runs, stride, tuple(sorted(draw.sample(range(1, length), 3))))


@pytest.mark.parametrize("stride", [1, 2, 5, 8])
@pytest.mark.parametrize("ahead", [0, None, 3])
def test_every_visible_pair_is_computed_once(stride, ahead):
    draw = random.Random(f"{stride} {ahead}")
    for _ in range(150):
        length = draw.randint(8, 60)
        queries, keys = (any_pieces(draw, length, stride) for _ in range(2))
        for behind in (None, 0, draw.randint(1, stride), draw.randint(1, 20), length):
            reach = behind, ahead
            want = visible(queries, keys, stride, reach)
            np.testing.assert_array_equal(
                covered(tiles(queries, keys, stride, reach), want.shape), want, str(reach)
            )


def test_padding_sees_nothing_and_is_not_seen():
    pieces = [Piece(0, 0, 4, 0), Piece(4, 4, 3, -1)]
    for reach in ((None, 0), (None, None), (2, 2)):
        assert covered(tiles(pieces, pieces, 1, reach), (7, 7))[:, 4:].sum() == 0
        assert (
            sum(tile.pairs for tile in tiles(pieces, pieces, 1, reach))
            == visible(pieces, pieces, 1, reach).sum()
        )


def test_the_next_window_has_other_tiles():
    """Negative control: brute force sees a window that is one key too wide or too narrow."""
    (window_pieces,) = (any_pieces(random.Random(3), 60, 1),)
    for wrong in (6, 8):
        got = covered(
            tiles(window_pieces, window_pieces, 1, (wrong, 0)),
            visible(window_pieces, window_pieces, 1, (7, 0)).shape,
        )
        assert (got != visible(window_pieces, window_pieces, 1, (7, 0))).any()


def test_what_lies_together_is_joined():
    two = [Piece(0, 0, 4, 0), Piece(8, 4, 4, 0)]
    assert tiles(two, two, 1, (None, 0)) == (Tile(slice(0, 8), slice(0, 8), CAUSAL),)
    assert tiles(two, two, 1, (0, None)) != tiles(two, two, 1, (None, 0))
    assert tiles(two, two, 1, (0, None)) == (Tile(slice(0, 8), slice(0, 8), ANTI),)
    assert tiles(two, two, 1, (None, None)) == (Tile(slice(0, 8), slice(0, 8), FULL),)


MILLION = 1 << 20


def written_out(positions, stride, boundaries):
    """The pieces of ascending positions, found by looking at each of them."""
    document = np.searchsorted(boundaries, positions, side="right")
    breaks = np.flatnonzero((np.diff(positions) != stride) | (np.diff(document) != 0)) + 1
    starts, stops = [0, *breaks.tolist()], [*breaks.tolist(), len(positions)]
    return [
        Piece(int(positions[start]), start, stop - start, int(document[start]))
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
    gathers_all = plan.geometry.method.name in ("allgather", "allgather_q")
    apart = gathers_all and stride > 1  # joined rank by rank
    for rank in range(plan.size):
        place = plan.geometry.place(rank)
        for index, step in enumerate(plan.rounds(rank, moves)):
            counted = everyone.pairs[index, place], everyone.tiles[index, place]
            assert counted == (step.pairs, len(step.tiles))
            areas = sum(
                (tile.q.stop - tile.q.start) * (tile.k.stop - tile.k.start) for tile in step.tiles
            )
            assert everyone.hidden[index, place] == areas - step.pairs
            masked = [tile for tile in step.tiles if tile.kind != FULL]
            assert everyone.masked[index, place] == sum(tile.pairs for tile in masked)
            assert everyone.rounded[index, place] == 0
            if step.gradient is None or apart:
                continue
            sides = [
                written_out(positions(r), stride, plan.boundaries)
                for r in (plan.geometry.team(rank), step.holds)
            ]
            assert step.tiles == tiles(
                *(sides if moves == "kv" else sides[::-1]), stride, plan.mask.reach
            )


@pytest.mark.parametrize("block", [(1, 1), (2, 3), (4, 2), (8, 8), (64, 1)])
@pytest.mark.parametrize("kind", [CAUSAL, ANTI])
def test_a_block_with_a_visible_pair_is_computed_whole(kind, block):
    """Blocks of an ANTI tile begin at its last row and column, since it is a mirrored CAUSAL."""
    for side in (1, 2, 7, 16, 19):
        visible_pairs = np.tril(np.ones((side, side), bool))
        computed = np.zeros_like(visible_pairs)
        for row in range(0, side, block[0]):
            for column in range(0, side, block[1]):
                part = slice(row, row + block[0]), slice(column, column + block[1])
                computed[part] = visible_pairs[part].any()
        tile = Tile(slice(5, 5 + side), slice(3, 3 + side), kind)
        assert tile.rounded(block) == computed.sum() - visible_pairs.sum()
        assert 0 <= tile.rounded(block) <= tile.hidden


def test_a_plan_counts_the_pairs_of_blocks_that_the_mask_cuts():
    """Section 3.2 of Striped Attention: with 4,096 tokens a rank, the A100's tiles save nothing."""
    plan = make_plan("striped", seq_len=4 * 4096, size=4)
    exact, coarse = plan.work(), plan.work(block=(2048, 4096))
    assert (exact.rounded == 0).all()
    assert (coarse.rounded[0] == coarse.hidden[0]).all()
    for name in ("pairs", "tiles", "hidden", "masked"):
        assert (getattr(exact, name) == getattr(coarse, name)).all()
    finer = plan.work(block=(2048, 2048))
    assert (finer.rounded < coarse.rounded).all()


@pytest.mark.parametrize("moves", [None, "kv", "queries"])
def test_bytes_of_all_ranks_are_the_sum_of_each(moves):
    for seed, plan in enumerate(plans(range(40))):
        per_node = 1 + seed % 8
        shape_sizes = sizes(
            plan.geometry,
            1,
            8 * plan.geometry.ulysses_degree,
            8 * plan.geometry.ulysses_degree,
            16,
            2,
        )
        inside = between = 0
        for rank in range(plan.size):
            sent = whole_traffic(plan.geometry, rank, shape_sizes, moves, plan.boundaries)
            crossing = sent.between_nodes(rank, per_node)
            inside, between = inside + sent.total - crossing, between + crossing
        assert bytes_of_all(plan.geometry, shape_sizes, moves, per_node, plan.boundaries) == (
            inside,
            between,
        )


@pytest.mark.parametrize(
    ("method", "options"),
    [("striped", {}), ("wallfacer", {"team_size": 4}), ("double_ring", {"ranks_per_node": 8})],
)
def test_a_million_tokens_on_512_ranks_take_no_positions(method, options, monkeypatch):
    """Every unmasked pair is counted once over all ranks, and nobody asks where each token lies."""
    monkeypatch.delattr(layout.Layout, "positions")
    plan = make_plan(method, seq_len=MILLION, size=512, **options)
    work = plan.work()
    assert int(work.pairs.sum()) == MILLION * (MILLION + 1) // 2
    assert [step.pairs for step in plan.rounds(77)] == work.pairs[
        :, plan.geometry.place(77)
    ].tolist()
    assert (
        plan.cost(77, batch=1, heads=512, kv_heads=512, head_dim=128, element_size=2).forward.total
        > 0
    )
    with pytest.raises(AttributeError):
        plan.positions(77)


def test_a_rank_outside_is_refused():
    with pytest.raises(ContextError, match="rank 4 does not exist"):
        make_plan("zigzag", seq_len=64, size=4).rounds(4)
