"""Draw a plan: who owns which token, and which (query, key) pairs each rank computes in which round.

Squares are queries x keys in global positions, as the papers draw them.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.attention import CAUSAL, FULL
from parallel.context import ContextError, Plan, make_plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind readers can tell apart.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#4D4D4D")
MASKED, LATER, INK, FAINT = "#C9CCD1", "#FFFFFF", "#22262B", "#6B7280"
EARLIER_STRENGTH = 0.28  # of a rank's colour, for pairs of an earlier round
NUMBERED_TOKENS = 40  # longer sequences have no room for a rank's number on each token

CAPTIONS = {
    "ring": "Ring Attention: contiguous blocks, KV passed around a ring",
    "striped": "Striped Attention: every {ordinal} token, KV passed around a ring",
    "zigzag": "Zigzag: chunk r and its mirror image of {chunks}, KV passed around a ring",
    "allgather": "All-gather: {layout} layout, all KV gathered at once",
}


@dataclass(frozen=True)
class Drawing:
    """What to draw of one method; S is the padded length, P the number of ranks."""

    plan: Plan
    owners: np.ndarray
    """Rank of each token: int ``[S]``."""
    rounds: tuple[np.ndarray, ...]
    """Rank that computes each (query, key) pair in that round, -1 for none: int ``[S, S]``."""
    work: np.ndarray
    """Pairs by round and rank: int ``[rounds, P]``."""

    @property
    def slowest(self) -> int:
        """Pairs of the slowest rank of each round, summed: how long all rounds take."""
        return int(self.work.max(axis=1).sum())

    @property
    def even(self) -> float:
        """Pairs of each rank if the work were divided evenly."""
        return float(self.work.sum() / self.work.shape[1])


def ordinal(number: int) -> str:
    """Return 1st, 2nd, 3rd, 4th, ..., 11th, ..., 21st."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def drawing(method: str, seq_length: int, size: int, causal: bool = True) -> Drawing:
    """Compute what to draw of a method.

    Raises:
        ContextError: as ``make_plan``.
    """
    plan = make_plan(method, seq_len=seq_length, size=size, causal=causal)
    if plan.geometry.ulysses_degree > 1:
        raise ContextError(f"method {method} splits heads: every rank computes every pair, and none has a colour")
    owners = np.empty(plan.padded_len, dtype=int)
    for rank in range(size):
        owners[plan.positions(rank).numpy()] = rank
    count = len(plan.rounds(0))
    rounds = tuple(_computed(plan, index) for index in range(count))
    work = np.array([[plan.rounds(rank)[index].pairs for rank in range(size)] for index in range(count)])
    return Drawing(plan, owners, rounds, work)


def _computed(plan: Plan, index: int) -> np.ndarray:
    """Return the rank that computes each pair in round ``index``, from the tiles; -1 for none."""
    computed = np.full((plan.padded_len, plan.padded_len), -1)
    for rank in range(plan.size):
        step, queries = plan.rounds(rank)[index], plan.positions(rank).numpy()
        keys = np.sort(np.concatenate([plan.positions(held).numpy() for held in step.holds]))
        for tile in step.tiles:
            inside = np.ones((tile.q.stop - tile.q.start, tile.k.stop - tile.k.start), dtype=bool)
            if tile.kind != FULL:
                inside = np.tril(inside) if tile.kind == CAUSAL else np.triu(inside)
            rows, columns = np.nonzero(inside)
            computed[queries[tile.q][rows], keys[tile.k][columns]] = rank
    return computed


def draw(drawings: list[Drawing]) -> "Figure":
    """Draw one band per method: its tokens, its rounds, and a time line of its ranks."""
    from matplotlib.figure import Figure

    columns = max(len(d.rounds) for d in drawings)
    squares = 2.45 * columns
    figure = Figure(figsize=(squares + 6.5, 4.0 * len(drawings) + 1.25), facecolor="white", layout=None)
    width, height = figure.get_size_inches()
    figure.text(
        0.35 / width, 1 - 0.36 / height, _headline(drawings[0].plan), size=15, weight="bold", color=INK, va="center"
    )
    longest = max(d.slowest for d in drawings)
    for index, shown in enumerate(drawings):
        top = height - 0.75 - 4.0 * index
        _band(figure, shown, top, columns, longest)
    _legend(figure, drawings[0])
    return figure


