"""Lay out a predicted step in time: spans of computing, sending, copying and waiting of each rank.

The cost model (planner/step_cost.py) gives the seconds of each cause, and the seconds of a layer
forward and backward. Here they get an order. A micro-batch has a forward and a backward pass of
each stage. A pass lists its causes one after another, summed over the layers; in a run the layers
alternate. A stage takes its passes in the order of 1F1B or GPipe, and waits for the results of
its neighbours. At the end come the parts that the model adds once: the exposed part of the exchange
of weights and gradients, and the optimizer's.

The spans of a rank tile the predicted step: they have no gaps and no overlaps.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from planner.cluster import Cluster
from planner.page.passes import (
    EXCHANGE,
    ROUNDING,
    SENDS,
    Direction,
    Kind,
    Part,
    Passes,
    Step,
)
from planner.page.pipeline import PassStart, pass_starts
from planner.search import MemoryEstimate
from planner.step_cost import Prediction, data_seconds

TOLERANCES = (1e-3, 1e-2, 1e-1, 1.0)
"""Tolerances to try for a picture, until it has few rows."""
MAX_ROWS = 32
"""Number of rows that is few for a picture."""
MAX_REST = 1e-7
"""Largest difference of the parts' sum from the prediction, as a share of it: rounding errors."""
BUBBLE = "wait for other stages"


@dataclass(frozen=True)
class Span:
    """A span of a rank's time, in seconds from the start of the step."""

    start: float
    end: float
    kind: Kind
    cause: str
    direction: Direction = ""
    """The pass that it belongs to; empty for waits between passes and for work at the end."""
    micro_batch: int | None = None

    @property
    def seconds(self) -> float:
        """Return the length of the span."""
        return self.end - self.start


@dataclass(frozen=True)
class RankSpans:
    """The spans of some ranks of a pipeline stage that are predicted to spend a step alike."""

    stage: int
    ranks: tuple[int, ...]
    spans: tuple[Span, ...]
    """Spans that tile the step."""
    hidden: tuple[Span, ...]
    """Sends and copies that computing hides, while it runs."""


@dataclass(frozen=True)
class StepTimeline:
    """A predicted step over time: its prediction, and the spans of every rank."""

    prediction: Prediction
    rows: tuple[RankSpans, ...]
    turn: float
    """Seconds of a micro-batch's forward and backward pass through a stage."""
    micro_batches: int
    stages: int
    schedule: str
    tolerance: float
    """Largest relative difference of the seconds in which ranks of a row compute attention."""
    hidden: Mapping[str, float]
    """Seconds of sends and copies that computing hides, keyed by the prediction's causes."""

    @property
    def bubble(self) -> float:
        """Return the seconds in which a stage waits for the pipeline to fill and to drain."""
        return (self.stages - 1) * self.turn


def drawn_timeline(estimate: MemoryEstimate, cluster: Cluster) -> StepTimeline:
    """Return ``step_timeline`` with the smallest tolerance that gives few rows.

    There are at least as many rows as stages.
    """
    for tolerance in TOLERANCES[:-1]:
        timeline = step_timeline(estimate, cluster, tolerance)
        if len(timeline.rows) <= max(MAX_ROWS, timeline.stages):
            return timeline
    return step_timeline(estimate, cluster, TOLERANCES[-1])


def step_timeline(
    estimate: MemoryEstimate, cluster: Cluster, tolerance: float = TOLERANCES[0]
) -> StepTimeline:
    """Lay out the predicted step of a configuration.

    Args:
        estimate: the weighed configuration (``planner.search.weigh``).
        cluster: the machines.
        tolerance: ranks of a stage are one row if they compute attention for times that differ by
            at most this share; the row has the spans of the busiest.

    Raises:
        ArithmeticError: the parts do not add up to the prediction, so that the cost model has time
            that no part stands for.
    """
    step = Step(estimate, cluster)
    arrangement = step.arrangement
    stages = arrangement.pp
    micro_batches = step.work.micro_batches
    rows = []
    turn = 0.0
    for computing, group in _alike(step.computing_of_places(), step, tolerance):
        passes = step.passes(computing)
        turn = passes.seconds("forward") + passes.seconds("backward")
        _check_sum(step, turn)
        starts = pass_starts(
            stages,
            micro_batches,
            passes.seconds("forward"),
            passes.seconds("backward"),
            arrangement.pipeline.pipeline_schedule == "GPipe",
        )
        for stage in range(stages):
            spans, hidden = _spans(step, passes, starts[stage])
            rows.append(RankSpans(stage, _ranks(step, stage, group), spans, hidden))

    rows.sort(key=lambda row: row.ranks)
    return StepTimeline(
        step.prediction,
        tuple(rows),
        turn,
        micro_batches,
        stages,
        arrangement.pipeline.pipeline_schedule,
        tolerance,
        _hidden_seconds(step, rows[0]),
    )


