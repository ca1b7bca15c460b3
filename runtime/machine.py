"""Describe the machine that figures are measured on: its card, versions, other processes' load;
time steps on it.
"""

import importlib.metadata
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]


class Card(NamedTuple):
    """A card's dense bfloat16 FLOP/s by its data sheet, and the file of configs/clusters/ about
    nodes of it.
    """

    flops: float
    cluster: str = ""


CARDS = {
    "gb300": Card(2500e12, "gb300_nvl72"),
    "gb200": Card(2500e12, "gb200_nvl72"),
    "b300": Card(2250e12, "b300_pod"),
    "b200": Card(2250e12, "b200_pod"),
    "gh200": Card(989e12),  # one to a node, beside a Grace
    "h200 nvl": Card(835e12),
    "h200": Card(989e12, "h200_pod"),
    "h100 nvl": Card(835e12),
    "h100 pcie": Card(756e12),
    "h100 80gb": Card(989e12, "h100_pod"),
    "h100": Card(989e12),
    "h800 pcie": Card(756e12),
    "h800 nvl": Card(835e12),
    "h800": Card(989e12, "h800_pod"),
    "h20 3e": Card(148e12),
    "h20": Card(148e12, "h20_pod"),
    "a100 pcie": Card(312e12),
    "a100 80gb": Card(312e12, "a100_pod"),
    "a100": Card(312e12),
    "a800 pcie": Card(312e12),
    "a800 80gb": Card(312e12, "a800_pod"),
    "a800": Card(312e12),
    "l40s": Card(362e12, "l40s_pod"),
    "rtx 4090": Card(165e12),
}
"""By words of the name, of which all must be there; the first that matches counts."""
PARTS = re.compile(r"mig|laptop|d|max|cnx|\d+(c|cme|q|a|b)")
"""Words that make a part of a card, or another one, of a name that is in the table: such as 40C, a
virtual GPU's.
"""


def card_of(name: str) -> Card | None:
    """Return the card of ``torch.cuda.get_device_name()``; None if the table has none of its name."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    if any(map(PARTS.fullmatch, words)):
        return None
    return next((card for known, card in CARDS.items() if words.issuperset(known.split())), None)


def commit_of(root: Path = ROOT, *below: str) -> str:
    """Return a checkout's commit, with a note if files of it, or those ``below`` alone, differ from
    the commit's.
    """
    top, head = _git(root, "rev-parse", "--show-toplevel"), _git(root, "rev-parse", "HEAD")
    if not head or not top or Path(top).resolve() != root.resolve():
        return "unknown (not taken from a git checkout)"
    changed = _git(root, "status", "--porcelain", "--untracked-files=normal", "--", *below)
    return f"{head} with changes" if changed else head


def _git(root: Path, *command: str) -> str:
    """Return git's output; an empty string if git is missing or fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *command], capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def usable_cores() -> list[int]:
    """Return the cores that this process may run on, in order."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def device_name(device: str) -> str:
    """Return the product name of the GPU or processor."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    names = (
        re.findall(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)
        if info.exists()
        else []
    )
    return str(names[0] if names else platform.processor() or platform.machine())


def slug(name: str) -> str:
    """Reduce a name to lower-case letters, digits and hyphens, for a file name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def stamp() -> dict[str, str]:
    """Return the date and the commit that go with every result."""
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit_of()}


def describe(device: str) -> dict[str, Any]:
    """Return the device, versions and stamp that go with every figure; packages not installed are
    left out.
    """
    found: dict[str, Any] = {
        "device": device_name(device),
        **stamp(),
        "platform": platform.platform(),
        "cores": len(usable_cores()),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for package in ("triton", "flash-attn-3", "flash-attn-4"):
        try:
            found[package.replace("-", "_")] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if device == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found |= {
            "cuda": torch.version.cuda,
            "cudnn": loaded_cudnn(),
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 2),
        }
    return found


def loaded_cudnn() -> int:
    """Return the version of the cuDNN that is loaded; 0 if there is none."""
    try:
        return torch.backends.cudnn.version() or 0
    except (
        RuntimeError
    ):  # it is older than the one that torch was built with, which torch's own calls do not mind
        return cudnn_number(".".join(map(str, torch._C._cudnn.getRuntimeVersion())))


def cudnn_number(version: str) -> int:
    """Return a version such as 9.20.0.48 as cuDNN gives its own: 92000."""
    major, minor, patch = (int(x) for x in version.split(".")[:3])
    return 10000 * major + 100 * minor + patch


def in_words(machine: dict[str, Any]) -> str:
    """Say what ``describe`` found; earlier results have no commit."""
    words = [
        machine["device"],
        f"{machine['cores']} cores",
        machine["platform"],
        f"torch {machine['torch']}",
    ]
    commit = [f"commit {machine['commit']}"] if "commit" in machine else []
    return ", ".join([*words, machine["date"], *commit])


def results_file(folder: Path, name: str, machine: dict[str, Any]) -> Path:
    """Return where a benchmark's results of a machine are kept: NAME-MACHINE-N-cores.jsonl."""
    return folder / f"{name}-{slug(machine['device'])}-{machine['cores']}-cores.jsonl"


def time_steps(
    step: Callable[[], object], device: str, repeats: int, warm_up: int = 2
) -> list[float]:
    """Time ``repeats`` calls after ``warm_up`` more, in seconds: by CUDA events on a GPU, by the
    clock on a CPU.
    """
    for _ in range(warm_up):
        step()
    if device == "cuda":
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        torch.cuda.synchronize()
        marks[0].record()
        for mark in marks[1:]:
            step()
            mark.record()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        taken.append(time.perf_counter() - start)
    return taken
