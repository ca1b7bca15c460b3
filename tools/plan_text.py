"""What tools.plan prints: its table, in a terminal or as Markdown, what was refused, and memory as bars."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from parallel.mesh import SIZES
from planner.cluster import Cluster
from planner.ranking import Candidate, Ranking, memory_of, mesh_of, method_of
from runtime.words import counted
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
            milliseconds(found.time),
            "" if self.measured is None else milliseconds(self.measured),
            f"{self.tokens_per_second:,.0f}",
            f"{found.links.inside / 1e9:.3f}",
            f"{found.links.between / 1e9:.3f}",
            f"{found.bytes / 1e9:.1f}",
        ]


HEADS = ["", "method", "mesh", "memory by", "predicted ms", "measured ms", "tokens/s", "inside nodes GB", "between GB"]
HEADS.append("memory GB")
LEFT = 4
"""Columns of words, which stand to the left; numbers stand to the right."""


def milliseconds(seconds: float) -> str:
    """Format as milliseconds: four significant digits below 1,000, whole numbers above."""
    found = 1e3 * seconds
    return f"{found:.4g}" if found < 999.95 else f"{found:.0f}"


def table(rows: Sequence[Row], markdown: bool = False) -> str:
    """Format the rows in aligned columns, or as Markdown; what was measured has a column if anything was."""
    lines = [HEADS, *([str(number), *row.cells()] for number, row in enumerate(rows, 1))]
    if all(row.measured is None for row in rows):
        lines = [[cell for place, cell in enumerate(line) if place != HEADS.index("measured ms")] for line in lines]
    if markdown:
        return "\n".join(markdown_table(lines[0], lines[1:])).replace("|  |", "| |")
    return "\n".join(aligned(lines, range(1, LEFT)))


def bars(parts: Mapping[str, float], cluster: Cluster, of: str = "a process") -> str:
    """Draw the memory of a process by cause, as shares of what it has, and what that leaves the allocator."""
    total, most = sum(parts.values()), 1e9 * cluster.memory_gb
    shown = {**parts, "together": total}
    if total <= most:
        shown["left for fragmentation"] = most - total
    lines, width = [f"memory of {of}, which has {cluster.memory_gb:g} GB:"], max(map(len, shown))
    for name, count in shown.items():
        filled = min(BAR, round(BAR * count / most))
        over = "+" if count > most else ""
        lines.append(f"  {name:{width}}  {'#' * filled:.<{BAR}}{over:1} {amount(count):>9}")
    return "\n".join(lines)


def amount(count: float) -> str:
    """Format bytes as GB or, where they are few, MB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def discarded(found: Ranking, cluster: Cluster, top: int) -> str:
    """Say how many candidates there are, how many were discarded, and why."""
    shown = f", of which the best {top} are shown (--top)" if top < len(found.candidates) else ""
    sums = f"{found.refused.total()} refused, {len(found.too_large)} too large"
    sums += f", {len(found.host_short)} too large for host memory" if found.host_short else ""
    lines = [f"{counted(len(found.candidates), 'candidate')}{shown}; {sums}"]
    lines += [f"  refused {count}: {reason}" for reason, count in grouped(found.refused)]
    if found.too_large:
        least = min(found.too_large) / 1e9
        lines.append(
            f"  too large {len(found.too_large)}: {cluster.memory_gb:g} GB, and these take {least:.1f} or more"
        )
    return "\n".join(lines)


def grouped(refused: Counter[str]) -> list[tuple[str, int]]:
    """Return reasons that differ in numbers alone as one, with all the numbers and without the fix; most common first.

    Up to the first semicolon a message says what is wrong, and then what would do.
    """
    groups: defaultdict[str, list[tuple[list[str], int]]] = defaultdict(list)
    for reason, count in refused.items():
        wrong = reason.split(";")[0]
        groups[NUMBER.sub("\0", wrong)].append((NUMBER.findall(wrong), count))
    found = []
    for words, members in groups.items():
        numbers = zip(*(found for found, _ in members), strict=True)
        texts = words.split("\0")
        said = "".join(a + b for a, b in zip(texts, [*map(_any_of, numbers), ""], strict=True))
        found.append((said, sum(count for _, count in members)))
    return sorted(found, key=lambda group: -group[1])


def _any_of(numbers: Iterable[str]) -> str:
    several = sorted(set(numbers), key=lambda number: float(number.replace(",", "")))
    return " or ".join(filter(None, (", ".join(several[:-1]), several[-1])))