def _headline(plan: Plan) -> str:
    mask = "causal" if plan.causal else "full"
    padding = f" (padded to {plan.padded_len})" if plan.padded_len != plan.seq_len else ""
    return (
        f"Who owns which token, who computes what when: {plan.seq_len} tokens{padding}, {plan.size} ranks, {mask} mask"
    )


def _band(figure: "Figure", shown: Drawing, top: float, columns: int, longest: int) -> None:
    """Draw one method below ``top``, in inches from the figure's lower edge."""
    width, height = figure.get_size_inches()

    def axes(left: float, bottom: float, wide: float, high: float) -> "Axes":
        return figure.add_axes((left / width, bottom / height, wide / width, high / height))

    plan = shown.plan
    caption = CAPTIONS.get(plan.geometry.method.name, plan.geometry.method.name).format(
        ordinal=ordinal(plan.size), chunks=2 * plan.size, layout=plan.geometry.layout.name
    )
    figure.text(0.35 / width, (top - 0.12) / height, caption, size=12, weight="bold", color=INK, va="center")
    strip = axes(0.75, top - 0.72, 2.45 * columns - 0.35, 0.34)
    _strip(strip, shown)
    for index in range(len(shown.rounds)):
        _square(axes(0.75 + 2.45 * index, top - 3.35, 2.1, 2.1), shown, index)
    if columns > len(shown.rounds) == 1:
        figure.text((0.75 + 2.45) / width, (top - 2.3) / height, "no further rounds", size=9, color=FAINT, va="center")
    _time_line(axes(0.75 + 2.45 * columns + 0.55, top - 3.35, 4.3, 2.1), shown, longest)


def _strip(axes: "Axes", shown: Drawing) -> None:
    tokens = len(shown.owners)
    axes.imshow(_colours(shown.owners, shown.plan.size)[None], aspect="auto", extent=(0, tokens, 0, 1))
    if tokens <= NUMBERED_TOKENS:
        for position, rank in enumerate(shown.owners):
            ink = ink_on(colour(int(rank), shown.plan.size))
            axes.text(position + 0.5, 0.47, str(rank), ha="center", va="center", size=8, color=ink)
        for position in range(1, tokens):
            axes.axvline(position, color="white", linewidth=0.8)
    axes.set_yticks([])
    axes.set_xticks(np.array(_ticks(tokens)) + 0.5, [str(x) for x in _ticks(tokens)], size=7.5, color=FAINT)
    axes.tick_params(length=0, pad=2)
    axes.text(-0.008, 0.5, "tokens", transform=axes.transAxes, ha="right", va="center", size=8, color=FAINT)
    _frameless(axes)


def _square(axes: "Axes", shown: Drawing, index: int) -> None:
    """Draw one round: its pairs in their rank's colour, earlier ones pale, masked ones grey."""
    tokens, size = len(shown.owners), shown.plan.size
    ever = np.max(shown.rounds, axis=0)
    image = _colours(np.zeros((tokens, tokens), dtype=int), size)
    image[:] = _rgb(LATER)
    image[ever < 0] = _rgb(MASKED)
    for before in shown.rounds[:index]:
        image[before >= 0] = 1 - EARLIER_STRENGTH * (1 - _colours(before[before >= 0], size))
    now = shown.rounds[index]
    image[now >= 0] = _colours(now[now >= 0], size)
    axes.imshow(image, extent=(0, tokens, tokens, 0), interpolation="nearest")
    if tokens <= 2 * NUMBERED_TOKENS:
        lines = np.arange(1, tokens)
        axes.hlines(lines, 0, tokens, color="white", linewidth=0.45)
        axes.vlines(lines, 0, tokens, color="white", linewidth=0.45)
    ticks = _ticks(tokens)
    axes.set_xticks(np.array(ticks) + 0.5, [str(x) for x in ticks], size=7, color=FAINT)
    axes.set_yticks(np.array(ticks) + 0.5, [str(x) for x in ticks], size=7, color=FAINT)
    axes.tick_params(length=0, pad=2)
    axes.set_title(_round_title(shown.plan, index), size=8.8, color=INK, pad=5)
    axes.set_xlabel("keys", size=8, color=FAINT, labelpad=1)
    if index == 0:
        axes.set_ylabel("queries", size=8, color=FAINT, labelpad=1)
    for spine in axes.spines.values():
        spine.set(color=MASKED, linewidth=0.8)


