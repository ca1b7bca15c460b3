"""Plans, without any process: who owns what, who sends what, and which pairs are computed where."""

import ast
import pickle
import random
from functools import cache, partial
from itertools import product

import numpy as np
import pytest
import torch

from kernels.attention import CAUSAL
from parallel.context import METHODS, ContextError, make_plan
from parallel.context.geometry import gather_order
from tests.compositions import EVERY
from tests.parallel.context.sparse.play import joined_positions

SIZES = (*range(1, 17), 24, 31, 33, 48)
PLANNED = [row for row in EVERY if row.options.get("layout") != "balanced"]
"""Without the balanced layout, of which each row that is needed travels alone: sparse/test_flow.py.
"""
BASIC = (
    "ring",
    "striped",
    "zigzag",
    "allgather",
)  # the others are these, with no team, one node or all heads


def coverage(plan, moves="kv"):
    """Count how often each pair of the padded sequence is computed for a head, over all ranks.

    The counts are [query, key].
    """

    joined = cache(partial(joined_positions, plan))
    counts = np.zeros((plan.padded_len, plan.padded_len), dtype=np.int64)
    for rank in range(0, plan.size, plan.geometry.ulysses_degree):
        for step in plan.rounds(rank, moves):
            pair = (plan.geometry.team(rank), step.holds)
            queries, keys = map(joined, pair if moves == "kv" else pair[::-1])
            for tile in step.tiles:
                q, k = queries[tile.q], keys[tile.k]
                assert len(q) == tile.q.stop - tile.q.start
                assert len(k) == tile.k.stop - tile.k.start
                mask = np.ones((len(q), len(k)), dtype=np.int64)
                counts[np.ix_(q, k)] += np.tril(mask) if tile.kind == CAUSAL else mask
    return counts


def visible(plan):
    """The pairs that the mask leaves; padding is a document of its own."""
    position = np.arange(plan.padded_len)
    boundaries = list(plan.cu_seqlens[1:-1]) if plan.cu_seqlens else []
    boundaries.append(plan.seq_len)
    document = np.searchsorted(boundaries, position, side="right")
    same = document[:, None] == document[None, :]
    return (same & (position[:, None] >= position[None, :])) if plan.causal else same


def check_transfers(geometry):
    """Sends match receives, and what arrives is what is held next.

    Gradients of all queries reach each KV's owner.
    """
    steps = [geometry.rounds_of(rank) for rank in range(geometry.size)]
    rounds = len(steps[0])
    held_by_rank = [{0: rank_steps[0].holds} for rank_steps in steps]
    part = [{} for _ in steps]  # by round: whose queries' gradient arrives, and of whose KV
    for index in range(rounds):
        for rank, rank_steps in enumerate(steps):
            assert held_by_rank[rank].pop(index) == rank_steps[index].holds
            for which, transfer in enumerate(rank_steps[index].sends):
                assert steps[transfer.to][index].sends[which].source == rank
                assert transfer.due not in held_by_rank[transfer.to]
                held_by_rank[transfer.to][transfer.due] = rank_steps[index].holds
            if rank_steps[index].gradient is not None:
                team_ranks = [*geometry.team(rank)]
                for holds, queries in part[rank].pop(index, []):
                    assert holds == rank_steps[index].holds
                    team_ranks += queries
                to, due, _ = rank_steps[index].gradient
                assert steps[to][index].gradient.source == rank
                assert due > index
                part[to].setdefault(due, []).append((rank_steps[index].holds, team_ranks))
    for rank in range(geometry.size):
        assert not held_by_rank[rank]
        assert list(part[rank]) == [rounds]
        reached = []
        for holder in geometry.holders(rank):
            for holds, queries in part[holder][rounds]:
                assert holds == steps[rank][0].holds
                reached += queries
        assert sorted(reached) == list(range(geometry.size))


@pytest.mark.parametrize("method", METHODS)
def test_every_size_sends_what_is_received_and_covers_each_pair_once(method):
    """One document, and several at random."""
    draw = random.Random(method)
    for size in SIZES if method in BASIC else range(1, 14):
        length = max(1, 4 * size - 3)
        packed = (
            0,
            *sorted(draw.sample(range(1, length), min(length - 1, draw.randint(1, 6)))),
            length,
        )
        masks = product((True, False), (None, packed))
        plans = [
            make_plan(method, seq_len=length, size=size, causal=causal, documents=cu_seqlens)
            for causal, cu_seqlens in masks
        ]
        for geometry in {plan.geometry for plan in plans}:
            check_transfers(geometry)
        for plan in plans:
            np.testing.assert_array_equal(
                coverage(plan), visible(plan), err_msg=f"size {size}, {plan.mask}"
            )


