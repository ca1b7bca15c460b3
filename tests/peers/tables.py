"""Tables of the comparison, as Markdown."""

import re
from collections.abc import Sequence
from typing import Any

from runtime.machine import in_words
from tests.peers.contestants import LONGMESH, STEPS, WAYS
from tools.common.report import markdown

Rows = Sequence[dict[str, Any]]
NOTABLE = 1e-5
MAX_MESSAGE = 60


def cell(row: dict[str, Any]) -> str:
    """Return what a table says of a result: its error, the wrong parts, or the refusal."""
    if row["verdict"] == "refused":
        message = row["message"].partition(": ")[2] or row["message"]
        return f"refused: {short(message)}"

    parts = ("logits", "loss", "gradients")
    if row["verdict"] == "right":
        return f"{largest(row):.0e}"
    wrong = [f"{part} {row[part]:.1%}" for part in parts if not row[part] <= NOTABLE]
    return f"**wrong**: {', '.join(wrong)}"


def short(message: str) -> str:
    """Return the beginning of a message, cut at a space, safe for Markdown, numbers as N."""
    message = re.sub(r"\(\d+\)", "(N)", message)  # numbers of ranks and heads
    message = message.replace("|", "/").replace("*", "").replace("_", "\\_")
    if len(message) <= MAX_MESSAGE:
        return message
    return message[:MAX_MESSAGE].rpartition(" ")[0] + " ..."


def merged(rows: Rows, label: str) -> str:
    """Return one cell for several results; different ones have the values of field ``label``."""
    labels: dict[str, list[str]] = {}
    for row in rows:
        text = cell(row)
        if row["verdict"] == "right":
            text = "right"
        labels.setdefault(text, []).append(str(row[label]))

    right = [row for row in rows if row["verdict"] == "right"]
    texts = []
    for text, values in labels.items():
        if text == "right":
            text = cell(max(right, key=largest))
        if len(labels) > 1:
            text = f"{', '.join(values)}: {text}"
        texts.append(text)
    return "; ".join(texts)


def largest(row: dict[str, Any]) -> float:
    """Return the largest error of a result."""
    return max(float(row[part]) for part in ("logits", "loss", "gradients"))


def pivot(rows: Rows, field: str, label: str) -> list[list[str]]:
    """Return a line for each value of ``field``, with a cell for each of ``STEPS``."""
    lines = []
    for value in dict.fromkeys(row[field] for row in rows):
        line = [str(value)]
        for name in STEPS:
            results = [row for row in rows if (row[field], row["contestant"]) == (value, name)]
            line.append(merged(results, label))
        lines.append(line)
    return lines


def batch_lines(rows: Rows) -> list[list[str]]:
    """Return the lines of the table of batches; a model with one key head is a kind of its own."""
    labelled = []
    for row in rows:
        kind = row["kind"]
        if row["heads"] != row["ranks"]:
            kind += ", one key head"
        labelled.append({**row, "kind": kind, "ranks": f"{row['ranks']} ranks"})
    return pivot(labelled, "kind", "ranks")


def way_lines(rows: Rows) -> list[list[str]]:
    """Return the lines of the table of ways: a line for each way, a column for each case."""
    cases = list(dict.fromkeys((row["family"], row["kind"]) for row in rows))
    lines = []
    for name in (LONGMESH, *WAYS):
        by_case = {(row["family"], row["kind"]): row for row in rows if row["contestant"] == name}
        lines.append([name, *(cell(by_case[case]) for case in cases)])
    return lines


def tables(result: dict[str, Any]) -> list[str]:
    """Return all tables of a result as lines of Markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    lines = [f"{in_words(result['machine'])}; {versions}."]
    if "families" in result:
        body = pivot(result["families"], "family", "kind")
        lines += ["", "2 processes", "", *markdown(["model", *STEPS], body)]
    if "batches" in result:
        head = ["batch of a LLaMA", *STEPS]
        lines += ["", "2, 3 and 4 processes", "", *markdown(head, batch_lines(result["batches"]))]
    if "ways" in result:
        rows = result["ways"]
        cases = list(dict.fromkeys(f"{row['family']}, {row['kind']}" for row in rows))
        lines += ["", "4 processes", "", *markdown(["way", *cases], way_lines(rows))]
    if "time" in result:
        body = []
        for row in result["time"]:
            seconds = [f"{row[name]:.2f}" for name in ("median", "fastest", "slowest")]
            body.append([row["kind"], row["contestant"], *seconds])
        head = ["4,096 tokens", "step", "median s", "fastest", "slowest"]
        lines += ["", "2 processes of one thread", "", *markdown(head, body)]
    return [*lines, *messages(result)]


def messages(result: dict[str, Any]) -> list[str]:
    """Return the whole messages of refusals, as a table of who refuses."""
    body: dict[tuple[str, str], None] = {}
    for part in ("families", "batches", "ways"):
        for row in result.get(part, []):
            if row["verdict"] == "refused":
                body[row["contestant"], row["message"].replace("|", "/")] = None
    if not body:
        return []
    return ["", "Messages", "", *markdown(["refused by", "message"], map(list, body))]
