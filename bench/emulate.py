"""Emulate the ranks of a plan on one device: what a rank computes, whole or round by round, without traffic."""

import sys
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.attention import add_gradients_, attend_tiles_, select_backend
from kernels.blocks import Keys, Rows, Tile
from parallel.context import Plan
from parallel.context.executor import Executor
from parallel.context.methods.base import Send
from parallel.context.traffic import Moves, Sizes
from parallel.context.transport import Arrival, Tensors, Transport
from runtime.errors import UserError
from runtime.machine import time_steps

Tiles = tuple[Tile, ...]
Timer = Callable[[Callable[[], None], Tiles], float]
"""Return the seconds of a call that computes these tiles."""


class LoopbackTransport(Transport):
    """One rank's links without peers: it receives what it would send."""

    def _new_group(self, ranks: tuple[int, ...], timeout: timedelta | None) -> None:
        return None

    def isend_irecv(
        self, sends: list[tuple[int, Tensors]], receives: list[tuple[int, Tensors]], far: bool
    ) -> tuple[list[Arrival], Callable[[], object]]:
        return [lambda tensors=tensors: tensors for _, tensors in receives], lambda: None  # type: ignore[misc]

    def send_recv(self, tensors: Tensors, send: Send, far: bool) -> Arrival:
        return lambda: tensors

    def gather(self, tensors: Tensors, ranks: tuple[int, ...], *, by_rank: bool = False) -> Arrival:
        return lambda: tuple(torch.cat([tensor] * len(ranks), dim=1) for tensor in tensors)

    def exchange(self, parts: Tensor, ranks: tuple[int, ...]) -> Tensor:
        return parts.contiguous()


def step_of(plan: Plan, executor: Executor, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Callable[[], Any]:
    """Return a forward + backward of one rank of a plan."""
    scale = q.shape[-1] ** -0.5

    def step() -> None:
        out, lse = executor.forward(plan, q, Keys(k, v), None, scale)
        executor.backward(plan, Rows(q, dout, out, lse), Keys(k, v), scale)

    return step


def computed(plan: Plan, rank: int, moves: Moves) -> list[Tiles]:
    """Return the tiles of each round of a rank."""
    if plan.sparse:
        return [step.tiles for step in plan.schedule(rank, moves)]
    return [step.tiles for step in plan.rounds(rank, moves)]


def emulate(plan: Plan, of: Sizes, device: str, dtype: torch.dtype, timer: Timer) -> dict[Moves | None, np.ndarray]:
    """Return the seconds of each rank in each round ``[rounds, ranks]``, of the forward (None) and of the backward.

    Rounds with the same tiles are timed once.

    Raises UserError: the method passes states, and has no tiles.
    """
    if plan.geometry.method.states:
        raise UserError(f"{plan.geometry.method.name} passes states, and has no rounds; emulate a softmax attention")
    found: dict[Moves | None, np.ndarray] = {}
    for moves in (None, plan.backward_moves(of)):
        rounds = [computed(plan, rank, moves or "kv") for rank in range(plan.size)]
        kinds = {str(tiles): tiles for own in rounds for tiles in own}  # a slice has no hash
        known = {str(()): 0.0}
        for name, tiles in kinds.items():
            if tiles:
                known[name] = of.stages * timer(_step(tiles, of, device, dtype, moves is None), tiles)
        found[moves] = np.array([[known[str(tiles)] for tiles in own] for own in rounds]).T
    return found


def _step(tiles: Tiles, of: Sizes, device: str, dtype: torch.dtype, forward: bool) -> Callable[[], None]:
    """Return a call that does what one rank does in a round with these tiles, on random numbers."""
    of = of.stage if of.stages > 1 else of
    rows, columns = max(tile.q.stop for tile in tiles), max(tile.k.stop for tile in tiles)
    shapes = [(of.batch, rows, of.heads, of.head_dim)] * 3 + [(of.batch, columns, of.kv_heads, of.head_dim)] * 2
    q, dout, out, k, v = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
    wide, backend = torch.promote_types(dtype, torch.float32), select_backend("auto", device, dtype)
    lse = torch.full(q.shape[:3], float(np.log(columns)), device=device, dtype=wide)
    scale = of.head_dim**-0.5
    if forward:
        total = torch.zeros(q.shape, device=device, dtype=wide)
        return lambda: attend_tiles_(total, lse, q, Keys(k, v), tiles, scale, backend)
    dq, dk, dv = (torch.zeros(x.shape, device=device, dtype=wide) for x in (q, k, v))
    return lambda: add_gradients_((dq, dk, dv), Rows(q, dout, out, lse), Keys(k, v), tiles, scale, backend)


def clock(device: str, repeats: int, quiet: bool = False) -> Timer:
    """Return a timer that takes the median of so many calls, and counts on stderr what it has timed."""
    timed = 0

    def seconds(step: Callable[[], None], tiles: Tiles) -> float:
        nonlocal timed
        timed += 1
        if not quiet:
            print(f"\rrounds timed: {timed}", end="", file=sys.stderr, flush=True)
        return median(time_steps(step, device, repeats))

    return seconds
