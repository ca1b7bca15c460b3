"""Elements that a forward sends and holds are those of the formulas in WallFacer's paper."""

import gc
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist

from parallel.context import context_parallel, executor, make_plan
from runtime.ranks import run_ranks
from tests.compositions import EVERY

BATCH, TOKENS, HEADS, WIDTH = 1, 144, 48, 16


def formula(plan, rank, kv_heads):
    """Elements that a forward of a rank sends point to point, and in collectives.

    METHODS' figures, and where not.

    With A = B N H / P elements of a rank's q: 2 B N H / C point to point, of which a ring of one
    rank per team sends P - 1 parts in P, and a team nothing where its KV is placed on the rank
    itself; 4 A (C - 1) in a team's collectives and one lse per head besides; 4 A (U - 1) / U in
    those of Ulysses. allgather_q gathers q, and returns outputs and their lse.
    """
    size, degree, team = plan.size, plan.geometry.ulysses_degree, plan.geometry.team_size
    query = Fraction(BATCH * plan.padded_len * HEADS * WIDTH, size)
    keys = 2 * query * kv_heads / HEADS
    lse = query / WIDTH
    heads = (2 * query + keys) * (degree - 1) / degree
    name, num_places = plan.geometry.method.name, size // degree
    if name == "allgather":
        return Fraction(0), keys * (num_places - 1) + heads
    if name == "allgather_q":
        return Fraction(0), (2 * query + lse) * (num_places - 1) + heads
    if name == "ulysses":
        return Fraction(0), heads
    is_local = team == 1 or plan.geometry.rounds_of(rank)[0].sends[0].to == rank
    sent = keys * num_places / team - (keys * team if is_local else 0)
    return sent, (2 * query + keys + lse) * (team - 1) + heads


@pytest.mark.parametrize("kv_heads", [HEADS, HEADS // 2])
def test_plans_send_what_the_formula_says_in_elements(kv_heads):
    """Real ranks send what their plans say (test_executor.py).

    Elements have 8 bytes, lse and partial results too.
    """
    for method, size, options in EVERY:
        plan = make_plan(method, seq_len=TOKENS, size=size, **options)
        if plan.sparse:
            continue  # rows that a query sees travel alone
        shape = {
            "batch": BATCH,
            "heads": HEADS,
            "kv_heads": kv_heads,
            "head_dim": WIDTH,
            "element_size": 8,
        }
        for rank in range(size):
            sent = plan.cost(rank, **shape).forward
            elements = Fraction(sent.p2p.total(), 8), Fraction(sent.collective.total(), 8)
            assert elements == formula(plan, rank, kv_heads), (method, size, options, rank)


def live_bytes():
    """Bytes of every storage that a tensor has which was made since ``gc.freeze``."""
    storages = [x.untyped_storage() for x in gc.get_objects() if type(x) is torch.Tensor]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def hold(rank, world_size, cases):
    """The most that an attention's tensors take as a round's tiles start, in A.

    Bytes of this rank's q.
    """
    peaks, attend_tiles_ = [], executor.attend_tiles_
    for method, options in cases:
        cp = context_parallel(
            method, seq_len=TOKENS, causal=False, group=dist.group.WORLD, **options
        )
        bytes_seen = []
        gc.freeze()
        q, k, v = (torch.randn(BATCH, cp.plan.local_len, 8, WIDTH) for _ in range(3))

        def noting(*args, bytes_seen=bytes_seen):
            bytes_seen.append(live_bytes())
            return attend_tiles_(*args)

        executor.attend_tiles_ = noting
        cp.attend(q, k, v)
        peaks.append(max(bytes_seen) / (q.numel() * 4))
    return peaks


LSE = 2 / WIDTH
"""A CPU's lse is in float64."""


def test_buffers_are_the_formula_s_and_those_that_the_paper_does_not_count():
    """WallFacer, equations 6 and 7, count 3 C + 1 activations besides checkpoints.

    q, k and v of a team, and an output.

    Here KV that arrives while the other is used takes 2 C more, the partial output and lse are the
    whole team's, and this rank's own q, k and v, which autograd holds, stay beside those that were
    gathered: 6 C + 3. Alone, a rank's q is the one it attends with: 8. Without rounds that pass KV
    on (C^2 = P) none arrives. Most rows travel under the last mask too: a sender that kept all it
    passed on would hold four times as many.
    """
    packed = {"documents": (0, TOKENS - 8, TOKENS)}
    on_four = [
        ("ring", {}),
        ("wallfacer", {}),
        ("wallfacer", {"team_size": 2}),
        ("ring", packed),
    ]
    for ring, single, team, needed in run_ranks(hold, 4, on_four):
        assert ring == single == 8 + LSE
        assert team == 3 + 2 * 3 + 2 * (1 + LSE)
        assert needed < 1.2 * ring


@pytest.mark.slow
def test_a_team_in_a_ring_holds_what_arrives_too():
    for (team,) in run_ranks(hold, 8, [("wallfacer", {"team_size": 2})]):
        assert team == 6 * 2 + 3 + 2 * LSE
