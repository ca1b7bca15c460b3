"""Write the link bench's figures as Markdown and JSON lines."""

import argparse
from pathlib import Path
from typing import Any

from bench.link.cases import reference_of
from bench.link.planned import verdict
from runtime.errors import UserError
from runtime.files import write_text
from runtime.machine import device_name, in_words, results_file, usable_cores
from tools.report import markdown as markdown_table
from tools.report import read_records, write_records

KEY = ("model", "link", "seq_length", "batch")
"""Fields that identify a setting."""
Row = dict[str, Any]
LINK = {"shared": "one link for all ranks", "rails": "a link for each rank"}


def add_results(parser: argparse.ArgumentParser) -> None:
    """Add where figures are written."""
    what = "write JSON lines and Markdown here too, named after the machine"
    parser.add_argument("--results", type=Path, metavar="FOLDER", help=what)
    parser.add_argument("--note", help="a remark for the results, such as what else the machine was doing")


def markdown(result: dict[str, Any]) -> str:
    """Format the machine, and a table per setting, fastest first."""
    lines = [
        *heading(result),
        f"Two nodes of {result['ranks_per_node']} ranks, {result['rate']} between them in each direction; medians of "
        f'{result["repeats"]} training steps. "Crossed" is the interface\'s count in the busier direction, "attention" '
        "what of it the plans say; the rest is gradients, headers and collectives that do not send each to each.",
    ]
    for setting in result["settings"]:
        lines += ["", *_table(setting, *(_named(result.get(table, []), setting) for table in ("cases", "planner")))]
    return "\n".join(lines) + "\n"


def heading(result: dict[str, Any]) -> list[str]:
    """Return lines that say where figures were measured, and when."""
    note = [f"Note: {result['note']}."] if result["note"] else []
    load = f"load average at the end {result['load_average'][0]:.1f}"
    return [f"{in_words(result['machine'])}; {load}.", *note, ""]


def _table(setting: Row, cases: dict[str, Row], planner: dict[str, Row]) -> list[str]:
    """Format a setting's configurations, fastest first, and the planner's predictions."""
    reference = reference_of(setting["model"])
    tokens = setting["batch"] * setting["seq_length"]
    head = ["configuration", "step, s", "tokens/s", f"times as fast as {reference}", "without a limit, s"]
    head += ["crossed, MiB", "attention, MiB"]
    head += ["predicted, s", "profiled, s"] if planner else []
    lines = [
        f"**{setting['model']}**, {setting['batch']} x {setting['seq_length']} tokens, {LINK[setting['link']]}"
        + (f", {setting['date'][:10]}:" if "date" in setting else ":"),
        "",
    ]
    rows = []
    for name, found in sorted(cases.items(), key=lambda item: item[1]["median"]):
        cells = [name, f"{found['median']:.2f}", f"{tokens / found['median']:.0f}"]
        cells.append(f"{cases[reference]['median'] / found['median']:.2f}")
        cells += [f"{found['unlimited']:.2f}", f"{found['crossed'] / 2**20:.1f}"]
        cells.append(f"{found['attention_by_plan'] / 2**20:.1f}")
        said = planner.get(name, {})
        cells += [f"{said[key]:.2f}" if key in said else "" for key in ("predicted", "profiled")] if planner else []
        rows.append(cells)
    lines += markdown_table(head, rows)
    if planner:
        said = setting["verdict"]
        lines += [
            "",
            f"The planner's choice by profile is {said['choice']}, {100 * said['behind_the_best']:.1f} % behind the "
            f"best measured; the best, {said['best']}, was number {said['predicted_rank_of_the_best']} of "
            f"{len(planner)} predictions.",
        ]
    return lines


def path_of(folder: Path, machine: dict[str, Any] | None = None) -> Path:
    """Return the path of a machine's figures as JSON lines; by default this machine's."""
    return results_file(folder, "link", machine or {"device": device_name("cpu"), "cores": len(usable_cores())})


def earlier(path: Path, **asked: Any) -> Row | None:
    """Read an earlier run's results, each setting and case with its date and note; None if there are none.

    Raises UserError: the file cannot be read, or its figures were taken with other values than ``asked`` (rate,
    repeats).
    """
    if not path.exists():
        return None
    try:
        before = read_records(path)
        different = [f"{name} {before[name]}, not {value}" for name, value in asked.items() if before[name] != value]
        since = {"date": before["machine"]["date"], "note": before["note"]}
        before["settings"] = [since | row for row in before["settings"]]
        dates = {_key(row): row["date"] for row in before["settings"]}
        before["cases"] = [{"date": dates[_key(row)], **row} for row in before["cases"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not what this bench writes ({error!r}); give another --results") from None
    if different:
        raise UserError(f"{path} holds figures with {' and '.join(different)}; give another --results")
    return before


def write(result: Row, folder: Path) -> Path:
    """Write JSON lines and Markdown into files named after the machine; return the Markdown file's path.

    Settings and cases that an earlier run on the same machine measured, and this one did not, stay with their date.
    Raises UserError: as ``earlier``.
    """
    path = path_of(folder, result["machine"])
    before = earlier(path, rate=result["rate"], repeats=result["repeats"]) or {}
    since = {"date": result["machine"]["date"], "note": result["note"]}
    profiled = {_key(row) for row in result.get("planner", [])}
    tables = {
        "settings": [*before.get("settings", []), *(since | row for row in result["settings"])],
        "cases": [*before.get("cases", []), *({"date": since["date"], **row} for row in result["cases"])],
        "planner": [row for row in before.get("planner", []) if _key(row) not in profiled] + result.get("planner", []),
    }
    last = {name: {(*_key(row), row.get("name")): row for row in rows} for name, rows in tables.items()}
    settings = {key: last["settings"][key] for key in sorted(last["settings"])}
    result = {**result, **{name: [*rows.values()] for name, rows in last.items()}, "settings": [*settings.values()]}
    for setting in result["settings"]:
        if predicted := _named(result["planner"], setting):
            setting["verdict"] = verdict(predicted, _named(result["cases"], setting))
    write_records(path, result)
    write_text(path.with_suffix(".md"), "# Training over a slow link\n\n" + markdown(result))
    return path.with_suffix(".md")


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEY)


def _named(rows: list[Row], setting: Row) -> dict[str, Row]:
    """Return a setting's rows by name."""
    return {row["name"]: row for row in rows if _key(row) == _key(setting)}
