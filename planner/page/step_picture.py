"""Draw a step over time: a row for each group of ranks that are predicted to spend it alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal
from xml.etree.ElementTree import Element

from planner.page.elements import (
    bar,
    element,
    heading,
    label,
    legend,
    picture,
    table,
    without_empty,
)
from planner.page.passes import EXCHANGE, SLOWER
from planner.page.spans import BUBBLE, RankSpans, Span, StepTimeline
from runtime.progress import counted, duration

MAX_CAUSES = 40
"""Maximum number of spans of a rank that are drawn by cause; if there are more, passes are."""
MAX_PASSES = 1600
"""Maximum number of passes of all rows that are drawn; if there are more, runs of passes are."""
MAX_FOLDED_PASSES = 400
"""The same in a folded part of the page, to keep the page small."""
Detail = Literal["causes", "passes", "runs"]
TEXT = 16
BAR = 26
STRIP = 8
GAP = 8
AXIS = 22
SHORT = {
    "attention": "att",
    "linear": "lin",
    "recompute": "rec",
    "slices": "sl",
    "attention's sends": "send",
    "wait for other stages": "wait",
    "wait for slower ranks": "wait",
    "data parallel": "dp",
    "tensor parallel": "tp",
    "pipeline": "pp",
    "offload": "copy",
}
"""Names of causes for narrow bars."""
KINDS = {
    "compute": "computes",
    "send": "sends",
    "copy": "copies",
    SLOWER: SLOWER,
    BUBBLE: BUBBLE,
}
"""Heads of the columns of the ranks' table; waits are told apart by cause."""


@dataclass(frozen=True)
class _Drawn:
    """A drawn span: its fill, the texts that may stand in it, and its hint."""

    start: float
    end: float
    fill: str
    texts: tuple[str, ...]
    hint: str


def step_section(timeline: StepTimeline, name: str, max_passes: int = MAX_PASSES) -> list[Element]:
    """Return the picture of a step, its explanation, and tables of its seconds.

    Args:
        name: a word that makes the ids of the tables unique on the page.
        max_passes: maximum number of passes to draw.
    """
    detail = _detail(timeline, max_passes)
    fills = []
    rows = []
    for row in timeline.rows:
        drawn = _drawn(row.spans, detail)
        hidden = _hidden(row.hidden) if detail == "causes" else []
        rows.append((_name(row, timeline), drawn, hidden))
        fills += [span.fill for span in [*drawn, *hidden]]
    sections = [
        _rows(rows, timeline.prediction.time, "A step of every rank, predicted"),
        legend(fills),
        element("p", _explained(timeline, detail), class_="note"),
    ]
    if detail != "causes":
        sections += _one_micro_batch(timeline)
    sections.append(_table(timeline, f"step-{name}"))
    sections.append(_table_of_ranks(timeline, f"ranks-{name}"))
    return sections


def _detail(timeline: StepTimeline, max_passes: int) -> Detail:
    """Return what is drawn of a step: causes if there are few, else passes, else runs of passes."""
    if all(len(row.spans) <= MAX_CAUSES for row in timeline.rows):
        return "causes"
    if 2 * timeline.micro_batches * len(timeline.rows) <= max_passes:
        return "passes"
    return "runs"


def _name(row: RankSpans, timeline: StepTimeline) -> str:
    """Return a row's name: its stage, if there are several, and its ranks."""
    ranks = f"{counted(len(row.ranks), 'rank')}: {ranges(row.ranks)}"
    if timeline.stages == 1:
        return ranks
    return f"stage {row.stage}, {ranks}"


def ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers in words, such as "0 to 7, 16"."""
    starts: list[list[int]] = []
    for number in numbers:
        if starts and number == starts[-1][1] + 1:
            starts[-1][1] = number
        else:
            starts.append([number, number])
    words = [str(first) if first == last else f"{first} to {last}" for first, last in starts]
    if len(words) > 6:
        words = [*words[:5], "..."]
    return ", ".join(words)


def _drawn(spans: Sequence[Span], detail: Detail) -> list[_Drawn]:
    """Return the drawn spans of a row."""
    if detail == "causes":
        return [_of_cause(span) for span in spans]
    if detail == "passes":
        groups = _merged(spans, lambda span: (span.direction, span.micro_batch))
    else:
        groups = _merged(spans, lambda span: span.direction == "")
    return [_of_passes(group) for group in groups]


def _merged(spans: Sequence[Span], key: Callable[[Span], object]) -> list[list[Span]]:
    """Return runs of spans with the same key; spans between passes stay alone."""
    groups: list[list[Span]] = []
    for span in spans:
        is_in_pass = groups and span.direction and groups[-1][0].direction
        if is_in_pass and key(span) == key(groups[-1][0]):
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups


def _of_cause(span: Span) -> _Drawn:
    texts = [f"{span.cause} {duration(span.seconds)}", span.cause]
    if span.cause in SHORT:
        texts.append(SHORT[span.cause])
    place = ""
    if span.direction:
        place = f"{span.direction} pass of micro-batch {span.micro_batch}: "
    hint = f"{place}{span.cause}, {duration(span.seconds)}"
    return _Drawn(span.start, span.end, span.cause, tuple(texts), hint)


def _of_passes(group: Sequence[Span]) -> _Drawn:
    """Return one drawn span for the spans of a pass, or of a run of passes."""
    first = group[0]
    last = group[-1]
    if not first.direction:
        return _of_cause(first)
    seconds = duration(last.end - first.start)
    numbers = sorted({span.micro_batch for span in group if span.micro_batch is not None})
    if len(numbers) == 1 and first.direction == last.direction:
        texts = [f"{first.direction} {numbers[0]}", f"{first.direction[0].upper()}{numbers[0]}"]
        hint = f"{first.direction} pass of micro-batch {numbers[0]}, {seconds}"
        return _Drawn(first.start, last.end, first.direction, (*texts, str(numbers[0])), hint)
    text = f"passes of micro-batches {numbers[0]} to {numbers[-1]}"
    return _Drawn(first.start, last.end, "passes", (text, "passes"), f"{text}, {seconds}")


def _hidden(spans: Sequence[Span]) -> list[_Drawn]:
    drawn = []
    for span in spans:
        text = f"{span.cause} {duration(span.seconds)}, hidden"
        drawn.append(_Drawn(span.start, span.end, span.cause, (), text))
    return drawn


def _rows(
    rows: Sequence[tuple[str, Sequence[_Drawn], Sequence[_Drawn]]], total: float, title: str
) -> Element:
    """Draw rows of spans above an axis of time; hidden spans are strips below their row."""
    elements: list[Element] = []
    top = 0.0
    for name, spans, hidden in rows:
        elements += heading(name, name, top + TEXT - 4)
        top += TEXT
        for span in spans:
            start = span.start / total
            share = (span.end - span.start) / total
            elements.append(bar(start, share, span.fill, span.hint, top, BAR))
            elements += label(start, share, span.texts, top + 17)
        top += BAR
        strips = {strip.fill for strip in hidden}
        for number, fill in enumerate(sorted(strips)):
            strip_top = top + 2 + number * (STRIP + 2)
            for span in hidden:
                if span.fill == fill:
                    share = (span.end - span.start) / total
                    start = span.start / total
                    elements.append(bar(start, share, fill, span.hint, strip_top, STRIP))
        top += len(strips) * (STRIP + 2) + GAP
    elements += _axis(total, top)
    return picture(elements, top + AXIS, title)


def _axis(total: float, top: float) -> list[Element]:
    """Draw an axis with ticks at the quarters of the time."""
    elements = []
    for quarter in range(5):
        x = f"{min(99.9, 25 * quarter)}%"
        classes = "row"
        if quarter:
            classes += " end" if quarter == 4 else " centre"
        if quarter % 2:
            classes += " quarter"
        text = duration(total * quarter / 4) if quarter else "0"
        y2 = f"{top + 5:g}"
        elements.append(element("line", x1=x, x2=x, y1=f"{top:g}", y2=y2, class_="tick"))
        elements.append(element("text", text, x=x, y=f"{top + 17:g}", class_=classes))
    ends = {"x1": "0", "x2": "100%", "y1": f"{top:g}", "y2": f"{top:g}"}
    elements.append(element("line", class_="tick", **ends))
    return elements


def _one_micro_batch(timeline: StepTimeline) -> list[Element]:
    """Draw the two passes of one micro-batch by cause, without the waits between them."""
    rows = []
    fills: list[str] = []
    for row in timeline.rows:
        if row.stage:
            continue
        moved: list[Span] = []
        now = 0.0
        offsets: dict[str, float] = {}
        for span in row.spans:
            if span.micro_batch == 0:
                offsets.setdefault(span.direction, now - span.start)
                moved.append(replace(span, start=now, end=now + span.seconds))
                now += span.seconds
        hidden = []
        for span in row.hidden:
            if span.micro_batch == 0:
                start = span.start + offsets[span.direction]
                hidden.append(replace(span, start=start, end=start + span.seconds))
        drawn = [_of_cause(span) for span in moved]
        strips = _hidden(hidden)
        fills += [span.fill for span in [*drawn, *strips]]
        rows.append((_name(row, timeline), drawn, strips))
    title = "One micro-batch on a rank: its forward pass, then its backward pass"
    return [element("h3", title), _rows(rows, timeline.turn, title), legend(fills)]


def _explained(timeline: StepTimeline, detail: Detail) -> str:
    """Return sentences on how to read the picture."""
    sentences = [
        f"A step takes {duration(timeline.prediction.time)}; the spans of a rank add up to it."
    ]
    if detail == "causes":
        sentences.append(
            "A pass lists its causes one after another, summed over its layers; in a run the "
            "layers alternate."
        )
    elif detail == "passes":
        sentences.append(
            "F0 is the forward pass of micro-batch 0, and B0 its backward pass; a bar without room "
            "for this has only the number, or no text."
        )
    else:
        sentences.append("Passes that follow each other without a wait are drawn as one.")
    if any(row.hidden for row in timeline.rows):
        sentences.append(
            "Strips below a row are sends and copies that run while the rank computes: they cost "
            "no time."
        )
    if timeline.hidden.get(EXCHANGE):
        sentences.append(
            "The part of the exchange of weights and gradients (data parallel) that computing "
            "hides is not drawn."
        )
    if timeline.stages > 1:
        sentences.append(
            f"Each stage waits {duration(timeline.bubble)} while the pipeline fills and drains. "
            "The cost model gives all stages the time of the busiest."
        )
        if timeline.schedule not in ("1F1B", "GPipe"):
            sentences.append(
                f"The order is that of 1F1B, since the cost model counts the bubble of "
                f"{timeline.schedule} like it."
            )
    if len(timeline.rows) == timeline.stages:
        group = "ranks" if timeline.stages == 1 else "ranks of a stage"
        sentences.append(f"All {group} are predicted to spend the step alike.")
    else:
        sentences.append(
            f"Ranks of one row compute attention for times that differ by at most "
            f"{timeline.tolerance:.1%}; the row is the busiest's."
        )
    return " ".join(sentences)


def _table(timeline: StepTimeline, name: str) -> Element:
    """Return the seconds of each cause in the prediction, and those that computing hides."""
    prediction = timeline.prediction
    hidden = timeline.hidden
    lines = [["cause", "predicted", "share of the step", "sends and copies hidden by computing"]]
    slowest_first = sorted(prediction.seconds.items(), key=lambda item: -item[1])
    for cause, seconds in slowest_first:
        if seconds or hidden.get(cause):
            share = f"{seconds / prediction.time:.1%}"
            hidden_seconds = duration(hidden[cause]) if hidden.get(cause) else ""
            spent = duration(seconds) if seconds else "0"
            lines.append([cause, spent, share, hidden_seconds])
    lines.append(["a step", duration(prediction.time), "100.0%", ""])
    return table(without_empty(lines), name)


def _table_of_ranks(timeline: StepTimeline, name: str) -> Element:
    """Return the seconds of the ranks' spans by kind; a row's sum is the step."""
    lines = [["ranks", *KINDS.values(), "a step"]]
    for row in timeline.rows:
        seconds = dict.fromkeys(KINDS, 0.0)
        for span in row.spans:
            kind = span.cause if span.kind == "wait" else span.kind
            seconds[kind] += span.seconds
        cells = [duration(spent) if spent else "" for spent in seconds.values()]
        lines.append([_name(row, timeline), *cells, duration(sum(seconds.values()))])
    return table(without_empty(lines), name)