def _check_sum(step: Step, turn: float) -> None:
    """Raise ArithmeticError unless a step's turns and its last parts add up to the prediction.

    Otherwise the rest would look like a wait for other stages.
    """
    last = sum(part.seconds for part in step.last_parts())
    total = step.prediction.time
    rest = total - step.turns * turn - last
    if abs(rest) > MAX_REST * total:
        raise ArithmeticError(
            f"the step is predicted to take {total:g} s, but {step.turns} turns of {turn:g} s and "
            f"{last:g} s at its end leave {rest:g} s: planner/page/passes.py lacks a part of "
            "planner/step_cost.py"
        )


def _hidden_seconds(step: Step, row: RankSpans) -> dict[str, float]:
    """Return the seconds of a rank's hidden sends and copies, keyed by the prediction's causes."""
    exchange = data_seconds(*step.estimate.inputs, step.cluster)
    hidden = {EXCHANGE: max(0.0, exchange - step.prediction.seconds[EXCHANGE])}
    for span in row.hidden:
        cause = "attention" if span.cause == SENDS else span.cause
        hidden[cause] = hidden.get(cause, 0.0) + span.seconds
    return hidden


def _alike(
    computing: Sequence[tuple[float, float]], step: Step, tolerance: float
) -> Iterator[tuple[tuple[float, float], list[int]]]:
    """Yield groups of places that compute for nearly the same time, with the busiest's seconds."""
    unit = tolerance * step.turn_seconds("attention") / step.layers
    groups: dict[float, list[int]] = {}
    busiest_first = sorted(range(len(computing)), key=lambda place: -sum(computing[place]))
    for place in busiest_first:
        seconds = sum(computing[place])
        for highest, group in groups.items():
            if highest - seconds <= unit:
                group.append(place)
                break
        else:
            groups[seconds] = [place]
    for group in groups.values():
        yield computing[group[0]], group


def _ranks(step: Step, stage: int, group: Sequence[int]) -> tuple[int, ...]:
    """Return the global ranks of a stage at a group of places: the mesh is pp x dp x cp x tp."""
    arrangement = step.arrangement
    size = step.plan.size
    ranks: list[int] = []
    for copy in range(arrangement.dp):
        for position in range(size):
            if step.plan.geometry.place(position) not in group:
                continue
            first = ((stage * arrangement.dp + copy) * size + position) * arrangement.tp
            ranks += range(first, first + arrangement.tp)
    return tuple(ranks)


def _spans(
    step: Step, passes: Passes, starts: Sequence[PassStart]
) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """Return a rank's spans, which tile the step, and its hidden sends and copies."""
    total = step.prediction.time
    last_parts = step.last_parts()
    passes_end = total - sum(part.seconds for part in last_parts)
    spans: list[Span] = []
    hidden: list[Span] = []
    now = 0.0
    for start, direction, micro_batch in starts:
        if start - now > ROUNDING * total:
            spans.append(Span(now, start, "wait", BUBBLE))
            now = start
        for part in passes.hidden[direction]:
            start = now + _delay(part, passes.parts(direction))
            end = start + part.seconds
            hidden.append(Span(start, end, part.kind, part.cause, direction, micro_batch))
        for part in passes.parts(direction):
            end = now + part.seconds
            spans.append(Span(now, end, part.kind, part.cause, direction, micro_batch))
            now = end
    if passes_end - now > ROUNDING * total:
        spans.append(Span(now, passes_end, "wait", BUBBLE))
        now = passes_end
    for part in last_parts:
        spans.append(Span(now, now + part.seconds, part.kind, part.cause))
        now += part.seconds
    return tuple(spans), tuple(hidden)


def _delay(hidden: Part, parts: Sequence[Part]) -> float:
    """Return the seconds from a pass's start to its hidden part.

    Attention's sends run while it computes. Copies begin with the pass's own computing.
    """
    seconds = 0.0
    for part in parts:
        if part.cause == "attention" or (hidden.cause != SENDS and part.kind == "compute"):
            break
        seconds += part.seconds
    return seconds
