"""Draw plans: who owns which token, and which (query, key) pairs each rank computes when.

Squares are queries x keys in global positions, as the papers draw them.
"""

from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.attention import CAUSAL, FULL
from parallel.context import ContextError, Plan, make_plan
from parallel.context.layout import Window
from tools.common.report import FAINT, INK, MASKED, PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

NUMBERED_TOKENS = 64  # longer sequences have no room for a rank's number on each token
PALE = 0.28  # opacity of a rank's colour, where it is pale
STYLE = Path(__file__).with_suffix(".mplstyle")
CAPTIONS = {
    "ring": "Ring Attention: contiguous blocks, KV passed around a ring",
    "striped": "Striped Attention: every {ordinal} token, KV passed around a ring",
    "zigzag": "Zigzag: chunk r and its mirror image of {chunks}, KV passed around a ring",
    "allgather": "All-gather: {layout} layout, all KV gathered at once",
    "exchange": "Exchange: {layout} layout, each row of KV goes straight to the ranks that see it",
}
PLAIN = ("ring", "striped", "zigzag", "allgather")
PACKED = ("ring", "striped", "zigzag", "exchange")


@dataclass(frozen=True)
class Drawing:
    """Drawing of one method; S is the padded length, P the number of ranks."""

    plan: Plan
    owners: np.ndarray
    """Rank of each token: int ``[S]``."""
    rounds: tuple[np.ndarray, ...]
    """Rank that computes each (query, key) pair in that round, -1 for none: int ``[S, S]``."""
    work: np.ndarray
    """Pairs by round and rank: int ``[rounds, P]``."""

    @property
    def in_step(self) -> bool:
        """Return whether all ranks go from round to round together, as where all KV is passed on."""
        return not self.plan.sparse

    @property
    def slowest(self) -> int:
        """Pairs of the slowest rank, of each round if ranks go in step: how long all rounds take."""
        return int(self.work.max(axis=1).sum() if self.in_step else self.work.sum(axis=0).max())

    @property
    def rows(self) -> int:
        """Rows of KV that all ranks send in a forward."""
        sizes = {"batch": 1, "heads": 1, "kv_heads": 1, "head_dim": 1, "element_size": 1}
        return (
            sum(self.plan.cost(rank, **sizes).forward.total for rank in range(self.plan.size)) // 2
        )  # k and v

    @property
    def even(self) -> float:
        """Pairs of each rank if the work were divided evenly."""
        return float(self.work.sum() / self.work.shape[1])


def drawing(
    method: str,
    seq_length: int,
    size: int,
    causal: bool = True,
    documents: tuple[int, ...] | None = None,
    window: Window | None = None,
) -> Drawing:
    """Compute what to draw of a method; documents and window as for ``make_plan``.

    Raises ContextError: as ``make_plan``.
    """
    plan = make_plan(
        method, seq_len=seq_length, size=size, causal=causal, documents=documents, window=window
    )
    if plan.geometry.ulysses_degree > 1:
        raise ContextError(
            f"method {method} splits heads: every rank computes every pair, and none has a colour"
        )
    owners = np.empty(plan.padded_len, dtype=int)
    for rank in range(size):
        owners[plan.positions(rank).numpy()] = rank
    count = len(plan.rounds(0))
    rounds = tuple(np.full((plan.padded_len, plan.padded_len), -1) for _ in range(count))
    for rank, (index, computed) in product(range(size), enumerate(rounds)):
        step, queries = plan.rounds(rank)[index], plan.positions(rank).numpy()
        keys = np.sort(np.concatenate([plan.positions(held).numpy() for held in step.holds]))
        for tile in step.tiles:
            inside = np.ones((tile.q.stop - tile.q.start, tile.k.stop - tile.k.start), dtype=bool)
            if tile.kind != FULL:
                inside = np.tril(inside) if tile.kind == CAUSAL else np.triu(inside)
            rows, columns = np.nonzero(inside)
            computed[queries[tile.q][rows], keys[tile.k][columns]] = rank
    work = np.array(
        [[plan.rounds(rank)[index].pairs for rank in range(size)] for index in range(count)]
    )
    return Drawing(plan, owners, rounds, work)


