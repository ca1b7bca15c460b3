"""Tables of the documents bench: a line for each setting, a column for each way to share."""

from collections.abc import Sequence
from typing import Any

from tools.common.report import Column, Table

Row = dict[str, Any]
WAYS = (
    "one group",
    "equal groups",
    "equal groups, by work",
    "groups",
    "groups, float32",
    "groups, Megatron",
    "fixed size",
)
"""Ways to share documents; Longmesh has the first two."""
OURS = WAYS[:2]
GROUPS = WAYS[3]
BASELINE = WAYS[6]
GROUPS_FLOAT32 = WAYS[4]
KINDS: dict[str, Column] = {
    "data": "{title}",
    "tokens of a step": lambda row: f"{row['tokens']:,}",
    "documents": lambda row: f"{row['documents']:,}",
    "median": lambda row: f"{row['median']:,}",
    "longest": lambda row: f"{row['longest']:,}",
    "source": "{source}",
}


def line_of(row: Row) -> str:
    """Return a way's figures as a line, to print it once it is predicted."""
    return (
        f"{row['link']}, {row['title']}, {row['ranks']} ranks, {row['way']}: "
        f"{row['step']:.3f} s, {_details(row)}, {row['capacity']} tokens on a rank, "
        f"groups of {row['sizes']} by {row['method']}"
    )


def _details(row: Row) -> str:
    """Return idle share, bytes sent in the node and to other nodes, peak, and the group sizes."""
    sent = f"{row['inside'] / 1e9:.1f} + {row['between'] / 1e9:.1f}"
    groups = row["sizes"]
    if row["method"] != "ring":
        groups += f" by {row['method']}"
    return f"{row['idle']:.1%}; {sent}; {row['memory'] / 1e9:.1f}; {groups}"


def settings(steps: Sequence[Row]) -> list[dict[str, Row]]:
    """Group the rows by setting (link, data and ranks): the row of each way, keyed by way."""
    by_setting: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in steps:
        key = (row["link"], row["kind"], row["ranks"])
        by_setting.setdefault(key, {})[row["way"]] = row
    return list(by_setting.values())


def gain(setting: dict[str, Row], way: str) -> float:
    """Return how many times as long as ``way`` the better of Longmesh's ways takes."""
    ours = min(setting[name]["step"] for name in OURS if name in setting)
    return float(ours / setting[way]["step"])


def _table(rows: Sequence[dict[str, Row]], *, times: bool) -> list[str]:
    """Format a table of the steps' seconds, or of the other figures."""

    def figure_of(way: str) -> Column:
        def figure(setting: dict[str, Row]) -> str:
            if way not in setting:
                return ""
            return f"{setting[way]['step']:#.4g}" if times else _details(setting[way])

        return figure

    columns: dict[str, Column] = {
        "data": lambda setting: setting[WAYS[0]]["title"],
        "ranks": lambda setting: setting[WAYS[0]]["ranks"],
    }
    for way in WAYS:
        columns[way] = figure_of(way)
    if times:
        columns["ours / groups"] = lambda setting: f"{gain(setting, GROUPS):.3f}"
        columns["ours / groups, float32"] = lambda setting: f"{gain(setting, GROUPS_FLOAT32):.3f}"
        columns["ours / fixed size"] = lambda setting: f"{gain(setting, BASELINE):.3f}"
    return Table(columns, rows).markdown()


def markdown(result: Row) -> list[str]:
    """Format two tables for each rate between nodes, and the kinds of data with their sources."""
    lines = [
        "",
        "Seconds of a step with its exchange of weights and gradients. *Ours* is the better of the"
        " first two ways. The other figures are the share of the step in which a rank waits; GB"
        " that a rank sends in the attention, in its node + to other nodes; GB at the peak; ranks"
        " of a group, and its method unless it is a zigzag ring. All but the last two are means"
        " over ranks.",
    ]
    for link in dict.fromkeys(row["link"] for row in result["steps"]):
        rows = settings([row for row in result["steps"] if row["link"] == link])
        lines += ["", f"**{result['cluster']}, {link} to other nodes**", ""]
        lines += [*_table(rows, times=True), "", *_table(rows, times=False)]
    return [*lines, "", "**Kinds of data**", "", *Table(KINDS, result["kinds"]).markdown()]