@pytest.mark.parametrize(("method", "size", "options"), PLANNED)
def test_teams_heads_nodes_and_placements_cover_each_pair_once(method, size, options):
    for causal, cu_seqlens in product(
        (True, False), (None, tuple(sorted({0, 3, size, 3 * size + 1})))
    ):
        plan = make_plan(
            method, seq_len=3 * size + 1, size=size, causal=causal, documents=cu_seqlens, **options
        )
        owned = np.concatenate([plan.positions(rank).numpy() for rank in range(size)])
        np.testing.assert_array_equal(np.sort(owned), np.arange(plan.padded_len))
        check_transfers(plan.geometry)
        for moves in ("kv", "queries"):
            np.testing.assert_array_equal(coverage(plan, moves), visible(plan))


def test_what_ranks_gather_is_joined_in_ascending_positions():
    """The members of a team, and the ranks that exchange heads; so that no rank has to sort.

    Where all ranks gather, with allgather and allgather_q, they sort.
    """
    for method, size, options in PLANNED:
        plan = make_plan(method, seq_len=5 * size + 1, size=size, **options)
        sorts = method == "allgather_q" and plan.geometry.shape.size > 1
        for rank in range(size):
            for ranks in (plan.geometry.team(rank), plan.geometry.head_group(rank)):
                order = gather_order(plan.geometry, ranks, torch.device("cpu"))
                if sorts and len(ranks) == size and plan.layout.name == "zigzag":
                    assert order is not None
                else:
                    assert order is None
                assert rank in ranks


@pytest.mark.parametrize("method", METHODS)
def test_each_rank_gets_a_multiple_of_positions_where_that_is_asked_for(method):
    for size, multiple in ((1, 2), (2, 2), (2, 3), (4, 8)):
        plain = make_plan(method, seq_len=17, size=size)
        plan = make_plan(method, seq_len=17, size=size, multiple=multiple)
        assert plan.local_len % multiple == 0
        assert plain.padded_len <= plan.padded_len < 17 + 2 * size * multiple
        assert np.array_equal(coverage(plan), visible(plan))


def test_coverage_notices_a_diagonal_that_striping_must_exclude():
    """Negative control: without the strict mask's shift, later tokens are seen.

    The check says so.
    """
    plan = make_plan("striped", seq_len=32, size=4)
    counts = coverage(plan)
    first = plan.positions(0).numpy()
    later = plan.positions(1).numpy()
    counts[np.ix_(first, later)] = np.tril(np.ones((8, 8), dtype=np.int64))
    assert (counts != visible(plan)).any()


@pytest.mark.parametrize("method", ["striped", "zigzag"])
def test_balanced_methods_give_every_rank_the_same_work_in_every_round(method):
    plan = make_plan(method, seq_len=8 * 128, size=8)
    work = np.array([[step.pairs for step in plan.rounds(rank)] for rank in range(8)])
    assert work.max(axis=0) == pytest.approx(work.min(axis=0), rel=0.02)


def test_under_full_attention_every_rank_has_the_same_work_in_any_layout():
    """So striped and zigzag bring nothing there.

    Contiguous blocks are the default of all others.
    """
    for method, size, options in PLANNED:
        plan = make_plan(method, seq_len=size * 16, size=size, causal=False, **options)
        assert len({sum(step.pairs for step in plan.rounds(rank)) for rank in range(size)}) == 1, (
            method,
            options,
        )
        default = method if method in ("striped", "zigzag") else "contiguous"
        assert plan.geometry.layout.name == options.get("layout", default)


def test_striping_halves_the_work_of_the_slowest_rank_as_the_paper_counts_it():
    """Striped Attention, section 3: c (c + 1) / 2 or c (c - 1) / 2 pairs a round against c^2."""
    size, block = 8, 64
    ring = make_plan("ring", seq_len=size * block, size=size)
    striped = make_plan("striped", seq_len=size * block, size=size)
    assert [step.pairs for step in ring.rounds(size - 1)] == [block * (block + 1) // 2] + [
        block**2
    ] * (size - 1)
    for rank in range(size):
        for step in striped.rounds(rank):
            assert step.pairs == block * (block + (1 if step.holds[0] <= rank else -1)) // 2


