"""What tools.plan prints: its table, in a terminal or as Markdown, what was refused, and memory as bars."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from parallel.mesh import SIZES
from planner.cluster import Cluster
from planner.ranking import Candidate, Ranking, memory_of, mesh_of, method_of
from runtime.progress import amount, counted, duration
from tools.report import aligned
from tools.report import markdown as markdown_table

BAR = 40
NUMBER = re.compile(r"\d[\d,.]*(?<=\d)")


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

    def cells(self) -> list[str]:
        """Return the row's columns, the measured time last but three."""
        config, found = self.candidate.config, self.candidate.prediction
        return [
            method_of(config),
            mesh_of(config),
            memory_of(config),
            duration(found.time),
            "" if self.measured is None else duration(self.measured),
            f"{self.tokens_per_second:,.0f}",
            f"{found.links.inside / 1e9:.3f}",
            f"{found.links.between / 1e9:.3f}",
            f"{found.bytes / 1e9:.1f}",
            f"{found.host / 1e9:.1f}" if found.host else "",
        ]


HEADS = ["", "method", "mesh", "memory by", "predicted", "measured", "tokens/s", "inside nodes GB", "between GB"]
HEADS += ["memory GB", "host GB"]
LEFT = 4
"""Columns of words, which stand to the left; numbers stand to the right."""


def table(rows: Sequence[Row], markdown: bool = False) -> str:
    """Format the rows in aligned columns, or as Markdown; measured times and host memory have one if there are any."""
    found = [[str(number), *row.cells()] for number, row in enumerate(rows, 1)]
    used = [place for place, cells in enumerate(zip(*found, strict=True)) if any(cells)]
    lines = [[line[place] for place in used] for line in (HEADS, *found)]
    if markdown:
        return "\n".join(markdown_table(lines[0], lines[1:])).replace("|  |", "| |")
    return "\n".join(aligned(lines, range(1, LEFT)))


def bars(parts: Mapping[str, float], host: float, cluster: Cluster, of: str = "a process") -> str:
    """Draw the memory of a process by cause, as shares of what it has, and what that leaves the allocator.

    Beside it stands what it moves to host memory, as a share of what is there for it.
    """
    total, most, there = sum(parts.values()), 1e9 * cluster.memory_gb, 1e9 * cluster.host_memory_gb
    shown = {name: (count, most) for name, count in {**parts, "together": total}.items() if count}
    if total <= most:
        shown["left for fragmentation"] = most - total, most
    if host:
        shown["on the host, pinned"] = host, there or math.inf
    beside = f", and {cluster.host_memory_gb:g} GB of the host's" if host and there else ""
    lines, width = [f"memory of {of}, which has {cluster.memory_gb:g} GB{beside}:"], max(map(len, shown))
    for name, (count, room) in shown.items():
        filled = min(BAR, round(BAR * count / room))
        over = "+" if count > room else ""
        lines.append(f"  {name:{width}}  {'#' * filled:.<{BAR}}{over:1} {amount(count):>9}")
    return "\n".join(lines)


def discarded(found: Ranking, cluster: Cluster, top: int) -> str:
    """Say how many candidates there are, how many were discarded, and why."""
    shown = f", of which the best {top} are shown (--top)" if top < len(found.candidates) else ""
    sums = f"{found.refused.total()} refused, {len(found.too_large)} too large"
    sums += f", {len(found.host_short)} too large for host memory" if found.host_short else ""
    lines = [f"{counted(len(found.candidates), 'candidate')}{shown}; {sums}"]
    lines += [f"  refused {count}{example}" for example, count in grouped(found.refused)]
    if found.too_large:
        least = min(found.too_large) / 1e9
        lines.append(
            f"  too large {len(found.too_large)}: {cluster.memory_gb:g} GB, and these take {least:.1f} or more"
        )
    return "\n".join(lines)


def grouped(refused: Counter[str]) -> list[tuple[str, int]]:
    """Return of reasons that differ in numbers alone the first as an example, and their count; most common first."""
    groups: dict[str, tuple[str, int]] = {}
    for reason, count in refused.items():
        example, before = groups.get(words := NUMBER.sub("", reason), (f": {reason}", 0))
        groups[words] = (f", such as{example.removeprefix(', such as')}" if before else example), before + count
    return sorted(groups.values(), key=lambda group: -group[1])
