"""Lengths of documents: the share of the tokens that lies in those longer than some."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from tools.pictures import INK, PALETTE, plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LONGER = (1 << 10, 1 << 12, 1 << 15, 1 << 17)
_BAR = 40


def shares(lengths: np.ndarray, longer: np.ndarray) -> np.ndarray:
    """Return the share of all tokens that lies in documents longer than each of some lengths, float64."""
    ascending = np.sort(lengths)
    before = np.concatenate(([0], np.cumsum(ascending, dtype=np.int64)))
    return 1 - before[np.searchsorted(ascending, longer, side="right")] / before[-1]


def lines(lengths: np.ndarray) -> Iterator[str]:
    """Yield a line for each of LONGER, with its share as a figure and as a bar."""
    yield "tokens in documents longer than"
    for longer, share in zip(LONGER, shares(lengths, np.array(LONGER)), strict=True):
        yield f"{longer:>9,} {share:7.2%} {'█' * round(_BAR * share)}".rstrip()


def draw(lengths: np.ndarray, name: str) -> "Figure":
    """Draw the share over the length, with LONGER marked."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    over = np.geomspace(1, max(2 * LONGER[-1], 2 * int(lengths.max())), 400)
    axes.plot(over, 100 * shares(lengths, over), color=PALETTE[0])
    for longer, share in zip(LONGER, shares(lengths, np.array(LONGER)), strict=True):
        axes.plot(longer, 100 * share, "o", color=PALETTE[0])
        axes.annotate(f"{share:.1%} > {longer >> 10}K", (longer, 100 * share), (6, 6), textcoords="offset points")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="tokens of a document", ylabel="% of tokens in longer documents", ylim=(0, 108))
    axes.set_title(f"{name}: {len(lengths):,} documents, {int(lengths.sum(dtype=np.int64)):,} tokens", color=INK)
    plain(axes)
    return figure
