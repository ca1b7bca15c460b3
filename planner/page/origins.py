"""Say where the numbers of a plan come from: a cluster's file, constants, formulas."""

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from planner.cluster import Cluster
from planner.page.elements import Child, element, table
from planner.step_cost import COMPILED, POINTWISE

COMMENT = re.compile(r"^(\w+)\s*=\s*(?:\"[^\"]*\"|[^#\"]*?)\s*#\s*(.*)$")
HELD_OUT = "nothing was fitted to"
"""Words of a comment on a figure of published runs that tested the planner."""
MISSING = "not measured"
KINDS = {
    rf"{HELD_OUT}": "published runs that nothing was fitted to",
    r"\bfitted to public_runs\.csv": "fitted to published runs",
    r"\bmeasured\b|\btorch reports\b|\bnvidia-smi\b|\d TFLOP/s on |\d ms\b": "measured",
    r"\bpublished\b|github\.com/|\b[\w-]+/[\w-]+(/pull/| issue | pull request )\d|"
    r"\btable \d|\bsection \d|'s page\b": "published",
    r"\bdata sheet\b": "data sheet",
    r"\bassumed\b": "assumed",
    r"^(as )?of (the |an |a )?[A-Z]+\d+": "of another GPU",
}
"""Patterns of a comment, and the kind of source that they name."""
CALIBRATED = "Measured by python -m tools.calibrate"
"""Words at the top of a file that tools.calibrate wrote."""
FORMULAS = {
    "attention": (
        "FLOPs of the visible pairs (4 forward and 10 backward for each pair and channel) at "
        "attention_fraction of peak_tflops; a round's transfers overlap its computing",
        "planner/layers/attention_cost.py",
    ),
    "linear": (
        "2 FLOPs for each weight and token, forward and for each of two gradients, at "
        f"matmul_fraction of peak_tflops; pointwise work reads or writes activations {POINTWISE:g} "
        f"times ({COMPILED:g} with --compile; fitted to published runs) at memory_gb_per_s; "
        "compiled matmuls in 8 bits count as faster (planner/layers/float8.py)",
        "planner/step_cost.py",
    ),
    "recompute": (
        "the forward work that the policy repeats in the backward pass",
        "planner/step_cost.py",
    ),
    "slices": (
        "launches and tiles at launch_us, keys and values computed once more, and sums of their "
        "gradients at memory_gb_per_s",
        "planner/layers/slice_cost.py",
    ),
    "tensor parallel": (
        "8 all-gathers and reduce-scatters a layer, which computing does not hide",
        "planner/step_cost.py",
    ),
    "pipeline": (
        "hidden states to the next stage and gradients back; micro-batches + stages - 1 turns",
        "planner/step_cost.py",
    ),
    "offload": (
        "copies at host_gb_per_s, less the computing that hides them",
        "planner/step_cost.py",
    ),
    "optimizer offload": (
        "copies of the moments at host_gb_per_s",
        "planner/step_cost.py",
    ),
    "data parallel": (
        "the exchange of weights and gradients: exposed_share of it, or what computing does not "
        "hide if that is more",
        "planner/step_cost.py",
    ),
    "optimizer": (
        "FLOPs of an optimizer's work on whole matrices",
        "planner/optimizer_cost.py",
    ),
}
"""Formula of each cause of a step's time, and its file."""


def comments_of(file: Path) -> dict[str, str]:
    """Return the comments of a cluster's file, keyed by the field of their line."""
    comments = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        match = COMMENT.match(line)
        if match:
            comments[match[1]] = match[2]
    return comments


def kind_of(comment: str) -> str:
    """Return the kinds of sources that a comment names, or "stated" if it names none."""
    text = comment.replace(MISSING, "")
    kinds = [kind for pattern, kind in KINDS.items() if re.search(pattern, text)]
    if kinds and HELD_OUT in text:
        return kinds[0]  # the rest of the comment says which runs
    return ", ".join(kinds) or "stated"


def stated_keys(file: Path) -> set[str]:
    """Return the keys of a cluster's file; all other fields have their defaults."""
    return set(tomllib.loads(file.read_text(encoding="utf-8")))


def origins(
    causes: Mapping[str, float],
    cluster: Cluster,
    running: Cluster,
    file: Path | None,
    memory: str,
    name: str,
) -> list[Element]:
    """Return the tables of formulas and of the cluster's numbers.

    Args:
        causes: seconds keyed by cause; those of 0 seconds are left out.
        cluster: the cluster of the plan, as loaded.
        running: the same with the attention kernel that the plan runs (``Cluster.running``).
        file: the file that the cluster was loaded from, if any.
        memory: a sentence on the source of the memory.
        name: the file's name on the page.
    """
    formulas: list[list[Child]] = [["time of", "formula", "in"]]
    for cause, seconds in causes.items():
        if seconds:
            text, source = FORMULAS.get(cause, ("the cost model", "planner/step_cost.py"))
            formulas.append([cause, text, source])

    numbers: list[list[Child]] = [["number of the cluster", "value", "kind", "source"]]
    for key, value, kind, comment in _numbers(cluster, running, file):
        written = value if isinstance(value, str) else f"{value:g}"
        numbers.append([key, written, kind, comment])

    sections = [
        table(formulas, "formulas", words=(0, 1, 2)),
        element("p", memory),
    ]
    if file:
        sections.append(element("p", f"The numbers of {cluster.name} are those of {name}:"))
    sections.append(table(numbers, "constants", words=(0, 2, 3)))
    return sections


def _numbers(
    cluster: Cluster, running: Cluster, file: Path | None
) -> Iterator[tuple[str, Any, str, str]]:
    """Yield the name, the value, the kind and the source of each number of a plan's cluster."""
    comments = comments_of(file) if file else {}
    stated = stated_keys(file) if file else set(cluster.entries())
    is_calibrated = file is not None and CALIBRATED in file.read_text(encoding="utf-8")
    loaded = cluster.entries()
    for key, value in running.entries().items():
        if key == "name" or value in ("", 0):
            continue
        comment = comments.get(key, "")
        kind = kind_of(comment) if key in stated else "default"
        if is_calibrated and kind == "stated" and comment and MISSING not in comment:
            kind = "measured"
        if value != loaded[key]:
            kind, comment = _of_kernel(running.attention_kernel, key, loaded[key], comments, stated)
        yield key, value, kind, comment


def _of_kernel(
    kernel: str, key: str, replaced: Any, comments: Mapping[str, str], stated: Collection[str]
) -> tuple[str, str]:
    """Return kind and source of a number that another attention kernel than the file's brings."""
    note = f"the plan runs {kernel}; the file has {replaced} for its own kernel"
    rate = f"{kernel}_fraction"
    if key != "attention_fraction":
        return "chosen for the plan", note
    if rate not in stated:
        return "default", f"{note}; a share of that (kernels/backends)"
    comment = comments.get(rate, "")
    return kind_of(comment), f"{note}; {rate}: {comment}".removesuffix(": ")