def colours(size: int) -> list[str]:
    """Return the ranks' colours as #RRGGBB; beyond eight ranks, from a ramp from dark to light."""
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
    ending = (
        "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    )
    return f"{number}{ending}"


def draw(drawings: list[Drawing]) -> "Figure":
    """Draw one band per method: its tokens, its rounds, and a time line of its ranks."""
    from matplotlib import rc_context
    from matplotlib.colors import to_rgba
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.patches import Patch

    plan = drawings[0].plan
    padding = f" (padded to {plan.padded_len})" if plan.padded_len != plan.seq_len else ""
    packed = f" in {len(plan.documents) - 1} documents" if plan.documents else ""
    left, right = plan.mask.window or (-1, -1)
    seen = [f"{left} before" if left >= 0 else "", f"{right} behind" if right > 0 else ""]
    window = (
        f", each sees itself and {' and '.join(filter(None, seen))}" if plan.mask.window else ""
    )
    headline = (
        f"Who owns which token, who computes what when: {plan.seq_len} tokens{packed}{padding}, {plan.size} ranks, "
        f"{'causal' if plan.causal else 'full'} mask{window}"
    )
    columns, longest = (
        max(len(shown.rounds) for shown in drawings),
        max(shown.slowest for shown in drawings),
    )
    with rc_context(fname=STYLE):
        engine = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)  # inches
        figure = Figure(figsize=(2.45 * columns + 6.5, 4.0 * len(drawings) + 1.25), layout=engine)
        figure.suptitle(headline, x=0.01, ha="left", size=15, weight="bold")
        bands = figure.subfigures(len(drawings), squeeze=False)[:, 0]
        for band, shown in zip(bands, drawings, strict=True):
            _band(band, shown, columns, longest)
        ranks = colours(plan.size)
        handles = [
            Patch(color=colour, label=f"rank {rank}") for rank, colour in enumerate(ranks[:8])
        ]
        handles.append(Patch(facecolor=to_rgba(ranks[0], PALE), label="done in an earlier round"))
        handles.append(Patch(facecolor="white", edgecolor=MASKED, label="still to come"))
        if np.max(drawings[0].rounds, axis=0).min() < 0:
            handles.append(Patch(facecolor=MASKED, label="masked"))
        waits = "waits for the slowest rank"
        handles.append(
            Patch(facecolor="white", edgecolor=MASKED, hatch="////", linewidth=0, label=waits)
        )
        figure.legend(
            handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=9
        )
        figure.draw_without_rendering()  # in this style, whoever saves it
    return figure


def _band(band: "SubFigure", shown: Drawing, columns: int, longest: int) -> None:
    """Draw one method, in a column for each round and two for the time line."""
    plan = shown.plan
    caption = CAPTIONS.get(plan.geometry.method.name, plan.geometry.method.name).format(
        ordinal=ordinal(plan.size), chunks=2 * plan.size, layout=plan.geometry.options.layout
    )
    band.suptitle(caption, x=0.01, ha="left", size=12, weight="bold")
    grid = band.add_gridspec(2, columns + 2, height_ratios=(1, 6))
    _strip(band.add_subplot(grid[0, :columns]), shown)
    for index in range(len(shown.rounds)):
        _square(band.add_subplot(grid[1, index]), shown, index)
    if columns > len(shown.rounds) == 1:
        axes = band.add_subplot(grid[1, 1])
        axes.axis("off")
        axes.text(0, 0.5, "no further rounds", size=9, color=FAINT)
    _time_line(band.add_subplot(grid[1, columns:]), shown, longest)


def _strip(axes: "Axes", shown: Drawing) -> None:
    """Draw who owns which token."""
    from matplotlib.colors import ListedColormap

    tokens, ranks = len(shown.owners), colours(shown.plan.size)
    numbered = tokens <= NUMBERED_TOKENS
    edges: Any = {"edgecolors": "white", "linewidth": 0.8} if numbered else {}
    cells = (np.arange(tokens + 1) - 0.5, (-0.5, 0.5), shown.owners[None])
    axes.pcolormesh(*cells, cmap=ListedColormap(ranks), vmin=-0.5, vmax=len(ranks) - 0.5, **edges)
    for position, rank in enumerate(shown.owners if numbered else ()):
        axes.text(
            position, 0, str(rank), ha="center", va="center_baseline", color=ink_on(ranks[rank])
        )
    axes.set_yticks([0], ["tokens"])
    axes.set_ylim(-0.5, 0.5)
    if documents := shown.plan.documents:
        centres = [(first + end - 1) / 2 for first, end in pairwise(documents)]
        axes.set_xticks(
            centres,
            [chr(ord("A") + index % 26) for index in range(len(centres))],
            size=8.5,
            color=INK,
        )
        axes.vlines(
            np.array(documents[1:-1]) - 0.5, -0.8, 0.65, color=INK, linewidth=1.2, clip_on=False
        )
    else:
        axes.locator_params("x", nbins=5, integer=True)
    axes.spines[:].set_visible(False)


