"""Draw methods: the rank of each token, the tiles of each round, and a timeline.

In each square, queries run down and keys across, in global positions, as in the papers.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

import numpy as np

from tools.common.layouts.drawing import Drawing
from tools.common.report import FAINT, INK, MASKED, PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.patches import Patch

NUMBERED_TOKENS = 64  # longer sequences have no room for a rank's number on each token
PALE = 0.28  # opacity of a rank's colour for earlier rounds
STYLE = Path(__file__).with_suffix(".mplstyle")
CAPTIONS = {
    "ring": "Ring Attention: contiguous blocks, KV passed around a ring",
    "striped": "Striped Attention: every {ordinal} token, KV passed around a ring",
    "zigzag": "Zigzag: chunk r and its mirror image of {chunks}, KV passed around a ring",
    "allgather": "All-gather: {layout} layout, all KV gathered at once",
    "exchange": "Exchange: {layout} layout, each row of KV goes straight to the ranks that see it",
}


def colours(size: int) -> list[str]:
    """Return each rank's colour as #RRGGBB; more than eight ranks get a ramp from dark to light."""
    if size <= len(PALETTE):
        return [*PALETTE[:size]]
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colour) for colour in colormaps["viridis"](np.linspace(0, 1, size))]


def ink_on(colour: str) -> str:
    """Return the colour of text that is readable on ``colour``."""
    from matplotlib.colors import to_rgb

    return INK if np.dot(to_rgb(colour), (0.299, 0.587, 0.114)) > 0.5 else "white"


def ordinal(number: int) -> str:
    """Return 1st, 2nd, 3rd, 4th, ..., 11th, ..., 21st."""
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def draw(drawings: list[Drawing]) -> "Figure":
    """Draw one band per method: its tokens, its rounds, and a timeline of its ranks."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = max(len(drawing.rounds) for drawing in drawings)
    longest = max(drawing.slowest for drawing in drawings)
    with rc_context(fname=STYLE):
        engine = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)  # inches
        figure = Figure(figsize=(2.45 * columns + 6.5, 4.0 * len(drawings) + 1.25), layout=engine)
        figure.suptitle(_headline(drawings[0]), x=0.01, ha="left", size=15, weight="bold")
        bands = figure.subfigures(len(drawings), squeeze=False)[:, 0]
        for band, drawing in zip(bands, drawings, strict=True):
            _band(band, drawing, columns, longest)

        handles = _legend(drawings[0])
        figure.legend(
            handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=9
        )
        # Compute the layout here, since the caller saves the figure outside of this style.
        figure.draw_without_rendering()

    return figure


def _headline(drawing: Drawing) -> str:
    """Return the title of a figure: the sequence, the ranks and the mask."""
    plan = drawing.plan
    tokens = f"{plan.seq_len} tokens"
    if plan.cu_seqlens:
        tokens += f" in {len(plan.cu_seqlens) - 1} documents"
    if plan.padded_len != plan.seq_len:
        tokens += f" (padded to {plan.padded_len})"

    mask = "causal mask" if plan.causal else "full mask"
    if plan.mask.window:
        keys_before, keys_after = plan.mask.window
        neighbours = []
        if keys_before >= 0:
            neighbours.append(f"{keys_before} before")
        if keys_after > 0:
            neighbours.append(f"{keys_after} after")
        mask += f", each sees itself and {' and '.join(neighbours)}"

    return f"Who owns which token, who computes what when: {tokens}, {plan.size} ranks, {mask}"


def _legend(drawing: Drawing) -> list["Patch"]:
    """Return the legend: a colour per rank, and the pale, white, grey and hatched areas."""
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Patch

    ranks = colours(drawing.plan.size)
    handles = []
    for rank, colour in enumerate(ranks[:8]):
        handles.append(Patch(color=colour, label=f"rank {rank}"))

    handles.append(Patch(facecolor=to_rgba(ranks[0], PALE), label="done in an earlier round"))
    handles.append(Patch(facecolor="white", edgecolor=MASKED, label="still to come"))
    if np.max(drawing.rounds, axis=0).min() < 0:
        handles.append(Patch(facecolor=MASKED, label="masked"))
    handles.append(
        Patch(
            facecolor="white",
            edgecolor=MASKED,
            hatch="////",
            linewidth=0,
            label="waits for the slowest rank",
        )
    )
    return handles


def _band(band: "SubFigure", drawing: Drawing, columns: int, longest: int) -> None:
    """Draw one method, in a column for each round and two for the timeline."""
    plan = drawing.plan
    method = plan.geometry.method.name
    caption = CAPTIONS.get(method, method).format(
        ordinal=ordinal(plan.size),
        chunks=2 * plan.size,
        layout=plan.geometry.options.layout,
    )
    band.suptitle(caption, x=0.01, ha="left", size=12, weight="bold")

    grid = band.add_gridspec(2, columns + 2, height_ratios=(1, 6))
    _token_strip(band.add_subplot(grid[0, :columns]), drawing)

    num_rounds = len(drawing.rounds)
    for index in range(num_rounds):
        _square(band.add_subplot(grid[1, index]), drawing, index)

    if columns > num_rounds == 1:
        axes = band.add_subplot(grid[1, 1])
        axes.axis("off")
        axes.text(0, 0.5, "no further rounds", size=9, color=FAINT)

    _time_line(band.add_subplot(grid[1, columns:]), drawing, longest)


def _token_strip(axes: "Axes", drawing: Drawing) -> None:
    """Draw the tokens in the colours of their ranks, with the documents' boundaries."""
    from matplotlib.colors import ListedColormap

    num_tokens = len(drawing.owners)
    ranks = colours(drawing.plan.size)
    is_numbered = num_tokens <= NUMBERED_TOKENS
    edges: Any = {}
    if is_numbered:
        edges = {"edgecolors": "white", "linewidth": 0.8}
    axes.pcolormesh(
        np.arange(num_tokens + 1) - 0.5,
        (-0.5, 0.5),
        drawing.owners[None],  # [1, S]
        cmap=ListedColormap(ranks),
        vmin=-0.5,
        vmax=len(ranks) - 0.5,
        **edges,
    )
    if is_numbered:
        for position, rank in enumerate(drawing.owners):
            axes.text(
                position,
                0,
                str(rank),
                ha="center",
                va="center_baseline",
                color=ink_on(ranks[rank]),
            )

    axes.set_yticks([0], ["tokens"])
    axes.set_ylim(-0.5, 0.5)
    if drawing.plan.cu_seqlens:
        _document_ticks(axes, drawing.plan.cu_seqlens)
    else:
        axes.locator_params("x", nbins=5, integer=True)

    axes.spines[:].set_visible(False)


