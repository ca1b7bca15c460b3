"""The link bench's figures as Markdown and JSON."""

import json
from pathlib import Path
from typing import Any

from bench.link.cases import REFERENCE
from bench.machine import slug, write_json
from parallel.files import write_text

LINK = {"shared": "one link for all ranks", "rails": "a link for each rank"}


def markdown(result: dict[str, Any]) -> str:
    """The machine, and a table per setting, fastest first."""
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
    """A setting's configurations, fastest first, and what the planner said of them."""
    cases, planner = setting["cases"], setting.get("planner", {})
    head = ["configuration", "step, s", "times as fast as ring", "without a limit, s", "crossed, MiB", "attention, MiB"]
    head += ["predicted, s", "profiled, s"] if planner else []
    lines = [
        f"**{setting['model']}**, {setting['batch']} x {setting['seq_length']} tokens, {LINK[setting['link']]}:",
        "",
        f"| {' | '.join(head)} |",
        "| --- " * len(head) + "|",
    ]
    for name, found in sorted(cases.items(), key=lambda item: item[1]["median"]):
        cells = [name, f"{found['median']:.2f}", f"{cases[REFERENCE]['median'] / found['median']:.2f}"]
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


def write(result: dict[str, Any], folder: Path) -> Path:
    """A JSON and a Markdown file named after the machine; the path of the latter.

    Settings that an earlier run of the same machine measured at the same rate, and this one did not, stay.
    """
    machine = result["machine"]
    path = folder / f"link-{slug(machine['device'])}-{machine['cores']}-cores.md"
    if path.with_suffix(".json").exists():
        before = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        same = all(before[key] == result[key] for key in ("rate", "ranks_per_node", "repeats"))
        measured = {_key(setting) for setting in result["settings"]}
        stay = [setting for setting in before["settings"] if same and _key(setting) not in measured]
        result = {**result, "settings": sorted(stay + result["settings"], key=_key)}
    write_json(path.with_suffix(".json"), result)
    write_text(path, "# Training over a slow link\n\n" + markdown(result))
    return path


def _key(setting: dict[str, Any]) -> tuple[str, str, int]:
    return setting["model"], setting["link"], setting["seq_length"]
