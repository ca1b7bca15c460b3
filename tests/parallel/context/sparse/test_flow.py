"""Routes of rows and gradients, played out on all ranks without processes: see ``play``."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.context import METHODS, Plan, make_plan
from parallel.context.sparse import flow
from parallel.context.sparse.rows import rows_seen
from tests.parallel.context.sparse.play import Play, drawn, visible

BOTH = ("kv", "queries")
CU_SEQLENS = (0, 9, 10, 41, 70, 96)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(draw=st.randoms(use_true_random=False), size=st.integers(1, 16), moves=st.sampled_from(BOTH))
def test_all_ranks_compute_each_visible_pair_once_and_send_what_is_seen_alone(
    method, draw, size, moves
):
    Play(drawn(draw, method, size), moves).run()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=100, deadline=None)
@given(draw=st.randoms(use_true_random=False), size=st.integers(1, 64), moves=st.sampled_from(BOTH))
def test_the_same_for_other_masks_in_every_run_and_up_to_64_ranks(method, draw, size, moves):
    Play(drawn(draw, method, size), moves).run()


def crossings(sent, gradients, per_node, degree):
    """Arrivals of each row, per heads, at each other node.

    Of a gradient, its departures from each other node.
    """
    counts = Counter()
    for transfer in sent:
        nodes = transfer.sender // per_node, transfer.receiver // per_node
        if nodes[0] != nodes[1]:
            far = nodes[0 if gradients else 1]
            counts.update(
                (far, transfer.sender % degree, position)
                for position in transfer.positions.tolist()
            )
    return counts


@pytest.mark.parametrize(
    ("size", "per_node", "degree"), [(4, 2, 1), (8, 4, 2), (9, 3, 1), (12, 4, 1), (16, 8, 4)]
)
def test_exchange_sends_each_row_once_to_each_node_and_its_gradient_once_from_there(
    size, per_node, degree
):
    draw, several = random.Random(size), 0
    for moves, mask in zip(BOTH, ({}, {"window": (3 * size, 0), "layout": "zigzag"}), strict=True):
        cu_seqlens = (0, *sorted(draw.sample(range(1, 5 * size), 2)), 5 * size)
        options = {"documents": cu_seqlens, "ulysses_degree": degree, **mask}
        played, control = (
            Play(
                make_plan("exchange", seq_len=5 * size, size=size, ranks_per_node=node, **options),
                moves,
            ).run()
            for node in (per_node, None)
        )
        for gradients in (False, True):
            sent, without_nodes = (
                (x.gradients if gradients else x.rows) for x in (played, control)
            )
            once = crossings(sent, gradients, per_node, degree)
            more = crossings(without_nodes, gradients, per_node, degree)
            assert set(once.values()) <= {1}
            assert once.keys() == more.keys()
            several += max(more.values(), default=0) > 1
    assert several, "negative control: without nodes, rows cross more than once"


def one_row_short(who, whose, first, end, rows):
    """Without the first row of what one place sees of another's."""
    chosen = np.flatnonzero(who != whose)[0]
    return who, whose, first + (np.arange(len(first)) == chosen), end


def one_row_more(who, whose, first, end, rows):
    """With the row before the first one, or after the last one, that a place sees of another's."""
    for reader, owner in {*zip(who.tolist(), whose.tolist(), strict=True)}:
        rows_of_pair = np.flatnonzero((who == reader) & (whose == owner))
        first_row, last = (
            rows_of_pair[first[rows_of_pair].argmin()],
            rows_of_pair[end[rows_of_pair].argmax()],
        )
        if reader != owner and first[first_row] > 0:
            return who, whose, first - (np.arange(len(first)) == first_row), end
        if reader != owner and end[last] < rows:
            return who, whose, first, end + (np.arange(len(end)) == last)
    raise AssertionError("every place sees all or nothing of another's")


@pytest.mark.parametrize("moves", BOTH)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (one_row_short, "gradients that reach rank|pairs computed for rank"),
        (one_row_more, "a row is sent that no|gradient of 0"),
    ],
)
def test_a_row_too_few_and_a_row_too_many_are_seen(moves, change, message, monkeypatch):
    for method in ("ring", "allgather", "exchange", "double_ring"):
        named = {"layout": "contiguous"} if len(METHODS[method].layouts) > 1 else {}
        plan = make_plan(method, seq_len=96, size=4, documents=CU_SEQLENS, window=(20, 0), **named)
        Play(Plan(plan.geometry, plan.mask), moves).run()
        with monkeypatch.context() as patch:
            patch.setattr(flow, "rows_seen", lambda *args: change(*rows_seen(*args), rows=24))
            with pytest.raises(AssertionError, match=message):
                Play(Plan(plan.geometry, plan.mask), moves).run()


@pytest.mark.parametrize("method", METHODS)
def test_a_boundary_ignored_and_a_window_off_by_one_are_seen(method):
    plan = make_plan(method, seq_len=96, size=4, documents=CU_SEQLENS, window=(20, 0))
    for cu_seqlens, window in (
        ((0, 9, 41, 70, 96), (20, 0)),
        (CU_SEQLENS, (19, 0)),
        (CU_SEQLENS, (21, 0)),
    ):
        wrong = Plan(
            plan.geometry, plan.under(cu_seqlens=cu_seqlens, window=window).mask, plan.mask
        )
        with pytest.raises(AssertionError, match=r"rank \d"):
            Play(wrong, "kv", visible(plan)).run()
    Play(plan, "kv", visible(plan)).run()


def test_a_gradient_returns_to_its_owner_before_it_goes_on():
    """An owner in a team that holds its rows again amid the rounds keeps its own part.

    It keeps the parts that came, too.
    """
    plan = make_plan(
        "wallfacer", seq_len=79, size=12, team_size=2, documents=(0, 34, 79), layout="zigzag"
    )
    amid = [
        (rank, i)
        for rank in range(12)
        for i, step in enumerate(plan.schedule(rank))
        if i not in (0, len(plan.geometry.rounds) - 1)
        and any(p.peer == rank for p in step.gradients.sends)
    ]
    assert amid
    Play(plan, "kv").run()
