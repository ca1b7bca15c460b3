"""Plans, without any process: who owns what, who sends what, and which pairs are computed where."""

import numpy as np
import pytest

from kernels.attention import CAUSAL
from parallel.context import METHODS, ContextError, Plan, make_plan

SIZES = range(1, 65)


def coverage(plan: Plan) -> np.ndarray:
    """How often each (query, key) pair of the padded sequence is computed, over all ranks and rounds."""
    counts = np.zeros((plan.padded_len, plan.padded_len), dtype=np.int64)
    for rank in range(plan.size):
        queries = plan.positions(rank).numpy()
        for step in plan.rounds(rank):
            keys = np.sort(np.concatenate([plan.positions(held).numpy() for held in step.holds]))
            for tile in step.tiles:
                q, k = queries[tile.q], keys[tile.k]
                assert len(q) == tile.q.stop - tile.q.start
                assert len(k) == tile.k.stop - tile.k.start
                mask = np.ones((len(q), len(k)), dtype=np.int64)
                counts[np.ix_(q, k)] += np.tril(mask) if tile.kind == CAUSAL else mask
    return counts


def visible(plan: Plan) -> np.ndarray:
    """The pairs that the mask leaves; padding is a document of its own."""
    position = np.arange(plan.padded_len)
    boundaries = list(plan.documents[1:-1]) if plan.documents else []
    boundaries.append(plan.seq_len)
    document = np.searchsorted(boundaries, position, side="right")
    same = document[:, None] == document[None, :]
    return (same & (position[:, None] >= position[None, :])) if plan.causal else same


def check_transfers(plan: Plan) -> None:
    """Sends match receives, what arrives is what the next round holds, and each rank meets all KV once."""
    hops = [plan.hops(rank) for rank in range(plan.size)]
    for rank, own in enumerate(hops):
        assert rank in own[0].holds
        assert sorted(held for hop in own for held in hop.holds) == list(range(plan.size))
        for index, hop in enumerate(own[:-1]):
            assert hop.send_to is not None
            assert hops[hop.send_to][index].recv_from == rank
            assert own[index + 1].holds == hops[hop.recv_from][index].holds
        assert own[-1].send_to is None
        assert own[-1].recv_from is None
        if len(own[-1].holds) == 1:
            home, source = plan.homecoming(rank)
            assert plan.homecoming(home)[1] == rank
            assert hops[source][-1].holds == (rank,)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_every_size_sends_what_is_received_and_covers_each_pair_once(method: str, causal: bool) -> None:
    for size in SIZES:
        plan = make_plan(method, seq_len=max(1, 4 * size - 3), size=size, causal=causal)
        check_transfers(plan)
        np.testing.assert_array_equal(coverage(plan), visible(plan), err_msg=f"size {size}")


@pytest.mark.parametrize("method", METHODS)
def test_each_rank_gets_a_multiple_of_positions_where_that_is_asked_for(method: str) -> None:
    for size, multiple in ((1, 2), (2, 2), (2, 3), (4, 8)):
        plain = make_plan(method, seq_len=17, size=size)
        plan = make_plan(method, seq_len=17, size=size, multiple=multiple)
        assert plan.local_len % multiple == 0
        assert plain.padded_len <= plan.padded_len < 17 + 2 * size * multiple
        assert np.array_equal(coverage(plan), visible(plan))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_packed_documents_see_only_themselves(method: str, causal: bool) -> None:
    generator = np.random.default_rng(0)
    for size in (1, 2, 3, 4, 8):
        for _ in range(6):
            seq_len = int(generator.integers(12, 90))
            cuts = np.sort(generator.choice(np.arange(1, seq_len), size=int(generator.integers(1, 6)), replace=False))
            documents = (0, *cuts.tolist(), seq_len)
            plan = make_plan(method, seq_len=seq_len, size=size, causal=causal, documents=documents)
            np.testing.assert_array_equal(coverage(plan), visible(plan), err_msg=f"{size} ranks, {documents}")


def test_coverage_notices_a_diagonal_that_striping_must_exclude() -> None:
    """Negative control: with the strict mask's shift dropped, later tokens are seen, and the check says so."""
    plan = make_plan("striped", seq_len=32, size=4)
    counts = coverage(plan)
    first = plan.positions(0).numpy()
    later = plan.positions(1).numpy()
    counts[np.ix_(first, later)] = np.tril(np.ones((8, 8), dtype=np.int64))
    assert (counts != visible(plan)).any()


@pytest.mark.parametrize("method", ["striped", "zigzag"])
def test_balanced_methods_give_every_rank_the_same_work_in_every_round(method: str) -> None:
    plan = make_plan(method, seq_len=8 * 128, size=8)
    work = np.array([[step.pairs for step in plan.rounds(rank)] for rank in range(8)])
    assert work.max(axis=0) == pytest.approx(work.min(axis=0), rel=0.02)


def test_striping_halves_the_work_of_the_slowest_rank_as_the_paper_counts_it() -> None:
    """Striped Attention, section 3: c (c + 1) / 2 or c (c - 1) / 2 pairs a round against c^2."""
    size, block = 8, 64
    ring = make_plan("ring", seq_len=size * block, size=size)
    striped = make_plan("striped", seq_len=size * block, size=size)
    assert [step.pairs for step in ring.rounds(size - 1)] == [block * (block + 1) // 2] + [block**2] * (size - 1)
    for rank in range(size):
        for step in striped.rounds(rank):
            assert step.pairs == block * (block + (1 if step.holds[0] <= rank else -1)) // 2


def test_tiles_are_as_few_as_the_layout_allows() -> None:
    for method, most in (("ring", 1), ("striped", 1), ("zigzag", 1), ("allgather", 4)):
        plan = make_plan(method, seq_len=1024, size=8)
        assert max(len(step.tiles) for rank in range(8) for step in plan.rounds(rank)) == most


def test_cost_counts_the_bytes_of_each_peer() -> None:
    plan = make_plan("ring", seq_len=4096, size=4)
    cost = plan.cost(1, batch=2, kv_heads=8, head_dim=64, element_size=2)
    block = 2 * 2 * 1024 * 8 * 64  # K and V of one rank
    assert cost.forward_bytes == {2: 3 * block * 2}
    assert cost.backward_bytes == {2: 3 * block * 2 + 4 * block * 4}
    gathered = make_plan("allgather", seq_len=4096, size=4).cost(1, batch=2, kv_heads=8, head_dim=64, element_size=2)
    assert gathered.forward_bytes == dict.fromkeys((0, 2, 3), block * 2)
    assert sum(cost.pairs) == 1024 * 1025 // 2 + 1024**2


def test_plans_are_cached_and_built_without_processes() -> None:
    assert make_plan("zigzag", seq_len=64, size=4) is make_plan("zigzag", seq_len=64, size=4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "rign", "seq_len": 8, "size": 2}, "rign.*ring, striped, zigzag, allgather"),
        ({"method": "ring", "seq_len": 0, "size": 2}, "seq_len is 0"),
        ({"method": "ring", "seq_len": 8, "size": 0}, "context_parallel_size is 0"),
        ({"method": "ring", "seq_len": 8, "size": 4, "team_size": 2}, "ring has no teams.*use team_size 1"),
        ({"method": "ring", "seq_len": 8, "size": 2, "documents": (0, 4)}, "documents must ascend from 0 to seq_len 8"),
        ({"method": "ring", "seq_len": 8, "size": 2, "documents": (0, 5, 4, 8)}, "documents must ascend"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(arguments: dict, message: str) -> None:
    with pytest.raises(ContextError, match=message):
        make_plan(arguments.pop("method"), **arguments)
