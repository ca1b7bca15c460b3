"""Emulate ranks: one device does what each rank of a plan computes, round by round, with the real kernels and shapes.

    python -m papers.emulate --methods ring striped --context-parallel-size 64 --cluster configs/clusters/h100_pod.toml

The slowest rank of each round and the links of the cluster's file give the time of one layer's attention on as many
devices like this one. Beside it stands what the cost model says with the file's own rates.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from bench.rounds import add_json, add_sizes, keep, need_cuda, sizes_of
from bench.workload import DTYPES, Workload
from kernels.attention import select_backend
from kernels.blocks import Tile
from kernels.tiles import add_gradients_, attend_tiles_
from parallel.context import Plan
from parallel.context.methods.registry import METHODS
from parallel.context.traffic import Moves, Sizes, sizes
from planner.attention_cost import AttentionCost
from planner.cluster import default_cluster, load_cluster
from runtime.errors import UserError
from runtime.machine import describe, time_steps
from tools.arguments import one_line_errors, parser_for, positive, run_command
from tools.report import aligned

Tiles = tuple[Tile, ...]
Timer = Callable[[Callable[[], None], Tiles], float]
"""Return the seconds of a call that computes these tiles."""


@dataclass(frozen=True)
class EmulatedCost(AttentionCost):
    """The cost of a layer's attention whose computing was measured."""

    busy: Mapping[Moves | None, np.ndarray] = field(default_factory=dict)
    """Seconds, float64 ``[rounds, ranks]``, of a forward (None) and of a backward that moves KV or queries."""

    def _busy(self, moves: Moves | None, operations: int) -> np.ndarray:
        return self.busy[moves]


def computed(plan: Plan, rank: int, moves: Moves) -> list[Tiles]:
    """Return the tiles of each round of a rank."""
    if plan.sparse:
        return [stop.tiles for stop in plan.course(rank, moves).stops]
    return [step.tiles for step in plan.rounds(rank, moves)]


def emulate(plan: Plan, of: Sizes, device: str, dtype: torch.dtype, timer: Timer) -> dict[Moves | None, np.ndarray]:
    """Return ``EmulatedCost.busy``; rounds with the same tiles are timed once.

    Raises:
        UserError: the method passes states, and has no tiles.
    """
    if plan.geometry.method.capabilities().states:
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
        return lambda: attend_tiles_(total, lse, q, k, v, tiles, scale, backend)
    sums = tuple(torch.zeros(x.shape, device=device, dtype=wide) for x in (q, k, v))
    return lambda: add_gradients_(sums, (q, dout, out, lse), (k, v), tiles, scale, backend)


def clock(device: str, repeats: int) -> Timer:
    """Return a timer that takes the median of so many calls, and counts on stderr what it has timed."""
    timed = 0

    def seconds(step: Callable[[], None], tiles: Tiles) -> float:
        nonlocal timed
        timed += 1
        print(f"\rrounds timed: {timed}", end="", file=sys.stderr, flush=True)
        return median(time_steps(step, device, repeats))

    return seconds


def rows(work: Workload, methods: Sequence[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Emulate each method's plan and return a row for it; times in seconds."""
    cluster = load_cluster(args.cluster) if args.cluster else default_cluster(args.device)
    found = []
    for method in methods:
        plan = work.plan(method, args.context_parallel_size)
        dtype = DTYPES[work.dtype]
        of = sizes(plan.geometry, work.batch, work.num_heads, work.kv_heads, work.head_dim, dtype.itemsize)
        busy = emulate(plan, of, args.device, dtype, clock(args.device, args.repeats))
        cost, model = EmulatedCost(plan, of, cluster, busy=busy), AttentionCost(plan, of, cluster)
        back = plan.backward_moves(of)
        together = busy[None].sum(axis=0) + busy[back].sum(axis=0)
        found.append(
            {
                "method": method,
                "slowest_rank": int(together.argmax()),
                "compute": float(together.max()),
                "forward": cost.forward(),
                "backward": cost.backward(),
                "by_the_file": model.forward() + model.backward(),
            }
        )
    print(file=sys.stderr)
    return found


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = parser_for("python -m papers.emulate", __doc__)
    parser.add_argument("--methods", nargs="+", choices=sorted(METHODS), default=["ring", "striped", "zigzag"])
    parser.add_argument("--context-parallel-size", type=positive, default=8, metavar="N", help="ranks (%(default)s)")
    add_sizes(parser, seq_length=8192, batch=1, num_heads=8, kv_heads=None, head_dim=64)
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--cluster", type=Path, help="file with the links (default: of this machine's device)")
    parser.add_argument("--repeats", type=positive, default=5, help="calls of which the median is taken (%(default)s)")
    add_json(parser)
    args = parser.parse_args(argv)
    need_cuda(args.device)
    work = Workload(**sizes_of(args), dtype=args.dtype)
    found = rows(work, args.methods, args)
    keep(
        args, {"benchmark": "emulated ranks", "machine": describe(args.device), "workload": asdict(work), "rows": found}
    )
    head = ["method", "slowest rank", "its compute ms", "forward ms", "backward ms", "faster than", "by the file ms"]
    whole = [row["forward"] + row["backward"] for row in found]
    body = []
    for row, seconds in zip(found, whole, strict=True):
        ms = {name: f"{1e3 * value:.3f}" for name, value in row.items() if isinstance(value, float)}
        faster = f"{args.methods[0]} {whole[0] / seconds:.3f} x"
        own = [ms["compute"], ms["forward"], ms["backward"], faster, ms["by_the_file"]]
        body.append([row["method"], str(row["slowest_rank"]), *own])
    device = describe(args.device)["device"]
    print(f"emulated on one {device}: {args.context_parallel_size} ranks, {work.seq_length} tokens")
    print("\n".join(aligned([head, *body])))


if __name__ == "__main__":
    run_command(main)
