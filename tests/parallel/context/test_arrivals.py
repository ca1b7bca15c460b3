"""Whatever arrives first, results are the same to the bit.

Ranks are late on purpose, otherwise in every run.
"""

import random
import time
from typing import Any

import pytest
import torch

from parallel.context import executor
from parallel.context.circulation import NeededRows
from parallel.context.transport import Transport
from runtime.ranks import run_ranks
from tests.compositions import compositions
from tests.parallel.context.attended import Masked, Ranks, attended

LATEST = 0.004  # seconds; some ten times what a transfer takes here
MASKS = (
    Masked((0, 9, 123)),
    Masked((0, 60, 61, 123), causal=False),
    Masked((0, 9, 123), (70, 0), sinks=True),
)

Case = tuple[str, dict[str, Any], Masked]


def make_late(patch, draw):
    """Sleep before sends are posted, before arrivals are taken, and before tiles are computed."""

    def late(function):
        def called(*args):
            time.sleep(draw.uniform(0, LATEST))
            return function(*args)

        return called

    post = late(Transport.isend_irecv)

    def late_post(*args):
        arrivals, sent = post(*args)
        return [late(arrival) for arrival in arrivals], sent

    patch.setattr(Transport, "isend_irecv", late_post)
    for name in ("attend_tiles_", "add_gradients_"):
        patch.setattr(executor, name, late(getattr(executor, name)))


def add_in_any_order(patch, draw):
    """As if gradients were added as they arrive."""
    own_gradient = NeededRows.own_gradient

    def shuffled(self):
        for waiting in self._returning.values():
            draw.shuffle(waiting)
        return own_gradient(self)

    patch.setattr(NeededRows, "own_gradient", shuffled)


def attend_again(rank, world_size, cases, runs, change):
    """Per case, True where out and gradients of all runs equal the first.

    The first is the one that ``change`` leaves alone.
    """
    ranks, equal_by_case = Ranks(), []
    for method, options, masked in cases:
        results = []
        for run in range(runs):
            with pytest.MonkeyPatch.context() as patch:
                if run:
                    change(patch, random.Random(f"{rank} {run} {method}"))
                results.append(attended(ranks, method, options, masked, torch.float32)[0][:4])
        equal_by_case.append(
            all(
                torch.equal(a, b)
                for other in results[1:]
                for a, b in zip(results[0], other, strict=True)
            )
        )
    return equal_by_case


@pytest.mark.parametrize(
    ("world_size", "runs"),
    [
        (4, 2),
        pytest.param(4, 20, marks=pytest.mark.slow),
        pytest.param(8, 8, marks=pytest.mark.slow),
    ],
)
def test_late_ranks_change_no_bit(world_size, runs):
    some = [
        (method, {**options, "backward": ("kv", "queries")[i % 2]}, MASKS[i % 3])
        for i, (method, options) in enumerate(compositions(world_size))
    ]
    for equal_by_case in run_ranks(attend_again, world_size, some, runs, make_late):
        assert dict(zip(map(str, some), equal_by_case, strict=True)) == dict.fromkeys(
            map(str, some), True
        )


def test_gradients_added_as_they_arrive_would_be_seen():
    """Negative control: the order in which an owner adds is in the bits."""
    some = [("exchange", {}, MASKS[0]), ("allgather", {}, MASKS[1])]
    for equal_by_case in zip(*run_ranks(attend_again, 4, some, 4, add_in_any_order), strict=True):
        assert not all(equal_by_case)
