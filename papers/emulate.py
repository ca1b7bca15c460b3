"""Emulate ranks: one device does what each rank of a plan computes, round by round, with the real kernels and shapes.

    python -m papers.emulate --methods ring striped --context-parallel-size 64 --cluster configs/clusters/h100_pod.toml

The slowest rank of each round and the links of the cluster's file give the time of one layer's attention on as many
devices like this one. Beside it stands what the cost model says with the file's own rates.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.emulate import clock, emulate
from bench.harness import add_json, add_sizes, need_cuda, sizes_of, write_json
from bench.shapes import DTYPES, AttentionShape
from parallel.context.methods import METHODS
from parallel.context.traffic import Moves, sizes
from planner.attention_cost import AttentionCost
from planner.cluster import default_cluster, load_cluster
from runtime.machine import describe
from tools.common.arguments import one_line_errors, parser_for, positive, run_command
from tools.common.report import aligned


@dataclass(frozen=True)
class EmulatedCost(AttentionCost):
    """The cost of a layer's attention whose computing was measured."""

    busy: Mapping[Moves | None, np.ndarray] = field(default_factory=dict)
    """Seconds, float64 ``[rounds, ranks]``, of a forward (None) and of a backward that moves KV or queries."""

    def _busy(self, moves: Moves | None, operations: int) -> np.ndarray:
        return self.busy[moves]


def rows(work: AttentionShape, methods: Sequence[str], args: argparse.Namespace) -> list[dict[str, Any]]:
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
    work = AttentionShape(**sizes_of(args), dtype=args.dtype)
    found = rows(work, args.methods, args)
    about = {"benchmark": "emulated ranks", "machine": describe(args.device), "workload": asdict(work)}
    write_json(args, {**about, "rows": found})
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
