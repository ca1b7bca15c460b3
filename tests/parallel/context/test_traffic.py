"""Elements that real ranks send and hold in a forward are those of the formulas in WallFacer's paper."""

import gc
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist

from parallel.context import context_parallel, executor
from runtime.ranks import run_ranks

BATCH, TOKENS, HEADS, WIDTH = 1, 144, 8, 16
CASES = {
    4: [
        ("ring", {}),
        ("zigzag", {}),
        ("allgather", {}),
        ("wallfacer", {}),
        ("wallfacer", {"team_size": 2}),
        ("ulysses", {}),
        ("double_ring", {"ranks_per_node": 2}),
        ("striped", {"ulysses_degree": 2}),
    ],
    8: [
        ("wallfacer", {}),
        ("wallfacer", {"team_size": 2}),
        ("wallfacer", {"team_size": 2, "placement": "p2p_intra"}),
        ("wallfacer", {"team_size": 2, "ulysses_degree": 2}),
    ],
    9: [("wallfacer", {"team_size": 3})],
}


def formula(plan, rank, kv_heads):
    """Elements that a forward of a rank sends point to point, and in collectives: METHODS' figures, and where not.

    With A = B N H / P elements of a rank's q: 2 B N H / C point to point, of which a ring of one rank per team sends
    P - 1 parts in P, and a team nothing where its KV is placed on the rank itself; 4 A (C - 1) in a team's collectives
    and one lse per head besides; 4 A (U - 1) / U in those of Ulysses.
    """
    size, degree, team = plan.size, plan.geometry.ulysses_degree, plan.geometry.team_size
    query = Fraction(BATCH * plan.padded_len * HEADS * WIDTH, size)
    keys = 2 * query * kv_heads / HEADS
    lse = query / WIDTH
    heads = (2 * query + keys) * (degree - 1) / degree
    name, places = plan.geometry.method.name, size // degree
    if name == "allgather":
        return Fraction(0), keys * (places - 1) + heads
    if name == "ulysses":
        return Fraction(0), heads
    stays = team == 1 or plan.geometry.rounds_of(rank)[0].sends[0].to == rank
    sent = keys * places / team - (keys * team if stays else 0)
    return sent, (2 * query + keys + lse) * (team - 1) + heads


def count_elements(rank, world_size, cases):
    """Elements have 8 bytes, lse and partial results too, so that bytes count them; each case has its own group."""
    for (method, options), kv_heads in ((case, kv_heads) for case in cases for kv_heads in (HEADS, HEADS // 2)):
        cp = context_parallel(method, seq_len=TOKENS, group=dist.group.WORLD, **options)
        rows = BATCH, cp.plan.local_len
        q = torch.randn(*rows, HEADS, WIDTH, dtype=torch.float64)
        k, v = (torch.randn(*rows, kv_heads, WIDTH, dtype=torch.float64) for _ in range(2))
        cp.attend(q, k, v)
        shape = {"heads": HEADS, "kv_heads": kv_heads, "head_dim": WIDTH, "element_size": 8}
        planned = cp.plan.cost(rank, batch=BATCH, **shape).forward
        for sent in (cp.transport.traffic, planned):
            found = Fraction(sent.p2p.total(), 8), Fraction(sent.collective.total(), 8)
            assert found == formula(cp.plan, rank, kv_heads), f"{method}, {options}, {kv_heads} key heads: {found}"


@pytest.mark.parametrize("world_size", CASES)
def test_the_executor_sends_what_the_plan_and_the_formula_say_in_elements(world_size):
    run_ranks(count_elements, world_size, CASES[world_size])


def live_bytes():
    """Bytes of every storage that a tensor has which was made since ``gc.freeze``."""
    storages = [x.untyped_storage() for x in gc.get_objects() if type(x) is torch.Tensor]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def hold(rank, world_size, cases):
    """The most that an attention's tensors take as a round's tiles start, in A: bytes of this rank's q."""
    found, attend_tiles_ = [], executor.attend_tiles_
    for method, options in cases:
        cp = context_parallel(method, seq_len=TOKENS, causal=False, group=dist.group.WORLD, **options)
        seen = []
        gc.freeze()
        q, k, v = (torch.randn(BATCH, cp.plan.local_len, HEADS, WIDTH) for _ in range(3))

        def noting(*args, seen=seen):
            seen.append(live_bytes())
            return attend_tiles_(*args)

        executor.attend_tiles_ = noting
        cp.attend(q, k, v)
        found.append(max(seen) / (q.numel() * 4))
    return found


def test_buffers_are_the_formula_s_and_those_that_the_paper_does_not_count():
    """WallFacer, equations 6 and 7, count 3 C + 1 activations besides checkpoints: q, k and v of a team, and an output.

    Here KV that arrives while the other is used takes 2 C more, the partial output and lse are the whole team's, and
    this rank's own q, k and v, which autograd holds, stay beside those that were gathered: 6 C + 3. Alone, a rank's q
    is the one it attends with: 8. Without rounds that pass KV on (C^2 = P) none arrives. A CPU's lse is in float64.
    """
    lse = 2 / WIDTH
    on_four = [("ring", {}), ("wallfacer", {}), ("wallfacer", {"team_size": 2})]
    for ring, one, two in run_ranks(hold, 4, on_four):
        assert ring == one == 8 + lse
        assert two == 3 + 2 * 3 + 2 * (1 + lse)
    for (two,) in run_ranks(hold, 8, [("wallfacer", {"team_size": 2})]):
        assert two == 6 * 2 + 3 + 2 * lse


def hold_most(rank, world_size):
    """The same of a ring that passes everything on, whole, and as the rows that a query sees."""
    return hold(rank, world_size, [("ring", {}), ("ring", {"documents": (0, TOKENS - 8, TOKENS)})])


def test_rows_needed_are_let_go_of_as_whole_tensors_are():
    """Most rows travel under both masks; a sender that kept all it passed on would hold four times as many."""
    for whole, needed in run_ranks(hold_most, 4):
        assert needed < 1.2 * whole