def _document_ticks(axes: "Axes", cu_seqlens: Sequence[int]) -> None:
    """Name the documents A, B, ... below the tokens, with a line between two documents."""
    centres = []
    letters = []
    for index, (first, end) in enumerate(pairwise(cu_seqlens)):
        centres.append((first + end - 1) / 2)
        letters.append(ascii_uppercase[index % 26])

    axes.set_xticks(centres, letters, size=8.5, color=INK)

    bounds = np.array(cu_seqlens[1:-1]) - 0.5
    axes.vlines(bounds, -0.8, 0.65, color=INK, linewidth=1.2, clip_on=False)


def _square(axes: "Axes", drawing: Drawing, index: int) -> None:
    """Draw one round: its pairs in their rank's colour, earlier ones pale, later ones white.

    Masked pairs are grey.
    """
    from matplotlib.colors import ListedColormap, to_rgba

    ranks = colours(drawing.plan.size)
    size = len(ranks)
    current = drawing.rounds[index]
    nobody = np.full_like(drawing.rounds[0], -1)
    before = np.max([nobody, *drawing.rounds[:index]], axis=0)
    any_round = np.max(drawing.rounds, axis=0)

    palette: list[Any] = [*ranks, *(to_rgba(rank, PALE) for rank in ranks), "white", MASKED]
    kinds = np.where(any_round >= 0, 2 * size, 2 * size + 1)  # each pair's index in the palette
    kinds = np.where(before >= 0, size + before, kinds)
    kinds = np.where(current >= 0, current, kinds)

    edges: Any = {}
    if len(current) <= 2 * NUMBERED_TOKENS:
        edges = {"edgecolors": "white", "linewidth": 0.45}
    axes.pcolormesh(
        np.arange(len(current)),
        np.arange(len(current)),
        kinds,
        cmap=ListedColormap(palette),
        vmin=-0.5,
        vmax=len(palette) - 0.5,
        **edges,
    )
    title = _round_title(drawing, index)
    axes.set(title=title, xlabel="keys", ylabel="" if index else "queries", aspect="equal")
    axes.invert_yaxis()
    axes.locator_params(nbins=5, integer=True)


