"""Work and traffic of packed documents and windows, by layout and by method, counted on plans: no process is started.

python -m bench.packed_layouts                     # the tables of docs/concepts/packed.md; half a minute
python -m bench.packed_layouts --cases 131072 16   # tokens and ranks of one case

A figure is the mean over draws of documents; bench/packing.py says how their lengths are drawn. Two documents are cut
at 0.35 to 0.65 of the sequence.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from bench.packing import documents_of
from parallel.context import Plan, make_plan

CASES = ((16_384, 8), (131_072, 16))
WINDOW = 1024
LAYOUTS = ("contiguous", "zigzag", "striped", "balanced")
METHODS = ("ring", "zigzag", "striped", "double_ring", "wallfacer", "allgather", "exchange")
OPTIONS: dict[str, dict[str, Any]] = {
    "double_ring": {"ranks_per_node": 4},
    "wallfacer": {"team_size": 2},
    "exchange": {"layout": "balanced"},
}
Draw = Callable[[int, int], tuple[int, ...]]
"""A seed and the tokens of a sequence -> cumulative lengths of its documents."""


def filled(kind: str) -> Draw:
    """Return the draw of documents of one kind of ``bench.packing``."""
    return lambda seed, seq_len: documents_of(kind, seq_len, seed)


def two(seed: int, seq_len: int) -> tuple[int, ...]:
    """Draw where one document ends and another begins, from 0.35 to 0.65 of the sequence."""
    return (0, int(seq_len * np.random.default_rng(seed).uniform(0.35, 0.65)), seq_len)


def one(seed: int, seq_len: int) -> tuple[int, ...]:
    """Return one document."""
    return (0, seq_len)


DRAWS: dict[str, tuple[Draw, tuple[int, int] | None]] = {
    "log-normal, at most a quarter": (filled("lognormal"), None),
    "chat, 3 % long": (filled("chat"), None),
    "about 500 tokens each": (filled("short"), None),
    "two documents": (two, None),
    "one document": (one, None),
    f"one document, window {WINDOW:,}": (one, (WINDOW - 1, 0)),
    f"log-normal, window {WINDOW:,}": (filled("lognormal"), (WINDOW - 1, 0)),
}


def figures(plan: Plan) -> tuple[float, float]:
    """Return largest over mean work of the ranks, and rows of KV that all of them send as a share of a ring's.

    What a team gathers of its queries is left out.
    """
    pairs = plan.work().pairs.sum(axis=0)
    sizes = {"batch": 1, "heads": plan.size, "kv_heads": plan.size, "head_dim": 1, "element_size": 1}
    sent = sum(plan.cost(rank, **sizes).forward.p2p.total() for rank in range(plan.size)) / (2 * plan.size)
    return float(pairs.max() / pairs.mean()), sent / ((plan.size - 1) * plan.padded_len)


def measured(draw: Draw, seq_len: int, draws: int, make: Callable[..., Plan]) -> tuple[float, float]:
    """Return the mean figures over draws of documents."""
    drawn = [draw(seed, seq_len) for seed in range(draws if draw is not one else 1)]
    work, rows = np.mean([figures(make(documents=documents)) for documents in drawn], axis=0)
    return float(work), float(rows)


def layouts_table(seq_len: int, size: int, draws: int) -> str:
    """Return a row for each kind of documents, and for each layout its work and its rows, sent by ``exchange``."""
    lines = [
        f"| {seq_len:,} tokens on {size} ranks | " + " | ".join(LAYOUTS) + " |",
        "| --- |" + " --- |" * len(LAYOUTS),
    ]
    return "\n".join(lines + [layouts_row(kind, seq_len, size, draws) for kind in DRAWS])


def layouts_row(kind: str, seq_len: int, size: int, draws: int) -> str:
    """Return the row of one kind of documents."""
    draw, window = DRAWS[kind]
    make = partial(make_plan, "exchange", seq_len=seq_len, size=size, window=window)
    found = [measured(draw, seq_len, draws, partial(make, layout=layout)) for layout in LAYOUTS]
    return f"| {kind} | " + " | ".join(f"{work:.2f}; {_share(rows)}" for work, rows in found) + " |"


def methods_table(seq_len: int, size: int, draws: int) -> str:
    """Return a row for each method, and for each kind of documents what its ranks send."""
    kinds = ["log-normal, at most a quarter", "one document", f"one document, window {WINDOW:,}"]
    lines = [f"| {seq_len:,} tokens on {size} ranks | " + " | ".join(kinds) + " |", "| --- |" + " --- |" * len(kinds)]
    for method in METHODS:
        options = OPTIONS.get(method, {})
        found = []
        for draw, window in map(DRAWS.__getitem__, kinds):
            make = partial(make_plan, method, seq_len=seq_len, size=size, window=window, **options)
            found.append(measured(draw, seq_len, draws, make))
        lines.append(f"| `{method}` | " + " | ".join(_share(rows) for _, rows in found) + " |")
    return "\n".join(lines)


def _share(rows: float) -> str:
    return f"{rows:.1%}" if rows < 0.0995 else f"{rows:.0%}"


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.packed_layouts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs=2, type=int, metavar=("TOKENS", "RANKS"), help="default: those of the page")
    parser.add_argument("--draws", type=int, default=3, help="documents drawn anew (default: %(default)s)")
    args = parser.parse_args(argv)
    cases = [(args.cases[0], args.cases[1])] if args.cases else CASES
    for seq_len, size in cases:
        print(layouts_table(seq_len, size, args.draws), end="\n\n")
    seq_len, size = cases[0]
    print(methods_table(seq_len, size, args.draws))
    return 0


if __name__ == "__main__":
    sys.exit(main())
