"""Write ranked plans as a page: tools.plan --html."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from planner.cluster import Cluster
from planner.dry_run import tightly, with_files
from planner.levers import described
from planner.page.elements import document, element, table
from planner.page.measured import ProfiledRun, measured_section
from planner.page.memory_bars import MemoryRow, memory_section
from planner.page.origins import origins
from planner.page.report import NO_GPU, commands, figures, file_of, section, shown_path
from planner.page.spans import drawn_timeline, step_timeline
from planner.page.step_picture import MAX_FOLDED_PASSES, MAX_PASSES, step_section
from planner.search import weigh
from planner.workload import known_documents, typical_documents
from runtime.progress import amount, counted, duration
from tools.common.plan_text import (
    alike,
    command,
    discarded,
    headline,
    notes,
    sources,
    table_cells,
)
from tools.common.plans.doubled import doubled_section
from tools.common.plans.ranked import Plans
from train.config.derive import with_joined_ranks

COUNTED = (
    "Memory: counted from the plan that runs (planner/step_memory.py), without the allocator's "
    "reserve. --dry-run rehearses the run's own code."
)


def plan_page(plans: Plans) -> str:
    """Return the page of ranked plans.

    The plans for twice the length and twice the GPUs are searched anew, which takes as long as the
    search for the plans themselves.
    """
    first = plans.rows[0].candidate
    cluster = plans.cluster
    measured = _measured_sections(plans)
    best = first.config
    prediction = first.prediction
    sections = [
        element("p", f"Fits{tightly(prediction.bytes, cluster)}: {described(best)}"),
        _figures(plans),
        *_notes(best, bool(plans.args.model)),
        section("Plans", _plans_section(plans)),
        section("Memory of a process", memory_section(_memory_rows(plans), cluster)),
        section("A step over time", _steps(plans)),
        *measured,
        section("If the length or the number of GPUs doubles", doubled_section(plans)),
        section("Where the numbers come from", _sources(plans)),
        section("Commands", commands(_commands(plans))),
    ]
    return document(f"Plan: {headline(plans.world_size, cluster, best)}", sections)


def _notes(config: Any, scaled: bool) -> list[Element]:
    """Return the text output's warnings as a paragraph, in a list; an empty list without any."""
    text = " ".join(line.strip() for line in notes(config, scaled))
    return [element("p", text, class_="note")] if text else []


def _figures(plans: Plans) -> Element:
    first = plans.rows[0]
    prediction = first.candidate.prediction
    pairs = [("a step, predicted", duration(prediction.time))]
    if first.measured is not None:
        pairs.append(("a step, measured", duration(first.measured)))
    pairs += [
        ("tokens/s", f"{first.tokens_per_second:,.0f}"),
        (f"memory, of {plans.cluster.memory_gb:g} GB", amount(prediction.bytes)),
    ]
    if prediction.host:
        room = f", of {plans.cluster.host_memory_gb:g} GB" if plans.cluster.host_memory_gb else ""
        pairs.append((f"host memory{room}", amount(prediction.host)))
    return figures(pairs)


def _plans_section(plans: Plans) -> list[Element]:
    """Return the table of plans, with the text output's cells."""
    shown = plans.shown
    elements = [table(table_cells(shown), "plans", words=range(1, 4))]
    texts = [*alike(shown), *discarded(plans.ranking, plans.cluster, len(shown)).splitlines()]
    if plans.note:
        texts.append(plans.note)
    elements += [element("p", text, class_="note") for text in texts]
    return elements


def _memory_rows(plans: Plans) -> list[MemoryRow]:
    rows = []
    for number, row in enumerate(plans.shown, 1):
        prediction = row.candidate.prediction
        name = f"plan {number}: {described(row.candidate.config)}"
        rows.append(MemoryRow(name, prediction.memory, prediction.host))
    return rows


def _steps(plans: Plans) -> list[Element]:
    """Return the steps of the shown plans over time; all but the first unfold on a click."""
    lengths = tuple(plans.args.document_lengths)
    elements: list[Element] = []
    for number, row in enumerate(plans.shown, 1):
        config = row.candidate.config
        documents = typical_documents(config, lengths)
        estimate = weigh(config, plans.world_size, plans.cluster, documents)
        max_passes = MAX_PASSES if number == 1 else MAX_FOLDED_PASSES
        timeline = drawn_timeline(estimate, plans.cluster)
        parts = step_section(timeline, str(number), max_passes)
        name = f"Plan {number}: {described(config)}"
        if number == 1:
            elements += [element("h3", name), *parts]
        else:
            elements.append(element("details", element("summary", name), *parts))
    return elements


def _measured_sections(plans: Plans) -> list[Element]:
    """Return the section on the run that --measured names, in a list; an empty list without it."""
    run: ProfiledRun | None = plans.args.run
    if run is None:
        return []
    world_size = len(run.times)
    config = with_joined_ranks(run.config, world_size)
    estimate = weigh(config, world_size, plans.cluster, known_documents(config))
    timeline = step_timeline(estimate, plans.cluster)
    children = measured_section(run, timeline, plans.cluster.name)
    children.insert(0, element("p", f"{counted(world_size, 'process')}: {described(config)}"))
    return [section("Predicted and measured", children)]


def _sources(plans: Plans) -> list[Element]:
    cluster = plans.cluster
    candidate = plans.rows[0].candidate
    file = file_of(cluster, plans.config.context.cluster)
    seconds = candidate.prediction.seconds
    elements = [element("p", line) for line in _time_and_error(candidate.config, cluster)]
    best = candidate.config
    running = cluster.running(best.context.attention_backend, best.packed)
    elements += origins(seconds, cluster, running, file, COUNTED, shown_path(file))
    elements.append(element("p", NO_GPU))
    return elements


def _time_and_error(config: Any, cluster: Cluster) -> list[str]:
    """Return the text output's sentences on the rates and on the error of predictions."""
    lines = sources(config, cluster)
    time, error, compared = [line.strip() for line in lines[1:4]]
    return [f"Rates: {time.partition(': ')[2]}.", f"Error: {error.partition(': ')[2]} {compared}."]


def _commands(plans: Plans) -> Sequence[tuple[str, str]]:
    """Return the commands that start the fastest plan and that make the page again."""
    best = plans.rows[0].candidate.config
    again = ("Make this page again:", f"python -m tools.plan {shlex.join(plans.argv)}")
    if plans.args.model:
        lines = command(best, plans.base, plans.world_size, plans.cluster, plans.file)
        return [("Start plan 1:", _joined(lines)), again]

    written = plans.args.write or Path("plan.toml")
    write = again
    if plans.args.write is None:
        argv = shlex.join([*plans.argv, "--write", str(written)])
        write = ("Write plan 1 as a configuration:", f"python -m tools.plan {argv}")
    lines = command(
        best,
        best,
        plans.world_size,
        plans.cluster,
        shlex.quote(str(written)),
        has_data=not with_files(best)[2],
    )
    start = _joined(lines)
    starts = [write, ("Start it:", start)]
    return starts if write is again else [*starts, again]


def _joined(lines: Sequence[str]) -> str:
    """Return a command's lines without their indent."""
    return "\n".join(lines).strip()
