"""Order the passes of micro-batches through the stages of a pipeline, and give each a start."""

from typing import NamedTuple

from planner.page.passes import Direction


class PassStart(NamedTuple):
    """The start of a pass of a micro-batch through a stage, in seconds."""

    start: float
    direction: Direction
    micro_batch: int


def pass_starts(
    stages: int, micro_batches: int, forward: float, backward: float, all_forward_first: bool
) -> list[list[PassStart]]:
    """Return the starts of every stage's passes, in the order in which the stage takes them.

    A stage begins a pass when it is free and the neighbouring stage's result is there. In 1F1B a
    stage begins with as many forward passes as there are stages from it to the last one, and then
    alternates (Narayanan et al. 2021, section 2.2); in GPipe all forward passes come first. The
    last pass ends after ``micro_batches + stages - 1`` times the seconds of both passes.

    An interleaved schedule is laid out as 1F1B, since the cost model counts its bubble so.
    """
    orders = []
    for stage in range(stages):
        warm_up = micro_batches if all_forward_first else min(micro_batches, stages - stage)
        orders.append(_pass_order(micro_batches, warm_up))

    seconds = {"forward": forward, "backward": backward}
    ends: dict[tuple[Direction, int, int], float] = {}
    starts: list[list[PassStart]] = [[] for _ in range(stages)]
    free = [0.0] * stages
    remaining = sum(map(len, orders))
    while remaining:
        for stage, order in enumerate(orders):
            while len(starts[stage]) < len(order):
                direction, micro_batch = order[len(starts[stage])]
                needed = _input_of(direction, micro_batch, stage, stages)
                if needed is not None and needed not in ends:
                    break
                ready = ends[needed] if needed is not None else 0.0
                start = max(free[stage], ready)
                free[stage] = start + seconds[direction]
                ends[direction, micro_batch, stage] = free[stage]
                starts[stage].append(PassStart(start, direction, micro_batch))
                remaining -= 1
    return starts


def _pass_order(micro_batches: int, warm_up: int) -> list[tuple[Direction, int]]:
    """Return a stage's passes: the warm-up, then a backward and a forward pass in turns."""
    order: list[tuple[Direction, int]] = [("forward", number) for number in range(warm_up)]
    for number in range(micro_batches):
        order.append(("backward", number))
        if warm_up + number < micro_batches:
            order.append(("forward", warm_up + number))
    return order


def _input_of(
    direction: Direction, micro_batch: int, stage: int, stages: int
) -> tuple[Direction, int, int] | None:
    """Return the pass whose result a pass takes: its direction, micro-batch and stage."""
    if direction == "forward":
        return ("forward", micro_batch, stage - 1) if stage else None
    if stage == stages - 1:
        return "forward", micro_batch, stage
    return "backward", micro_batch, stage + 1
