"""Emulate the ranks of a plan on one device, without traffic.

A rank computes what it does in each of its rounds.
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


def emulate(plan: Plan, sizes: Sizes, device: str, dtype: torch.dtype, repeats: int) -> np.ndarray:
    """Return the seconds that each rank computes, float64 [ranks], forward and backward.

    Rounds with the same tiles are timed once, by the median of so many calls.
    """
    total = np.zeros(plan.size)
    for moves in (None, plan.backward_moves(sizes)):
        seconds: dict[str, float] = {str(()): 0.0}  # a slice has no hash
        for rank in range(plan.size):
            for tiles in computed(plan, rank, moves or "kv"):
                if str(tiles) not in seconds:
                    step = step_of_round(tiles, sizes, device, dtype, moves is None)
                    seconds[str(tiles)] = sizes.stages * median(time_steps(step, device, repeats))
                total[rank] += seconds[str(tiles)]
    return total


def step_of_round(
    tiles: Tiles, sizes: Sizes, device: str, dtype: torch.dtype, forward: bool
) -> Callable[[], None]:
    """Return a call that does what one rank does in a round with these tiles, on random numbers."""
    sizes = sizes.stage if sizes.stages > 1 else sizes
    rows, columns = max(tile.q.stop for tile in tiles), max(tile.k.stop for tile in tiles)
    shapes = [(sizes.batch, rows, sizes.heads, sizes.head_dim)] * 3 + [
        (sizes.batch, columns, sizes.kv_heads, sizes.head_dim)
    ] * 2
    q, dout, out, k, v = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
    accum_dtype, backend = (
        torch.promote_types(dtype, torch.float32),
        select_backend("auto", device, dtype),
    )
    lse = torch.full(q.shape[:3], float(np.log(columns)), device=device, dtype=accum_dtype)
    scale = sizes.head_dim**-0.5
    if forward:
        total = torch.zeros(q.shape, device=device, dtype=accum_dtype)
        return lambda: attend_tiles_(total, lse, q, Keys(k, v), tiles, scale, backend)
    dq, dk, dv = (torch.zeros(x.shape, device=device, dtype=accum_dtype) for x in (q, k, v))
    return lambda: add_gradients_(
        (dq, dk, dv), Rows(q, dout, out, lse), Keys(k, v), tiles, scale, backend
    )