def test_tiles_are_as_few_as_the_layout_allows():
    for method, tiles in (("ring", 1), ("striped", 1), ("zigzag", 1), ("allgather", 4)):
        plan = make_plan(method, seq_len=1024, size=8)
        assert max(len(step.tiles) for rank in range(8) for step in plan.rounds(rank)) == tiles


def test_cost_counts_the_bytes_of_each_peer():
    plan = make_plan("ring", seq_len=4096, size=4)
    gqa = plan.cost(1, batch=2, heads=8, kv_heads=2, head_dim=64, element_size=2)
    block = 2 * 2 * 1024 * 2 * 64  # K and V of one rank
    assert gqa.backward_moves == "kv"
    assert gqa.forward.p2p == {2: 3 * block * 2}
    assert gqa.backward.p2p == {2: 3 * block * 2 + 4 * block * 4}
    mha = plan.cost(1, batch=2, heads=8, kv_heads=8, head_dim=64, element_size=2)
    rows = (
        2 * 1024 * 8
    )  # of q: q, dout and out in 2 bytes with lse in 4 three times, dq in 4 bytes four times
    assert mha.backward_moves == "queries"
    assert mha.backward.p2p == {2: rows * (3 * (3 * 64 * 2 + 4) + 4 * 64 * 4)}
    plan = make_plan("allgather", seq_len=4096, size=4)
    gathered = plan.cost(1, batch=2, heads=8, kv_heads=2, head_dim=64, element_size=2)
    assert gathered.forward.collective == dict.fromkeys((0, 2, 3), block * 2)
    assert gathered.forward.total == 3 * block * 2
    assert sum(gqa.pairs) == 1024 * 1025 // 2 + 1024**2


def test_the_paper_s_worked_example():
    """WallFacer, section 3.2.2.

    B 1, N 65,536, H 6,656 (52 heads of 128), P 64, C 4, 64 layers, two bytes.
    """
    shape = {"batch": 1, "heads": 52, "kv_heads": 52, "head_dim": 128, "element_size": 2}
    activation = 65536 * 6656 // 64
    ring = make_plan("zigzag", seq_len=65536, size=64)
    walls = make_plan("wallfacer", seq_len=65536, size=64, team_size=4)
    ring_sent, sent = (plan.cost(5, **shape).forward for plan in (ring, walls))
    # The formula counts as many hops as ranks, and the last needs none.
    assert ring_sent.p2p.total() * 64 / 63 / 2**30 == 1.625
    assert not ring_sent.collective
    assert sent.p2p.total() == 2 * 65536 * 6656 // 4 * 2
    assert sent.p2p.total() / 2**30 == pytest.approx(0.406, abs=5e-4)
    # The paper reduces in two bytes: here out takes four, and so does lse, one for 128 of out.
    assert sent.collective.total() == 3 * activation * (3 * 2 + 4 + 4 / 128)
    assert 3 * activation * (3 * 2 + 2) / 2**30 == pytest.approx(0.152, abs=5e-4)


def test_fewer_bytes_decide_what_the_backward_moves_and_either_can_be_forced():
    for method, size, options in PLANNED:
        for kv_heads in (1, 4, 16):
            plans = {
                choice: make_plan(method, seq_len=8 * size, size=size, backward=choice, **options)
                for choice in ("auto", "kv", "queries")
            }
            if 16 % plans["auto"].geometry.ulysses_degree or plans["auto"].sparse:
                continue
            shape = {
                "batch": 1,
                "heads": 16,
                "kv_heads": kv_heads,
                "head_dim": 32,
                "element_size": 2,
            }
            costs = {
                choice: [plan.cost(rank, **shape) for rank in range(size)]
                for choice, plan in plans.items()
            }
            total = {
                choice: sum(cost.backward.total for cost in costs_of_ranks)
                for choice, costs_of_ranks in costs.items()
            }
            assert total["auto"] == min(total["kv"], total["queries"])
            assert {cost.backward_moves for cost in costs["kv"]} == {"kv"}
            assert {cost.backward_moves for cost in costs["queries"]} == {"queries"}
            assert sum(cost.forward.total for cost in costs["kv"]) == sum(
                c.forward.total for c in costs["queries"]
            )