def _round_title(drawing: Drawing, index: int) -> str:
    """Return the title of a round; it says which KV rank r has if one rule holds for all r."""
    size = drawing.plan.size
    steps = set()
    for rank in range(size):
        sources = drawing.plan.rounds(rank)[index].holds
        steps.add((rank - sources[0]) % size)

    if len(drawing.plan.rounds(0)[index].holds) == size > 1:
        return f"round {index}: every rank has all KV"
    if steps == {0}:
        return f"round {index}: rank r has its own KV"
    if len(steps) == 1:
        return f"round {index}: rank r has KV of r-{min(steps)}"

    return f"round {index}"


def _time_line(axes: "Axes", drawing: Drawing, longest: int) -> None:
    """Draw each rank's work over time, in (query, key) pairs.

    If ranks start each round together, they wait for the slowest rank of the round before.
    """
    size = drawing.plan.size
    work = drawing.work  # [rounds, P]
    durations = work
    if drawing.in_step:
        durations = np.broadcast_to(work.max(axis=1, keepdims=True), work.shape)
    starts = np.cumsum(durations, axis=0) - durations  # [rounds, P]
    last_end = np.full_like(starts[:1], drawing.slowest)
    ends = np.concatenate([starts[1:], last_end])  # [rounds, P]

    for pairs, start, end in zip(work, starts, ends, strict=True):
        _round_bars(axes, pairs, start, end, min_labelled=0.055 * longest)

    if drawing.in_step and len(starts) > 1:
        _round_marks(axes, starts[:, 0], ends[:, 0], bottom=size - 0.4)
    # zorder=0: the line is behind the bars and numbers.
    axes.vlines(drawing.even, -0.42, size - 0.4, color=INK, linewidth=1.4, zorder=0)

    axes.set(xlim=(0, longest * 1.02), ylim=(size - 0.4, -0.85))
    labels = [f"rank {rank}" for rank in range(size)]
    axes.set_yticks(range(size), labels, size=8, color=INK)
    axes.set_xlabel("time, in (query, key) pairs of one rank; the black line is an even share")
    axes.set_title(_time_title(drawing), loc="left")
    axes.spines[:].set_visible(False)


def _round_bars(
    axes: "Axes", pairs: np.ndarray, start: np.ndarray, end: np.ndarray, min_labelled: float
) -> None:
    """Draw each rank's work in a round, and its wait until ``end``; arrays are ``[P]``.

    Bars of more than ``min_labelled`` pairs get their number of pairs as a label.
    """
    ranks = colours(len(pairs))
    bars = axes.barh(
        range(len(pairs)),
        pairs,
        left=start,
        height=0.74,
        color=ranks,
        edgecolor="white",
        linewidth=1.2,
    )
    axes.barh(
        range(len(pairs)),
        end - start - pairs,
        left=start + pairs,
        height=0.74,
        color="none",
        edgecolor=MASKED,
        hatch="////",
        linewidth=0,
    )

    texts = []
    for count in pairs:
        texts.append(str(count) if count > min_labelled else "")

    labels = axes.bar_label(bars, texts, label_type="center", size=8)
    for label, colour in zip(labels, ranks, strict=True):
        label.set_color(ink_on(colour))


def _round_marks(axes: "Axes", starts: np.ndarray, ends: np.ndarray, bottom: float) -> None:
    """Draw a dashed line at the end of each round, and its name above; arrays are ``[rounds]``."""
    dashed = (0, (2, 2))
    axes.vlines(ends, -0.85, bottom, color=INK, linewidth=0.7, linestyle=dashed)

    prefix = "round " if len(starts) <= 5 else ""
    for index, middle in enumerate((starts + ends) / 2):
        axes.text(
            middle,
            -0.62,
            f"{prefix}{index}",
            ha="center",
            va="center",
            size=7.5,
            color=FAINT,
        )


def _time_title(drawing: Drawing) -> str:
    """Return the timeline's title: the time of all ranks, and a sparse exchange's traffic."""
    plan = drawing.plan
    busy = drawing.even / drawing.slowest
    title = (
        f"{drawing.slowest} pairs until all are done = {1 / busy:.2f}x an even share; "
        f"ranks busy {busy:.0%}"
    )
    if not plan.sparse:
        return title

    ring_rows = max((plan.size - 1) * plan.padded_len, 1)
    share = drawing.rows / ring_rows
    return f"Rows of KV sent: {drawing.rows}, {share:.0%} of what a plain ring sends\n{title}"
