"""Draw a run's profile beside the prediction of its configuration."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from planner.page.elements import Child, bar, element, heading, label, legend, picture, table
from planner.page.spans import RankSpans, StepTimeline
from runtime.errors import UserError
from runtime.progress import counted, duration
from train.callbacks.profile import FOLDER, RankTimes
from train.config.derive import with_joined_ranks
from train.config.sizes import validate_sizes

CAUSES = ("compute", "exposed sends and waits", "copies", "data", "saving", "other")
KINDS = {
    "compute": "compute",
    "send": "exposed sends and waits",
    "wait": "exposed sends and waits",
    "copy": "copies",
}
"""Name for each kind of span. A profile counts exposed copies under ``other``."""
TEXT = 16
BAR = 20
PAIR = 66
MAX_RANKS = 8
"""Maximum number of ranks in the picture; the table has all."""


class ProfileError(UserError):
    """A run has no profile that can be read."""


@dataclass(frozen=True)
class ProfiledRun:
    """A run with a profile: its folder, its configuration and the times of its ranks."""

    folder: Path
    config: Any
    times: list[RankTimes]


@dataclass(frozen=True)
class Comparison:
    """The seconds of a rank by cause, predicted and measured."""

    rank: int
    predicted: dict[str, float]
    measured: dict[str, float]


def read_profile(run: Path) -> list[RankTimes]:
    """Return the times of a run's ranks, as ``--profile`` wrote them.

    Raises ProfileError if the run has no profile, if it cannot be read, or if a number in it is
    impossible.
    """
    file = run / FOLDER / "ranks.json"
    remedy = "give a run that was started with --profile --save FOLDER"
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(f"{file}: cannot be read ({error.strerror}); {remedy}") from error
    except ValueError as error:
        raise ProfileError(f"{file}: not valid JSON ({error}); {remedy}") from error

    types = {"host": str, "rank": int, "memory": int}
    times = []
    for row in rows if isinstance(rows, list) else [None]:
        values: dict[str, Any] = {}
        for entry in fields(RankTimes):
            value = row.get(entry.name) if isinstance(row, dict) else None
            kind: Any = types.get(entry.name, int | float)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ProfileError(f"{file}: {entry.name} of a rank is missing or wrong; {remedy}")
            if kind is not str and not 0 <= value <= sys.float_info.max:  # NaN neither
                raise ProfileError(
                    f"{file}: {entry.name} of a rank is {value}; it must be finite, and 0 or more; "
                    f"{remedy}"
                )
            values[entry.name] = value
        if not values["iteration"]:
            raise ProfileError(f"{file}: iteration of a rank is 0, and must take time; {remedy}")
        times.append(RankTimes(**values))
    ranks = [rank_times.rank for rank_times in times]
    if not times or ranks != list(range(len(times))):
        raise ProfileError(f"{file}: has ranks {ranks}, not 0, 1, 2, ...; {remedy}")
    return times


def read_profiled_run(run: Path, config: Any) -> ProfiledRun:
    """Return a run with its profile and its configuration, which must suit each other.

    Raises UserError if the profile cannot be read, or if the configuration has no mesh of as many
    ranks.
    """
    times = read_profile(run)
    try:
        validate_sizes(with_joined_ranks(config, len(times)), len(times))
    except UserError as error:
        ranks = counted(len(times), "rank")
        raise ProfileError(
            f"{run}: the profile has {ranks}, which does not suit the run's config.toml: {error}"
        ) from error
    return ProfiledRun(run, config, times)


def comparisons(times: Sequence[RankTimes], timeline: StepTimeline) -> list[Comparison]:
    """Return predicted and measured seconds of each rank, whose sums are those of a step."""
    rows_by_rank = {rank: row for row in timeline.rows for rank in row.ranks}
    compared = []
    for rank_times in times:
        measured = {
            "compute": rank_times.compute,
            "exposed sends and waits": rank_times.exposed,
            "data": rank_times.data,
            "saving": rank_times.saving,
            "other": rank_times.other,
        }
        predicted = _predicted(rows_by_rank[rank_times.rank])
        compared.append(Comparison(rank_times.rank, predicted, measured))
    return compared


def _predicted(row: RankSpans) -> dict[str, float]:
    """Return the seconds of a rank's spans, keyed by the causes of a profile."""
    seconds: dict[str, float] = {}
    for span in row.spans:
        cause = KINDS[span.kind]
        seconds[cause] = seconds.get(cause, 0.0) + span.seconds
    return seconds


def measured_section(run: ProfiledRun, timeline: StepTimeline, cluster: str) -> list[Element]:
    """Return the picture and the table of a run's predicted and measured seconds.

    ``timeline`` is the prediction of the run's own configuration on the cluster of this name.
    """
    times = run.times
    compared = comparisons(times, timeline)
    slowest = max(times, key=lambda rank_times: rank_times.iteration).iteration
    predicted = timeline.prediction.time
    error = predicted / slowest - 1
    comparison = "more" if error > 0 else "less"
    sentence = (
        f"{run.folder} took {duration(slowest)} an iteration on its slowest rank. Predicted for "
        f"{cluster} are {duration(predicted)}, {abs(error):.0%} {comparison}. A profile makes a "
        "run slower, and counts exposed copies to and from host memory under other."
    )
    shown = compared[:MAX_RANKS]
    if len(compared) > MAX_RANKS:
        sentence += f" The picture has the first {MAX_RANKS} ranks; the table has all."
    in_order = []
    for cause in CAUSES:
        if any(row.predicted.get(cause) or row.measured.get(cause) for row in compared):
            in_order.append(cause)
    return [
        element("p", sentence),
        _pairs(shown, max(predicted, slowest)),
        legend(in_order),
        _table(compared, in_order),
    ]


def _pairs(compared: Sequence[Comparison], total: float) -> Element:
    """Draw two bars for each rank, its prediction above its measurement, on one scale."""
    elements: list[Element] = []
    top = 0.0
    for row in compared:
        name = f"rank {row.rank}: predicted above, measured below"
        elements += heading(name, name, top + TEXT - 4)
        for number, seconds in enumerate((row.predicted, row.measured)):
            bar_top = top + TEXT + number * (BAR + 1)
            start = 0.0
            for cause in CAUSES:
                share = seconds.get(cause, 0.0) / total
                if not share:
                    continue
                text = f"{cause} {duration(seconds[cause])}"
                elements.append(bar(start, share, cause, text, bar_top, BAR))
                elements += label(start, share, [text, cause], bar_top + 14)
                start += share
        top += PAIR
    return picture(elements, top, "Seconds of each rank, predicted and measured")


def _table(compared: Sequence[Comparison], causes: Sequence[str]) -> Element:
    lines: list[list[Child]] = [["rank", "", *causes, "a step"]]
    for row in compared:
        for name, seconds in (("predicted", row.predicted), ("measured", row.measured)):
            cells = [duration(seconds[cause]) if seconds.get(cause) else "" for cause in causes]
            lines.append([str(row.rank), name, *cells, duration(sum(seconds.values()))])
    return table(lines, "measured", words=(0, 1))
