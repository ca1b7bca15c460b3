"""Plans as text: rows of a table, memory as bars, what was discarded, and the first answer about a
named model.
"""

import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from kernels.backends import RATED
from parallel.mesh import SIZES
from planner.cluster import Cluster, largest_public_error
from planner.dry_run import tightly
from planner.levers import described, memory_of, mesh_of, method_of
from planner.search import Candidate, Ranking
from runtime.progress import amount, counted, duration
from tools.common.report import aligned
from train.config.derive import beyond_rope, rope_flags
from train.config.flags import spelled
from train.tasks.registry import task_of

BAR, WIDTH = 40, 116
NUMBER = re.compile(r"\d[\d,.]*(?<=\d)")
OTHERS = 3
"""Plans to show after the first."""
ALIKE = 0.01
"""Share by which predicted seconds differ without a meaning."""


@dataclass(frozen=True)
class Row:
    """A candidate, with its seconds per iteration if it was profiled."""

    candidate: Candidate
    dp: int
    measured: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens, or patches, of all processes in a second, as predicted."""
        config = self.candidate.config
        tokens = config.train.batch_size(self.dp) * config.sequence_length
        return float(tokens / self.candidate.prediction.time)

    def entry(self) -> dict[str, Any]:
        """Return the row as --json writes it."""
        config, found = self.candidate.config, self.candidate.prediction
        return {
            "context": asdict(config.context),
            "mesh": {name: getattr(config.mesh, name) for name in SIZES},
            "recompute": asdict(config.recompute),
            "sharding": config.data_parallel.strategy,
            "seq_length": config.sequence_length,
            "predicted_seconds": found.time,
            "predicted_seconds_by_part": found.seconds,
            "predicted_tokens_per_second": self.tokens_per_second,
            "measured_seconds": self.measured,
            "memory_bytes": found.bytes,
            "memory_bytes_by_part": found.memory,
            "host_bytes": found.host,
            "attention_bytes_inside_nodes": found.links.inside,
            "attention_bytes_between_nodes": found.links.between,
        }


COLUMNS: dict[str, Callable[[Row], str]] = {
    "method": lambda row: method_of(row.candidate.config),
    "mesh": lambda row: mesh_of(row.candidate.config),
    "memory by": lambda row: memory_of(row.candidate.config),
    "predicted": lambda row: duration(row.candidate.prediction.time),
    "measured": lambda row: "" if row.measured is None else duration(row.measured),
    "tokens/s": lambda row: f"{row.tokens_per_second:,.0f}",
    "inside nodes GB": lambda row: f"{row.candidate.prediction.links.inside / 1e9:.3f}",
    "between GB": lambda row: f"{row.candidate.prediction.links.between / 1e9:.3f}",
    "memory GB": lambda row: f"{row.candidate.prediction.bytes / 1e9:.1f}",
    "host GB": lambda row: f"{host / 1e9:.1f}" if (host := row.candidate.prediction.host) else "",
}
"""Cells of the table; the first three are words, which stand to the left."""


SHORT = ("method", "mesh", "memory by", "predicted", "memory GB", "host GB")


def table(rows: Sequence[Row], columns: Sequence[str] = tuple(COLUMNS), first: int = 1) -> str:
    """Format the rows in aligned columns; measured times and host memory have one if there are any."""
    used = {head: cells for head in columns if any(cells := [*map(COLUMNS[head], rows)])}
    lines = [
        [str(number), *cells]
        for number, cells in enumerate(zip(*used.values(), strict=True), first)
    ]
    return "\n".join(aligned([["", *used], *lines], range(1, 4)))


def bars(parts: Mapping[str, float], host: float, cluster: Cluster, of: str = "a process") -> str:
    """Draw the memory of a process by cause, as shares of what it has, and what that leaves the
    allocator.

    Beside it stands what it moves to host memory, as a share of what is there for it.
    """
    total, most, there = sum(parts.values()), 1e9 * cluster.memory_gb, 1e9 * cluster.host_memory_gb
    shown = {name: (count, most) for name, count in {**parts, "together": total}.items() if count}
    if total <= most:
        shown["left for fragmentation"] = most - total, most
    if host:
        shown["on the host, pinned"] = host, there or math.inf
    beside = f", and {cluster.host_memory_gb:g} GB of the host's" if host and there else ""
    lines, width = (
        [f"memory of {of}, which has {cluster.memory_gb:g} GB{beside}:"],
        max(map(len, shown)),
    )
    for name, (count, room) in shown.items():
        filled = min(BAR, round(BAR * count / room))
        over = "+" if count > room else ""
        lines.append(f"  {name:{width}}  {'#' * filled:.<{BAR}}{over:1} {amount(count):>9}")
    return "\n".join(lines)


def discarded(found: Ranking, cluster: Cluster, top: int) -> str:
    """Say how many candidates there are, how many were discarded, and why."""
    shown = f", of which the best {top} are shown (--top)" if top < len(found.candidates) else ""
    sums = f"{found.refused.total()} refused, {len(found.over_memory)} too large"
    sums += (
        f", {len(found.over_host_memory)} too large for host memory"
        if found.over_host_memory
        else ""
    )
    lines = [f"{counted(len(found.candidates), 'candidate')}{shown}; {sums}"]
    lines += [f"  refused {count}{example}" for example, count in grouped(found.refused)]
    if found.over_memory:
        least = min(found.over_memory) / 1e9
        lines.append(
            f"  too large {len(found.over_memory)}: {cluster.memory_gb:g} GB, and these take {least:.1f} or more"
        )
    return "\n".join(lines)


def grouped(refused: Counter[str]) -> list[tuple[str, int]]:
    """Return of reasons that differ in numbers alone the first as an example, and their count; most
    common first.
    """
    groups: dict[str, tuple[str, int]] = {}
    for reason, count in refused.items():
        example, before = groups.get(words := NUMBER.sub("", reason), (f": {reason}", 0))
        groups[words] = (
            (f", such as{example.removeprefix(', such as')}" if before else example),
            before + count,
        )
    return sorted(groups.values(), key=lambda group: -group[1])


def asked(world_size: int, cluster: Cluster, config: Any) -> str:
    return f"{counted(world_size, 'process')} on {cluster.name}, sequences of {config.sequence_length} tokens"


def answer(rows: Sequence[Row], config: Any, world_size: int, cluster: Cluster, file: str) -> str:
    """Say what a named model takes: the fastest plan that fits, its memory, the next ones, its
    command, its sources.
    """
    first = rows[0]
    found, best = first.candidate.prediction, first.candidate.config
    parts = sorted(((seconds, name) for name, seconds in found.seconds.items()), reverse=True)
    spent = ", ".join(
        f"{name} {duration(seconds)}" for seconds, name in parts if seconds > 0.005 * found.time
    )
    lines = [
        f"{asked(world_size, cluster, best)}: fits{tightly(found.bytes, cluster)}",
        f"  {duration(found.time)} a step, {first.tokens_per_second:,.0f} tokens/s: {spent}",
        f"  {described(best)}",
        bars(found.memory, found.host, cluster),
    ]
    if len(rows) > 1:
        lines += [
            "next:",
            table(rows[1 : 1 + OTHERS], columns=SHORT, first=2),
            *alike(rows[: 1 + OTHERS]),
        ]
    lines += ["start it:", *command(best, config, world_size, cluster, file)]
    if best.checkpoint.load is None:
        lines.append(
            "  it trains from random weights; add --finetune --load RUN to begin with another run's"
        )
    return "\n".join([*lines, *notes(best, scaled=True), *sources(best, cluster)])


def alike(rows: Sequence[Row]) -> list[str]:
    """Name the rows that predictions do not tell from the first."""
    first, *others = (row.candidate.prediction.time for row in rows)
    near = [str(number) for number, time in enumerate(others, 2) if time < (1 + ALIKE) * first]
    told = bool(near) and rows[0].measured is None
    return [f"equal to 1, as far as predictions tell (to {ALIKE:.0%}): {', '.join(near)}"] * told


def notes(config: Any, scaled: bool = False) -> list[str]:
    """Say where sequences are longer than the model's positions; ``scaled`` if a command above
    scales rope to them.
    """
    note = beyond_rope(config)
    if note and scaled:
        note = re.sub(
            r"scale rope with .*, or set --max-position-embeddings",
            "the command scales rope to them; set --max-position-embeddings in its place",
            note,
        )
    return textwrap.wrap(note or "", WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def command(best: Any, config: Any, world_size: int, cluster: Cluster, file: str) -> list[str]:
    """Return the lines of the command that starts a plan of a file's model, with the flags that the
    file has not.
    """
    least = -(-world_size // cluster.gpus_per_node)
    nodes = next(count for count in range(least, world_size + 1) if world_size % count == 0)
    flags = []
    for section in fields(best):
        own, base = getattr(best, section.name), getattr(config, section.name)
        names = [entry.name for entry in fields(own)] if own != base else []
        flags += [
            spelled(name, getattr(own, name))
            for name in names
            if getattr(own, name) != getattr(base, name)
        ]
    flags += rope_flags(best)
    several = f" --nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500" * (nodes > 1)
    launch = f"torchrun --nproc-per-node {world_size // nodes}{several}"
    task = task_of(best)
    words = [launch, f"{task.entry} --config {file}", *flags, *task.data_flags, "--save runs/NAME"]
    lines = [""]
    for word in words:
        if len(lines[-1]) + len(word) > WIDTH - 4:
            lines.append("     ")
        lines[-1] += f" {word}"
    return [" " + " \\\n ".join(lines)]


def sources(best: Any, cluster: Cluster) -> list[str]:
    """Say where the numbers of a plan come from, and how far predictions were off elsewhere."""
    cluster = cluster.running(best.context.attention_backend, best.packed)
    kernel = "attention"
    if cluster.attention_kernel:
        kernel = RATED[cluster.attention_kernel].title or cluster.attention_kernel
    known = f"unknown: no published run of such a model on this card by {kernel} is there to compare with"
    recurrent = best.model.recurrent
    delta = recurrent and best.model.delta_rule
    if cluster.public_error and best.causal and not recurrent:
        known = (
            f"at most {cluster.public_error:.0%} on published runs of this card, to which nothing was fitted; over all "
            f"cards {largest_public_error():.0%}"
        )
    rule = (
        f", the delta rule at {cluster.delta_share:.1%}{' (assumed)' * (not cluster.delta_fraction)}"
        * delta
    )
    return [
        "where this comes from:",
        f"  time: products at {cluster.matmul_fraction:.0%} of {cluster.peak_tflops:,g} TFLOP/s, "
        f"{kernel} at {cluster.attention_fraction:.0%}{rule}; the cluster's file has their sources",
        f"  error: {known}",
        "         (python -m papers.records --table public compares them all)",
        "  memory: counted by the plan that runs, allocator's reserve left out; --dry-run counts the run's own code",
        "  no run of this program on a GPU has been made yet",
    ]