def _square(axes: "Axes", shown: Drawing, index: int) -> None:
    """Draw one round: its pairs in their rank's colour, earlier ones pale, later ones white, masked
    ones grey.
    """
    from matplotlib.colors import ListedColormap, to_rgba

    ranks, now, none = (
        colours(shown.plan.size),
        shown.rounds[index],
        np.full_like(shown.rounds[0], -1),
    )
    before, ever = np.max([none, *shown.rounds[:index]], axis=0), np.max(shown.rounds, axis=0)
    palette: list[Any] = [*ranks, *(to_rgba(rank, PALE) for rank in ranks), "white", MASKED]
    later = np.where(ever >= 0, 2 * len(ranks), 2 * len(ranks) + 1)
    kinds = np.where(now >= 0, now, np.where(before >= 0, len(ranks) + before, later))
    edges: Any = (
        {"edgecolors": "white", "linewidth": 0.45} if len(now) <= 2 * NUMBERED_TOKENS else {}
    )
    holds = [shown.plan.rounds(rank)[index].holds for rank in range(len(ranks))]
    steps = {(rank - held[0]) % len(ranks) for rank, held in enumerate(holds)}
    title = (
        f"round {index}: rank r has KV of r-{min(steps)}" if len(steps) == 1 else f"round {index}"
    )
    title = f"round {index}: rank r has its own KV" if steps == {0} else title
    title = f"round {index}: every rank has all KV" if len(holds[0]) == len(ranks) > 1 else title
    cells = (np.arange(len(now)), np.arange(len(now)), kinds)
    axes.pcolormesh(
        *cells, cmap=ListedColormap(palette), vmin=-0.5, vmax=len(palette) - 0.5, **edges
    )
    axes.set(title=title, xlabel="keys", ylabel="" if index else "queries", aspect="equal")
    axes.invert_yaxis()
    axes.locator_params(nbins=5, integer=True)


def _time_line(axes: "Axes", shown: Drawing, longest: int) -> None:
    """Draw what each rank does over time, in (query, key) pairs; in step, a round ends with its
    slowest rank.
    """
    plan, work, ranks = shown.plan, shown.work, colours(shown.plan.size)
    took = np.broadcast_to(work.max(axis=1, keepdims=True), work.shape) if shown.in_step else work
    starts = np.cumsum(took, axis=0) - took
    ends = np.concatenate([starts[1:], np.full_like(starts[:1], shown.slowest)])
    waiting: Any = {"color": "none", "edgecolor": MASKED, "hatch": "////", "linewidth": 0}
    for done, start, end in zip(work, starts, ends, strict=True):
        bars = axes.barh(
            range(plan.size),
            done,
            left=start,
            height=0.74,
            color=ranks,
            edgecolor="white",
            linewidth=1.2,
        )
        axes.barh(range(plan.size), end - start - done, left=start + done, height=0.74, **waiting)
        said = [str(pairs) if pairs > 0.055 * longest else "" for pairs in done]
        for label, rank in zip(
            axes.bar_label(bars, said, label_type="center", size=8), ranks, strict=True
        ):
            label.set_color(ink_on(rank))
    if shown.in_step and len(starts) > 1:
        axes.vlines(
            ends[:, 0], -0.85, plan.size - 0.4, color=INK, linewidth=0.7, linestyle=(0, (2, 2))
        )
        for index, middle in enumerate((starts[:, 0] + ends[:, 0]) / 2):
            name = f"round {index}" if len(starts) <= 5 else str(index)
            axes.text(middle, -0.62, name, ha="center", va="center", size=7.5, color=FAINT)
    axes.vlines(
        shown.even, -0.42, plan.size - 0.4, color=INK, linewidth=1.4, zorder=0
    )  # behind bars and numbers
    axes.set(xlim=(0, longest * 1.02), ylim=(plan.size - 0.4, -0.85))
    axes.set_yticks(
        range(plan.size), [f"rank {rank}" for rank in range(plan.size)], size=8, color=INK
    )
    axes.set_xlabel("time, in (query, key) pairs of one rank; the black line is an even share")
    busy, ring = shown.even / shown.slowest, max((plan.size - 1) * plan.padded_len, 1)
    sent = (
        f"Rows of KV sent: {shown.rows}, {shown.rows / ring:.0%} of what a plain ring sends\n"
        if plan.sparse
        else ""
    )
    title = f"{shown.slowest} pairs until all are done = {1 / busy:.2f}x an even share; ranks busy {busy:.0%}"
    axes.set_title(sent + title, loc="left")
    axes.spines[:].set_visible(False)
