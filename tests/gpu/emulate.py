"""Emulate the ranks of a plan on one device: what each rank computes in each of its rounds, without
traffic.
"""

from collections.abc import Callable
from statistics import median

import numpy as np
import torch

from kernels.attention import add_gradients_, attend_tiles_, select_backend
from kernels.blocks import Keys, Rows, Tile
from parallel.context import Plan
from parallel.context.traffic import Moves, Sizes
from runtime.machine import time_steps

Tiles = tuple[Tile, ...]


def computed(plan: Plan, rank: int, moves: Moves) -> list[Tiles]:
    """Return the tiles of each round of a rank."""
    steps = plan.schedule(rank, moves) if plan.sparse else plan.rounds(rank, moves)
    return [step.tiles for step in steps]


def emulate(plan: Plan, of: Sizes, device: str, dtype: torch.dtype, repeats: int) -> np.ndarray:
    """Return the seconds that each rank computes, float64 [ranks], forward and backward.

    Rounds with the same tiles are timed once, by the median of so many calls.
    """
    total = np.zeros(plan.size)
    for moves in (None, plan.backward_moves(of)):
        seconds: dict[str, float] = {str(()): 0.0}  # a slice has no hash
        for rank in range(plan.size):
            for tiles in computed(plan, rank, moves or "kv"):
                if str(tiles) not in seconds:
                    step = step_of_round(tiles, of, device, dtype, moves is None)
                    seconds[str(tiles)] = of.stages * median(time_steps(step, device, repeats))
                total[rank] += seconds[str(tiles)]
    return total


def step_of_round(
    tiles: Tiles, of: Sizes, device: str, dtype: torch.dtype, forward: bool
) -> Callable[[], None]:
    """Return a call that does what one rank does in a round with these tiles, on random numbers."""
    of = of.stage if of.stages > 1 else of
    rows, columns = max(tile.q.stop for tile in tiles), max(tile.k.stop for tile in tiles)
    shapes = [(of.batch, rows, of.heads, of.head_dim)] * 3 + [
        (of.batch, columns, of.kv_heads, of.head_dim)
    ] * 2
    q, dout, out, k, v = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
    wide, backend = torch.promote_types(dtype, torch.float32), select_backend("auto", device, dtype)
    lse = torch.full(q.shape[:3], float(np.log(columns)), device=device, dtype=wide)
    scale = of.head_dim**-0.5
    if forward:
        total = torch.zeros(q.shape, device=device, dtype=wide)
        return lambda: attend_tiles_(total, lse, q, Keys(k, v), tiles, scale, backend)
    dq, dk, dv = (torch.zeros(x.shape, device=device, dtype=wide) for x in (q, k, v))
    return lambda: add_gradients_(
        (dq, dk, dv), Rows(q, dout, out, lse), Keys(k, v), tiles, scale, backend
    )
