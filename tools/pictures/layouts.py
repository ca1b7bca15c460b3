"""Draw a plan: who owns which token, and which (query, key) pairs each rank computes in which round.

Squares are queries x keys in global positions, as the papers draw them.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from kernels.attention import CAUSAL, FULL
from parallel.context import ContextError, Plan, make_plan
from parallel.context.mask import Window
from tools.pictures import FAINT, INK, LATER, MASKED, PALE, colour, faded, frameless, ink_on, letter, ordinal, rgb

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUMBERED_TOKENS = 64  # longer sequences have no room for a rank's number on each token

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
        return sum(self.plan.cost(rank, **sizes).forward.total for rank in range(self.plan.size)) // 2  # k and v

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
    plan = make_plan(method, seq_len=seq_length, size=size, causal=causal, documents=documents, window=window)
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
    packed = f" in {len(plan.documents) - 1} documents" if plan.documents else ""
    left, right = plan.mask.window or (-1, -1)
    seen = [f"{left} before" if left >= 0 else "", f"{right} behind" if right > 0 else ""]
    window = f", each sees itself and {' and '.join(filter(None, seen))}" if plan.mask.window else ""
    return (
        f"Who owns which token, who computes what when: {plan.seq_len} tokens{packed}{padding}, {plan.size} ranks, "
        f"{mask} mask{window}"
    )


def _band(figure: "Figure", shown: Drawing, top: float, columns: int, longest: int) -> None:
    """Draw one method below ``top``, in inches from the figure's lower edge."""
    width, height = figure.get_size_inches()

    def axes(left: float, bottom: float, wide: float, high: float) -> "Axes":
        return figure.add_axes((left / width, bottom / height, wide / width, high / height))

    plan = shown.plan
    caption = CAPTIONS.get(plan.geometry.method.name, plan.geometry.method.name).format(
        ordinal=ordinal(plan.size), chunks=2 * plan.size, layout=plan.geometry.options.layout
    )
    figure.text(0.35 / width, (top - 0.12) / height, caption, size=12, weight="bold", color=INK, va="center")
    strip = axes(0.75, top - 0.72, 2.45 * columns - 0.35, 0.34)
    _strip(strip, shown)
    for index in range(len(shown.rounds)):
        _square(axes(0.75 + 2.45 * index, top - 3.35, 2.1, 2.1), shown, index)
    if columns > len(shown.rounds) == 1:
        figure.text((0.75 + 2.45) / width, (top - 2.3) / height, "no further rounds", size=9, color=FAINT, va="center")
    right = 0.75 + 2.45 * columns + 0.55
    _time_line(axes(right, top - 3.35, 4.3, 2.1), shown, longest)
    if plan.sparse:
        ring = max((plan.size - 1) * plan.padded_len, 1)
        text = f"Rows of KV sent: {shown.rows}, {shown.rows / ring:.0%} of what a plain ring sends"
        figure.text(right / width, (top - 0.55) / height, text, size=9, color=INK, va="center")


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
    documents = shown.plan.documents
    if documents:
        centres = [(first + end) / 2 for first, end in pairwise(documents)]
        axes.set_xticks(centres, [letter(index) for index in range(len(centres))], size=8.5, color=INK)
        for bound in documents[1:-1]:
            axes.plot([bound, bound], [-0.3, 1.12], color=INK, linewidth=1.2, clip_on=False)
    else:
        axes.set_xticks(np.array(_ticks(tokens)) + 0.5, [str(x) for x in _ticks(tokens)], size=7.5, color=FAINT)
    axes.tick_params(length=0, pad=2)
    axes.text(-0.008, 0.5, "tokens", transform=axes.transAxes, ha="right", va="center", size=8, color=FAINT)
    frameless(axes)


def _square(axes: "Axes", shown: Drawing, index: int) -> None:
    """Draw one round: its pairs in their rank's colour, earlier ones pale, masked ones grey."""
    tokens, size = len(shown.owners), shown.plan.size
    ever = np.max(shown.rounds, axis=0)
    image = _colours(np.zeros((tokens, tokens), dtype=int), size)
    image[:] = rgb(LATER)
    image[ever < 0] = rgb(MASKED)
    for before in shown.rounds[:index]:
        image[before >= 0] = 1 - PALE * (1 - _colours(before[before >= 0], size))
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
    """Draw what each rank does over time, in (query, key) pairs; in step, a round ends with its slowest rank."""
    size = shown.plan.size
    starts = _starts(shown)
    for index in range(len(starts)):
        for rank in range(size):
            done, start, face = int(shown.work[index, rank]), int(starts[index, rank]), colour(rank, size)
            axes.barh(rank, done, left=start, height=0.74, color=face, edgecolor="white", linewidth=1.2)
            ends = [*starts[index + 1 :, rank].tolist(), shown.slowest]
            waits = ends[0] - start - done
            axes.barh(
                rank, waits, left=start + done, height=0.74, color="none", edgecolor=MASKED, hatch="////", linewidth=0
            )
            if done > 0.055 * longest:
                axes.text(start + done / 2, rank, str(done), ha="center", va="center", size=8, color=ink_on(face))
    if shown.in_step and len(starts) > 1:
        for index, (start, end) in enumerate(pairwise([*starts[:, 0].tolist(), shown.slowest])):
            label = f"round {index}" if len(starts) <= 5 else str(index)
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
    frameless(axes)


def _starts(shown: Drawing) -> np.ndarray:
    """Return when each rank starts each round: int ``[rounds, P]``."""
    took = np.broadcast_to(shown.work.max(axis=1, keepdims=True), shown.work.shape) if shown.in_step else shown.work
    return np.cumsum(took, axis=0) - took


def _legend(figure: "Figure", shown: Drawing) -> None:
    from matplotlib.patches import Patch

    size = shown.plan.size
    handles = [Patch(color=colour(rank, size), label=f"rank {rank}") for rank in range(min(size, 8))]
    handles.append(Patch(facecolor=faded(colour(0, size)), label="done in an earlier round"))
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


def _colours(ranks: np.ndarray, size: int) -> np.ndarray:
    return np.array([rgb(colour(rank, size)) for rank in range(size)])[ranks]


def _ticks(tokens: int) -> list[int]:
    step = max(1, tokens // 4)
    return [*range(0, tokens - step // 2, step), tokens - 1]
