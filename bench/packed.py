"""Measure packed documents and windows on the CPU: what balance is worth on 2 ranks, and what a mask costs on one.

Two parts, each with contestants that take turns:

- 2 ranks pinned to a core each, documents of log-normal lengths: zigzag, striped, ring, and exchange and allgather over
  the layout balanced, with the gain over zigzag that counted pairs promise and the share of it that is reached
  (``bench.attention``).
- One rank on one core: one document, documents of about 500 tokens, and one document under a window, each through the
  plan and its tiles, beside torch's scaled_dot_product_attention of one document.

    python -m bench.packed                                      # 16384 tokens, 8 heads of 64
    python -m bench.packed --json bench/results/packed-MACHINE.jsonl
"""

import time
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import Any

from bench.attention import MASKED_METHODS, SETTLE_SECONDS, measure_cpu, table
from bench.processes import ONE_PROCESS, Contestants
from bench.rounds import add_json, add_rounds, add_sizes, keep, said, sizes_of, target, turns
from bench.workload import Workload, check_same
from runtime.errors import UserError
from runtime.machine import usable_cores
from tools.arguments import one_line_errors, parser_for, run_command
from tools.report import aligned

ALONE = "ring"  # of one rank every method is the same
RATE_OF_SHORT, GAIN_OF_WINDOW = 0.6, 3.0
"""At least: short documents' FLOP rate against one document's, and one document's time against a window's."""


def alone(work: Workload, window: int, repeats: int, max_seconds: float) -> dict[str, Any]:
    """Time one rank's attention under each mask, in turns; return ``alone``, a row per mask, and ``alone_targets``.

    Raises MeasureError: a process failed, or a result differs from torch's own.
    """
    masks = {"dense": work, "short": replace(work, documents="short"), "window": replace(work, window=window)}
    cores = usable_cores()[:1]
    seconds: dict[str, list[float]] = {name: [] for name in [*masks, ONE_PROCESS]}
    with ExitStack() as stack:
        ranks = {name: stack.enter_context(Contestants(mask, (ALONE,), cores)) for name, mask in masks.items()}
        for name, rank in ranks.items():
            check_same(name, rank.fingerprint(ALONE), rank.fingerprint(ONE_PROCESS), work.dtype)
        for name in turns([*seconds], repeats, max_seconds):
            time.sleep(SETTLE_SECONDS)
            rank, contestant = (ranks["dense"], ONE_PROCESS) if name == ONE_PROCESS else (ranks[name], ALONE)
            seconds[name].append(rank.step(contestant)[0].wall)
    return judge({**masks, ONE_PROCESS: work}, seconds)


def judge(masks: dict[str, Workload], seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return a row per mask, and the targets.

    ``per_tile`` is what a tile takes beyond its pairs' share of one document's time, in seconds: the cost of launching
    it, and that of its size.
    """
    rows: dict[str, dict[str, Any]] = {}
    for name, mask in masks.items():
        took, tiles = median(seconds[name]), int(mask.plan(ALONE, 1).work().tiles.sum())
        per_pair = median(seconds["dense"]) / masks["dense"].pairs
        rows[name] = {
            "seconds": seconds[name],
            "median": took,
            "pairs": mask.pairs,
            "tflops": mask.flops(mask.pairs) / took / 1e12,
            "tiles": tiles if name != ONE_PROCESS else None,
            "per_tile": (took - per_pair * mask.pairs) / tiles if name in ("short", "window") else None,
        }
    rate = rows["short"]["tflops"] / max(rows["dense"]["tflops"], rows[ONE_PROCESS]["tflops"])
    gain = rows["dense"]["median"] / rows["window"]["median"]
    targets = [
        target("short documents' FLOP rate / one document's", rate, RATE_OF_SHORT),
        target("one document's time / a window's", gain, GAIN_OF_WINDOW),
    ]
    return {"alone": rows, "alone_targets": targets}


def alone_table(result: dict[str, Any]) -> str:
    """Format the figures of ``alone``."""
    rows = [["", "median s", "pairs, M", "TFLOP/s", "tiles", "us a tile"]]
    for name, row in result["alone"].items():
        tiles = "" if row["tiles"] is None else str(row["tiles"])
        cost = "" if row["per_tile"] is None else f"{row['per_tile'] * 1e6:.0f}"
        rows.append([name, f"{row['median']:.3f}", f"{row['pairs'] / 1e6:.2f}", f"{row['tflops']:.4f}", tiles, cost])
    return "\n".join(["one rank on one core:", *aligned(rows), "", *said(result["alone_targets"])])


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = parser_for("python -m bench.packed", __doc__)
    add_sizes(parser, seq_length=16384, num_heads=8, kv_heads=None, head_dim=64)
    window = "keys that a query sees, its own among them (default: %(default)s)"
    parser.add_argument("--window", type=int, default=1024, help=window)
    add_rounds(parser, 9, 150)
    add_json(parser)
    args = parser.parse_args(argv)
    work = Workload(**sizes_of(args))
    if not 2 <= args.window < args.seq_length:
        raise UserError(f"--window is {args.window}; it must be 2 or more and below --seq-length {args.seq_length}")
    packed = replace(work, documents="lognormal")
    result = measure_cpu(packed, MASKED_METHODS, repeats=args.repeats, max_seconds=args.max_seconds)
    print(table(result) + "\n", flush=True)
    result |= alone(work, args.window, args.repeats, args.max_seconds)
    print(alone_table(result))
    keep(args, result)


if __name__ == "__main__":
    run_command(main)
