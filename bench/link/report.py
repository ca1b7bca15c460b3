"""Write the link bench's figures as Markdown and JSON lines."""

from pathlib import Path
from typing import Any

from bench.link.cases import reference_of
from bench.link.planned import verdict
from runtime.errors import UserError
from runtime.files import write_text
from testing.machine import device_name, slug, usable_cores
from testing.records import read_records, write_records

KEY = ("model", "link", "seq_length", "batch")
"""Fields that identify a setting."""
LINK = {"shared": "one link for all ranks", "rails": "a link for each rank"}


def markdown(result: dict[str, Any]) -> str:
    """Format the machine, and a table per setting, fastest first."""
    machine = result["machine"]
    lines = [
        f"{machine['device']}, {machine['cores']} cores, {machine['platform']}, torch {machine['torch']}, "
        f"{machine['date']}; load average at the end {result['load_average'][0]:.1f}.",
        *([f"Note: {result['note']}."] if result["note"] else []),
        "",
        f"Two nodes of {result['ranks_per_node']} ranks, {result['rate']} between them in each direction; medians of "
        f'{result["repeats"]} training steps. "Crossed" is the interface\'s count in the busier direction, "attention" '
        "what of it the plans say; the rest is gradients, headers and collectives that do not send each to each.",
    ]
    for setting in result["settings"]:
        lines += ["", *_table(setting)]
    return "\n".join(lines) + "\n"


def _table(setting: dict[str, Any]) -> list[str]:
    """Format a setting's configurations, fastest first, and the planner's predictions."""
    cases, planner, reference = setting["cases"], setting.get("planner", {}), reference_of(setting["model"])
    tokens = setting["batch"] * setting["seq_length"]
    head = ["configuration", "step, s", "tokens/s", f"times as fast as {reference}", "without a limit, s"]
    head += ["crossed, MiB", "attention, MiB"]
    head += ["predicted, s", "profiled, s"] if planner else []
    lines = [
        f"**{setting['model']}**, {setting['batch']} x {setting['seq_length']} tokens, {LINK[setting['link']]}"
        + (f", {setting['date'][:10]}:" if "date" in setting else ":"),
        "",
        f"| {' | '.join(head)} |",
        "| --- " * len(head) + "|",
    ]
    for name, found in sorted(cases.items(), key=lambda item: item[1]["median"]):
        cells = [name, f"{found['median']:.2f}", f"{tokens / found['median']:.0f}"]
        cells.append(f"{cases[reference]['median'] / found['median']:.2f}")
        cells += [f"{found['unlimited']:.2f}", f"{found['crossed'] / 2**20:.1f}"]
        cells.append(f"{found['attention_by_plan'] / 2**20:.1f}")
        said = planner.get(name, {})
        cells += [f"{said[key]:.2f}" if key in said else "" for key in ("predicted", "profiled")] if planner else []
        lines.append(f"| {' | '.join(cells)} |")
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
    machine = machine or {"device": device_name("cpu"), "cores": len(usable_cores())}
    return folder / f"link-{slug(machine['device'])}-{machine['cores']}-cores.jsonl"


def earlier(path: Path, **asked: Any) -> dict[str, Any] | None:
    """Read an earlier run's results, each setting with its date and note; None if there are none.

    Raises:
        UserError: the file cannot be read, or its figures were taken with other values than ``asked`` (rate, repeats).
    """
    if not path.exists():
        return None
    try:
        before = _joined(read_records(path))
        different = [f"{name} {before[name]}, not {value}" for name, value in asked.items() if before[name] != value]
        since = {"date": before["machine"]["date"], "note": before["note"]}
        settings = [{**since, **setting} for setting in before["settings"]]
        for setting in settings:
            _key(setting)
            setting["cases"] = {name: {"date": setting["date"], **case} for name, case in setting["cases"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not what this bench writes ({error!r}); give another --results") from None
    if different:
        raise UserError(f"{path} holds figures with {' and '.join(different)}; give another --results")
    return {**before, "settings": settings}


def write(result: dict[str, Any], folder: Path) -> Path:
    """Write JSON lines and Markdown into files named after the machine; return the Markdown file's path.

    Settings and cases that an earlier run on the same machine measured, and this one did not, stay with their date.

    Raises:
        UserError: as ``earlier``.
    """
    path = path_of(folder, result["machine"])
    before = earlier(path, rate=result["rate"], repeats=result["repeats"])
    settings = {_key(setting): setting for setting in (before["settings"] if before else [])}
    since = {"date": result["machine"]["date"], "note": result["note"]}
    for measured in result["settings"]:
        cases = {name: {"date": since["date"], **case} for name, case in measured["cases"].items()}
        new = {**since, **measured, "cases": cases}
        settings[_key(new)] = _merged(settings[_key(new)], new) if _key(new) in settings else new
    result = {**result, "settings": [settings[key] for key in sorted(settings)]}
    write_records(path, _apart(result))
    write_text(path.with_suffix(".md"), "# Training over a slow link\n\n" + markdown(result))
    return path.with_suffix(".md")


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Merge two measurements of a setting, new cases over old ones, with the verdict on all of them."""
    found = {**old, **new, "cases": {**old["cases"], **new["cases"]}}
    return {**found, "verdict": verdict(found["planner"], found["cases"])} if "planner" in found else found


def _key(setting: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(setting[name] for name in KEY)


def _apart(result: dict[str, Any]) -> dict[str, Any]:
    """Split a result's cases and predictions into rows of their own; a prediction's flags follow from its name."""
    apart: dict[str, Any] = {**result, "settings": [], "cases": [], "planner": []}
    for setting in result["settings"]:
        known = dict(zip(KEY, _key(setting), strict=True))
        apart["settings"].append({name: value for name, value in setting.items() if name not in ("cases", "planner")})
        for table in ("cases", "planner"):
            for name, row in setting.get(table, {}).items():
                apart[table].append({**known, "name": name, **{k: v for k, v in row.items() if k != "flags"}})
    return apart


def _joined(apart: dict[str, Any]) -> dict[str, Any]:
    """Undo ``_apart``."""
    result = {name: value for name, value in apart.items() if name not in ("cases", "planner")}
    settings = {_key(setting): {**setting, "cases": {}} for setting in apart["settings"]}
    for table in ("cases", "planner"):
        for row in apart.get(table, []):
            of = settings[_key(row)].setdefault(table, {})
            of[row["name"]] = {name: value for name, value in row.items() if name not in (*KEY, "name")}
    return {**result, "settings": list(settings.values())}
