"""Sections of the page that plans and dry runs share, and the page of a dry run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from planner.cluster import CLUSTERS, Cluster, cluster_file, load_cluster
from planner.page.elements import Child, document, element
from planner.page.memory_bars import MemoryRow, memory_section
from planner.page.origins import origins
from planner.page.spans import drawn_timeline
from planner.page.step_picture import step_section
from planner.recorder import CAUSES, Rehearsal
from planner.search import weigh
from runtime.progress import amount, counted, duration

REHEARSED = (
    "Memory: each process of the table was rehearsed. The run's own code ran forward, backward and "
    "the optimizer's step on tensors without memory, and its allocations were added up."
)
NO_GPU = "This program has not been run on a GPU yet: no GPU has confirmed these predictions."


def section(title: str, children: Iterable[Child]) -> Element:
    """Return a section of the page under a heading."""
    return element("section", element("h2", title), *children)


def figures(pairs: Iterable[tuple[str, str]]) -> Element:
    """Return the page's main figures: for each its name and its value."""
    items = [element("li", name, element("b", value)) for name, value in pairs]
    return element("ul", *items, class_="figures")


def commands(pairs: Iterable[tuple[str, str]]) -> list[Element]:
    """Return commands to copy, each below a sentence on what it does."""
    elements = []
    for sentence, command in pairs:
        elements += [element("p", sentence), element("pre", command)]
    return elements


def file_of(cluster: Cluster, name: str | None) -> Path | None:
    """Return the file of a cluster, relative to the sources if it is one of configs/clusters.

    Args:
        name: the value of --cluster; if None, the file with equal numbers is taken.
    """
    if name is not None:
        file = cluster_file(name)
    else:
        equal = [path for path in sorted(CLUSTERS.glob("*.toml")) if load_cluster(path) == cluster]
        if not equal:
            return None
        file = equal[0]
    return file


def shown_path(file: Path | None) -> str:
    """Return a file as the page names it."""
    if file is None:
        return ""
    if file.resolve().parent == CLUSTERS:
        return f"configs/clusters/{file.name}"
    return str(file)


@dataclass(frozen=True)
class DryRun:
    """A dry run: its complete configuration, its machines, and the rehearsals of its ranks."""

    config: Any
    world_size: int
    cluster: Cluster
    cluster_name: str | None
    """Value of --cluster."""
    rehearsals: tuple[Rehearsal, ...]


def dry_run_page(
    run: DryRun,
    cu_seqlens: tuple[int, ...] | None,
    verdict: str,
    notes: Sequence[str],
    starts: Sequence[str],
) -> str:
    """Return the page of a dry run.

    Args:
        cu_seqlens: cumulative document lengths of a micro-batch, if tokens attend only within
            documents.
        verdict: the sentence that says whether the run fits.
        notes: the dry run's notes.
        starts: the lines of the output with commands that start the run.
    """
    config = run.config
    cluster = run.cluster
    rehearsals = run.rehearsals
    world_size = run.world_size
    timeline = drawn_timeline(weigh(config, world_size, cluster, cu_seqlens), cluster)
    prediction = timeline.prediction
    busiest = max(rehearsals, key=lambda rehearsal: rehearsal.bytes)
    rows = []
    for rehearsal in rehearsals:
        parts = {cause: rehearsal.memory.get(cause, 0) for cause in CAUSES}
        name = f"stage {rehearsal.stage}, rank {rehearsal.rank}"
        rows.append(MemoryRow(name, parts, rehearsal.host))

    iterations = config.train.train_iters
    main_figures = [
        ("a step", duration(prediction.time)),
        (counted(iterations, "step"), duration(iterations * prediction.time)),
        ("memory of a process", amount(busiest.bytes)),
    ]
    if busiest.host:
        main_figures.append(("host memory", amount(max(each.host for each in rehearsals))))

    file = file_of(cluster, run.cluster_name)
    title = (
        f"Dry run: {counted(world_size, 'process')} on {cluster.name}, "
        f"sequences of {config.sequence_length} tokens"
    )
    running = cluster.running(config.context.attention_backend, config.packed)
    sources = origins(prediction.seconds, cluster, running, file, REHEARSED, shown_path(file))
    sections = [
        element("p", verdict[:1].upper() + verdict[1:]),
        figures(main_figures),
        *(element("p", note, class_="note") for note in notes),
        section("Memory of each rehearsed process", memory_section(rows, cluster)),
        section("A step over time", step_section(timeline, "1")),
        section("Where the numbers come from", [*sources, element("p", NO_GPU)]),
        section("Commands", commands((_meaning(start), _command(start)) for start in starts)),
    ]
    return document(title, sections)


def _meaning(start: str) -> str:
    """Return what a line of the dry run's output is for."""
    return "Start the run:" if start.startswith("start: ") else "Or submit it:"


def _command(start: str) -> str:
    return start.partition(": ")[2]
