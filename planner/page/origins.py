"""Say where the numbers of a plan come from: a cluster's file, constants, formulas."""

import re
from collections.abc import Mapping
from pathlib import Path
from xml.etree.ElementTree import Element

from planner.cluster import Cluster
from planner.page.elements import Child, element, table
from planner.step_cost import COMPILED, POINTWISE

COMMENT = re.compile(r"^(\w+)\s*=\s*(?:\"[^\"]*\"|[^#\"]*?)\s*#\s*(.*)$")
KINDS = {
    "measured": "measured",
    "calibrate": "measured",
    "torch reports": "measured",
    "data sheet": "data sheet",
    "fitted": "fitted to published runs",
    "published": "published",
    "assumed": "assumed",
}
"""Words of a comment, and the kind of source that they name."""
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
    kinds = [kind for word, kind in KINDS.items() if word in comment]
    return ", ".join(dict.fromkeys(kinds)) or "stated"


def origins(
    causes: Mapping[str, float], cluster: Cluster, file: Path | None, memory: str, name: str
) -> list[Element]:
    """Return the tables of formulas and of the cluster's numbers.

    Args:
        causes: seconds keyed by cause; those of 0 seconds are left out.
        cluster: the cluster of the plan.
        file: the file that the cluster was loaded from, if any.
        memory: a sentence on the source of the memory.
        name: the file's name on the page.
    """
    formulas: list[list[Child]] = [["time of", "formula", "in"]]
    for cause, seconds in causes.items():
        if seconds:
            text, source = FORMULAS.get(cause, ("the cost model", "planner/step_cost.py"))
            formulas.append([cause, text, source])

    comments = comments_of(file) if file else {}
    numbers: list[list[Child]] = [["number of the cluster", "value", "kind", "source"]]
    for key, value in cluster.entries().items():
        if key == "name" or value in ("", 0):
            continue
        comment = comments.get(key, "")
        written = value if isinstance(value, str) else f"{value:g}"
        numbers.append([key, written, kind_of(comment), comment])

    sections = [
        table(formulas, "formulas", words=(0, 1, 2)),
        element("p", memory),
    ]
    if file:
        sections.append(element("p", f"The numbers of {cluster.name} are those of {name}:"))
    sections.append(table(numbers, "constants", words=(0, 2, 3)))
    return sections
