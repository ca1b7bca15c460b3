"""The page of packed documents has the figures of plans.

Two rows here, all of them with the slow tests.
"""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from bench.shapes import documents_of
from parallel.context import make_plan

PAGE = Path(__file__).resolve().parents[3] / "docs" / "concepts" / "packed.md"
CASES = ((16_384, 8), (131_072, 16))
LAYOUTS = ("contiguous", "zigzag", "striped", "balanced")
METHODS = {
    **{name: {} for name in ("ring", "zigzag", "striped", "allgather")},
    "double_ring": {"ranks_per_node": 4},
    "wallfacer": {"team_size": 2},
    "exchange": {"layout": "balanced"},
}
WINDOW = (1023, 0)
KINDS = {
    "log-normal, at most a quarter": ("lognormal", None),
    "chat, 3 % long": ("chat", None),
    "about 500 tokens each": ("short", None),
    "two documents": ("two", None),
    "one document": ("one", None),
    "one document, window 1,024": ("one", WINDOW),
    "log-normal, window 1,024": ("lognormal", WINDOW),
}
DRAWS = 3


def drawn(name, seed, seq_len):
    """Cumulative lengths of documents.

    One, two of 0.35 to 0.65 of the sequence, or as bench/shapes.py draws them.
    """
    if name == "two":
        return (0, int(seq_len * np.random.default_rng(seed).uniform(0.35, 0.65)), seq_len)
    return (0, seq_len) if name == "one" else documents_of(name, seq_len, seed)


def figures(plan):
    """Largest over mean work of the ranks, and rows of KV that all of them send.

    The rows are a share of a ring's.

    What a team gathers of its queries is left out.
    """
    pairs = plan.work().pairs.sum(axis=0)
    sizes = {
        "batch": 1,
        "heads": plan.size,
        "kv_heads": plan.size,
        "head_dim": 1,
        "element_size": 1,
    }
    sent = sum(plan.cost(rank, **sizes).forward.p2p.total() for rank in range(plan.size)) / (
        2 * plan.size
    )
    return float(pairs.max() / pairs.mean()), sent / ((plan.size - 1) * plan.padded_len)


def counted(kind, method, seq_len, size, **options):
    """Mean figures over draws of documents, the second as the page has it."""
    name, window = KINDS[kind]
    make = partial(make_plan, method, seq_len=seq_len, size=size, window=window, **options)
    seeds = range(1 if name == "one" else DRAWS)
    work, rows = np.mean(
        [figures(make(documents=drawn(name, seed, seq_len))) for seed in seeds], axis=0
    )
    return float(work), f"{rows:.1%}" if rows < 0.0995 else f"{rows:.0%}"


def layouts_row(kind, seq_len, size):
    """A kind's row: work and rows of each layout, sent by exchange."""
    counts = [counted(kind, "exchange", seq_len, size, layout=layout) for layout in LAYOUTS]
    return f"| {kind} | " + " | ".join(f"{work:.2f}; {rows}" for work, rows in counts) + " |"


def test_the_page_has_what_is_counted():
    kind = "log-normal, at most a quarter"
    assert layouts_row(kind, *CASES[0]) in PAGE.read_text().splitlines()


@pytest.mark.slow
def test_the_page_has_every_layout_and_method():
    page = PAGE.read_text().splitlines()
    for seq_len, size in CASES:
        head = page.index(f"| {seq_len:,} tokens on {size} ranks | {' | '.join(LAYOUTS)} |")
        assert page[head + 2 : head + 2 + len(KINDS)] == [
            layouts_row(kind, seq_len, size) for kind in KINDS
        ]
    kinds = ["log-normal, at most a quarter", "one document", "one document, window 1,024"]
    for method, options in METHODS.items():
        rows = [counted(kind, method, *CASES[0], **options)[1] for kind in kinds]
        assert f"| `{method}` | {' | '.join(rows)} |" in page


def test_one_document_by_hand():
    """The last of four blocks of 16 tokens sees 3.5 others.

    Half of a ring's rows are of earlier blocks.
    """
    make = partial(make_plan, "exchange", seq_len=64, size=4, documents=(0, 64))
    pairs = [16 * 17 / 2 + 16 * 16 * rank for rank in range(4)]
    assert figures(make(layout="contiguous")) == pytest.approx(
        (max(pairs) / np.mean(pairs), 6 / 12)
    )
    assert figures(make(layout="balanced")) == pytest.approx((1, 0.75))
