"""Draw the memory of plans: a bar for each, divided by cause, beside the memory of a GPU."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from planner.cluster import Cluster
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
from runtime.progress import amount

ROW = 48
"""Height of a bar with the text above it, in pixels."""
BAR = 22
TEXT = 16
HOST = "on the host, pinned"
LEFT = "left for fragmentation"


@dataclass(frozen=True)
class MemoryRow:
    """A process's bytes by cause, on the device and in host memory.

    The part of the name before a colon stands for it if there is little room.
    """

    name: str
    parts: Mapping[str, float]
    host: float = 0.0

    @property
    def total(self) -> float:
        """Return the bytes on the device."""
        return sum(self.parts.values())


def memory_section(rows: Sequence[MemoryRow], cluster: Cluster) -> list[Element]:
    """Return the pictures of device and host memory, their legend, and a table of the bytes."""
    device_bytes = 1e9 * cluster.memory_gb
    causes = list(dict.fromkeys(cause for row in rows for cause in row.parts if row.parts[cause]))
    device_rows = [
        (row.name, {cause: row.parts.get(cause, 0.0) for cause in causes}) for row in rows
    ]
    if len(rows) == 1 or all(row.total <= device_bytes for row in rows):
        shown = [*causes, LEFT]
    else:
        shown = list(causes)
    sections = [
        _bars(device_rows, device_bytes, f"{cluster.memory_gb:g} GB", "Memory of a process"),
        legend(shown),
    ]

    host_rows = [(row.name, {HOST: row.host}) for row in rows if row.host]
    if host_rows:
        host_bytes = 1e9 * cluster.host_memory_gb
        limit = f"{cluster.host_memory_gb:g} GB" if host_bytes else ""
        sections.append(element("h3", "Host memory of a process"))
        sections.append(_bars(host_rows, host_bytes, limit, "Host memory of a process"))
        sections.append(legend([HOST]))
    sections.append(_table(rows, causes, device_bytes))
    return sections


def _bars(
    rows: Sequence[tuple[str, Mapping[str, float]]], limit_bytes: float, limit: str, title: str
) -> Element:
    """Draw a bar for each row, and a dashed line at the limit if it is known."""
    axis_bytes = max([limit_bytes, *(sum(parts.values()) for _, parts in rows)])
    drawn = []
    top = 0.0
    for name, parts in rows:
        drawn += heading(name, name.partition(":")[0], top + TEXT - 4)
        drawn += _bar(parts, axis_bytes, top + TEXT, limit_bytes)
        top += ROW
    if limit:
        x = f"{99.9 * limit_bytes / axis_bytes:.4f}%"
        drawn.append(element("line", x1=x, x2=x, y1="0", y2=f"{top:g}", class_="limit"))
        text = element("text", limit, x=x, dx="-4", y=f"{top + 12:g}", class_="row end")
        drawn.append(text)
        top += TEXT
    return picture(drawn, top, title)


def _bar(
    parts: Mapping[str, float], axis_bytes: float, top: float, limit_bytes: float
) -> list[Element]:
    drawn: list[Element] = []
    start = 0.0
    total = sum(parts.values())
    pieces = dict(parts)
    if HOST not in parts and total < limit_bytes:
        pieces[LEFT] = limit_bytes - total
    for cause, count in pieces.items():
        if not count:
            continue
        share = count / axis_bytes
        drawn.append(bar(start, share, cause, f"{cause}: {amount(count)}", top, BAR))
        drawn += label(start, share, [f"{cause} {amount(count)}", amount(count)], top + 15)
        start += share
    return drawn


def _table(rows: Sequence[MemoryRow], causes: Sequence[str], device_bytes: float) -> Element:
    """Return the bytes of each row by cause, as the text output writes them."""
    lines: list[list[str]] = [["", *causes, "together", LEFT, HOST]]
    for row in rows:
        cells = [row.name.partition(":")[0]]
        for cause in causes:
            count = row.parts.get(cause, 0.0)
            cells.append(amount(count) if count else "")
        cells.append(amount(row.total))
        cells.append(amount(device_bytes - row.total) if row.total <= device_bytes else "")
        cells.append(amount(row.host) if row.host else "")
        lines.append(cells)
    return table(without_empty(lines), "memory")