def _round_title(plan: Plan, index: int) -> str:
    holds = [plan.rounds(rank)[index].holds for rank in range(plan.size)]
    if len(holds[0]) == plan.size > 1:
        return f"round {index}: every rank has all KV"
    steps = {(rank - held[0]) % plan.size for rank, held in enumerate(holds)}
    if steps == {0}:
        return f"round {index}: rank r has its own KV"
    return f"round {index}: rank r has KV of r-{steps.pop()}" if len(steps) == 1 else f"round {index}"


def _time_line(axes: "Axes", shown: Drawing, longest: int) -> None:
    """Draw what each rank does over time, in (query, key) pairs; a round ends with its slowest rank."""
    size = shown.plan.size
    ends = np.cumsum(shown.work.max(axis=1))
    for index, end in enumerate(ends):
        start = end - shown.work[index].max()
        for rank in range(size):
            done = int(shown.work[index, rank])
            face = colour(rank, size)
            axes.barh(rank, done, left=start, height=0.74, color=face, edgecolor="white", linewidth=1.2)
            waits = end - start - done
            axes.barh(
                rank, waits, left=start + done, height=0.74, color="none", edgecolor=MASKED, hatch="////", linewidth=0
            )
            if done > 0.055 * longest:
                axes.text(start + done / 2, rank, str(done), ha="center", va="center", size=8, color=ink_on(face))
        if len(ends) > 1:
            label = f"round {index}" if len(ends) <= 5 else str(index)
            axes.vlines(end, -0.85, size - 0.4, color=INK, linewidth=0.7, linestyle=(0, (2, 2)))
            axes.text((start + end) / 2, -0.62, label, ha="center", va="center", size=7.5, color=FAINT)
    axes.vlines(shown.even, -0.42, size - 0.4, color=INK, linewidth=1.4, zorder=0)  # behind the bars and their numbers
    axes.set_xlim(0, longest * 1.02)
    axes.set_ylim(size - 0.4, -0.85)
    axes.set_yticks(range(size), [f"rank {rank}" for rank in range(size)], size=8, color=INK)
    axes.tick_params(length=0, pad=3)
    axes.tick_params(axis="x", labelsize=7, labelcolor=FAINT)
    axes.set_xlabel("time, in (query, key) pairs of one rank; the black line is an even share", size=8, color=FAINT)
    busy = shown.even / shown.slowest
    title = f"{shown.slowest} pairs until all are done = {1 / busy:.2f}x an even share; ranks busy {busy:.0%}"
    axes.set_title(title, size=9, color=INK, pad=6, loc="left")
    _frameless(axes)


def _legend(figure: "Figure", shown: Drawing) -> None:
    from matplotlib.patches import Patch

    size = shown.plan.size
    handles = [Patch(color=colour(rank, size), label=f"rank {rank}") for rank in range(min(size, 8))]
    handles.append(Patch(facecolor=_faded(colour(0, size)), label="done in an earlier round"))
    handles.append(Patch(facecolor=LATER, edgecolor=MASKED, label="still to come"))
    if np.max(shown.rounds, axis=0).min() < 0:
        handles.append(Patch(facecolor=MASKED, label="masked"))
    handles.append(
        Patch(facecolor="white", edgecolor=MASKED, hatch="////", linewidth=0, label="waits for the slowest rank")
    )
    width, height = figure.get_size_inches()
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0.6 / width, 0.02 / height),
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        handlelength=1.3,
        columnspacing=1.5,
    )


def colour(rank: int, size: int) -> str:
    """Return a rank's colour as #RRGGBB; beyond eight ranks, from a ramp from dark to light."""
    if size <= len(PALETTE):
        return PALETTE[rank]
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return to_hex(colormaps["viridis"](rank / (size - 1)))


def _colours(ranks: np.ndarray, size: int) -> np.ndarray:
    return np.array([_rgb(colour(rank, size)) for rank in range(size)])[ranks]


def _rgb(colour: str) -> tuple[float, float, float]:
    return int(colour[1:3], 16) / 255, int(colour[3:5], 16) / 255, int(colour[5:7], 16) / 255


def _faded(colour: str) -> Any:
    return tuple(1 - EARLIER_STRENGTH * (1 - part) for part in _rgb(colour))


def ink_on(colour: str) -> str:
    """Return the colour of text that is readable on ``colour``."""
    red, green, blue = _rgb(colour)
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def _ticks(tokens: int) -> list[int]:
    step = max(1, tokens // 4)
    return [*range(0, tokens - step // 2, step), tokens - 1]


def _frameless(axes: "Axes") -> None:
    for spine in axes.spines.values():
        spine.set_visible(False)
