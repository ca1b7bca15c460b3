"""Rounds by which states pass along segments.

They say who learns of whom, in how many rounds, and how many bytes.
"""

import pytest

from parallel.context import make_plan
from parallel.context.linear.segments import cut, rounds, schedule_of
from tests.compositions import CONSECUTIVE
from tests.parallel.context.linear.cases import CU_SEQLENS, delta_traffic


def plans(size, schedule):
    for method, options in CONSECUTIVE:
        for cu_seqlens in (None, CU_SEQLENS, tuple(range(252))):
            yield make_plan(
                method,
                seq_len=251,
                size=size,
                documents=cu_seqlens,
                delta_rule_schedule=schedule,
                **options,
            )


@pytest.mark.parametrize("schedule", ["chain", "tree"])
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4, 7, 16])
def test_every_segment_ends_with_the_map_of_all_before_it(schedule, gradient, size):
    for plan in plans(size, schedule):
        place = {x: x.num_after if gradient else x.depth for chain in cut(plan) for x in chain}
        first = dict(place)  # of the segments whose map each knows, up to itself alone
        for messages in rounds(plan, gradient=gradient):
            sent = [(message, first[message.source]) for message in messages]
            for message, begin in reversed(sent):
                assert message.state == (begin == 0)
                assert place[message.source] == first[message.target] - 1  # next to what it knows
                first[message.target] = begin
        assert not any(first.values())


@pytest.mark.parametrize(
    ("schedule", "size", "count", "max_bytes"),
    [
        # MiB of a rank: states of 2, maps of 4
        ("chain", 8, 7, 2),
        ("chain", 32, 31, 2),
        ("tree", 8, 3, 10),
        ("tree", 32, 5, 18),
    ],
)
def test_rounds_and_bytes_are_those_of_the_page(schedule, size, count, max_bytes):
    plan = make_plan("ring", seq_len=8 * size, size=size, delta_rule_schedule=schedule)
    for gradient in (False, True):
        assert len(rounds(plan, gradient=gradient)) == count
        assert (
            max(delta_traffic(plan, rank, 2, 2, gradient=gradient).total for rank in range(size))
            == max_bytes
        )


def test_auto_takes_the_tree_for_long_chains():
    options = {"seq_len": 1024, "documents": (0, 1000, 1024)}
    assert schedule_of(make_plan("ring", size=8, **options)) == "chain"
    assert schedule_of(make_plan("ring", size=10, **options)) == "tree"
    assert schedule_of(make_plan("zigzag", size=8, **options)) == "tree"
    assert (
        schedule_of(make_plan("zigzag", size=8, seq_len=1024, documents=tuple(range(0, 1025, 16))))
        == "chain"
    )
    assert (
        schedule_of(make_plan("ring", size=10, delta_rule_schedule="chain", **options)) == "chain"
    )