def test_a_plan_from_another_process_is_the_same_plan():
    """Workers may plan ahead: what they send must meet the caches here."""
    plan = make_plan("wallfacer", seq_len=64, size=4, team_size=2, documents=(0, 10, 64))
    sent = pickle.loads(pickle.dumps(plan))
    assert (sent, hash(sent)) == (plan, hash(plan))
    assert sent.geometry.method != make_plan("ring", seq_len=64, size=4).geometry.method
    assert make_plan("wallfacer", seq_len=64, size=4, team_size=2, documents=(0, 10, 64)) is plan


REFUSED = """
    rign 2 {} | rign.*ring, striped, zigzag, allgather
    ring 2 {"seq_len": 0} | seq_len is 0
    ring 0 {} | context_parallel_size is 0
    wallfacer 8 {"team_size": 3} | context_parallel_team_size is 3, .*do: 1, 2$
    wallfacer 8 {"team_size": 0} | team_size is 0
    wallfacer 8 {"team_size": 2, "ulysses_degree": 4} | square 4 does not divide the 2 ranks.*do: 1$
    ring 8 {"ulysses_degree": 3} | _degree is 3.*use one of 1, 2, 4, 8$
    ulysses 8 {"ulysses_degree": 2} | leaves 4 groups; leave out ulysses_degree
    ring 8 {"layout": "striped"} | _layout is 'striped', .* use one of auto, contiguous$
    wallfacer 8 {"placement": "near"} | 'near'; use one of collect_intra
    ring 8 {"placement": "p2p_intra"} | _placement is p2p_intra
    ring 8 {"backward": "v"} | backward is 'v'; use one of auto, kv, queries
    ring 8 {"delta_rule_schedule": "star"} | is 'star'; use one of auto, chain
    double_ring 8 {"ranks_per_node": 3} | _ranks_per_node .* nodes of 3 .*: 1, 2, 4, 8$
    exchange 6 {"ranks_per_node": 4} | _ranks_per_node .* nodes of 4 .* exchange.*: 1, 2, 3, 6$
    double_ring 12 {"ranks_per_node": 6, "ulysses_degree": 4} | is 6, \
but it must be a multiple of ulysses_degree 4
    ulysses 2 {"slice_len": -4} | slice_len is -4; it must be 1 or more
    ulysses 2 {"slice_len": 4, "causal": False} | slice_len is 4, but attention is full
    ulysses 2 {"slice_len": 4, "layout": "zigzag"} | _layout is 'zigzag' with slice_len 4
    allgather_q 2 {"slice_len": 4, "backward": "queries"} | backward is queries with slice_len 4
    striped 1 {"slice_len": 4, "layout": "contiguous"} | use one of auto, striped$
    lasp 2 {"causal": False} | lasp does not support a full mask
    lasp 2 {"ulysses_degree": 2} | ulysses_degree is 2, but method lasp .*use ulysses_degree 1
    lasp 4 {"team_size": 2} | lasp has no teams
    lasp2 2 {"layout": "striped"} | _layout is 'striped'.*use contiguous, zigzag or auto
    lasp2 2 {"layout": "balanced"} | _layout is 'balanced'.*use contiguous, zigzag or auto
    ring 2 {"documents": (0, 4)} | documents must ascend from 0 to seq_len 8
    ring 2 {"documents": (0, 5, 4, 8)} | documents must ascend
    ring 2 {"documents": (0, 4.7, 8)} | must be integers
    ring 2 {"documents": (0, None, 8)} | must be integers
    ring 2 {"documents": "08"} | must be integers
    ring 2 {"documents": 8} | must be integers
"""


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_what_cannot_work_is_refused_with_the_reason(line):
    case, _, message = line.partition(" | ")
    method, size, options = case.split(maxsplit=2)
    with pytest.raises(ContextError, match=message):
        make_plan(method, size=int(size), **{"seq_len": 8, **ast.literal_eval(options)})


def test_heads_that_cannot_be_split_are_refused_with_the_degrees_that_fit():
    geometry = make_plan("ring", seq_len=64, size=8, ulysses_degree=4).geometry
    geometry.check_heads(8, 2)
    with pytest.raises(
        ContextError, match=r"ulysses_degree is 4 with 12 query and 6 key heads.*: 1, 2$"
    ):
        geometry.check_heads(12, 6)
