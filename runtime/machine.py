"""Describe the machine of a measurement (device, versions, commit), and time calls on it."""

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
    """A GPU: dense bfloat16 FLOP/s in its data sheet, and its file in configs/clusters/, if any."""

    flops: float
    cluster: str = ""


CARDS = {
    "gb300": Card(2500e12, "gb300_nvl72"),
    "gb200": Card(2500e12, "gb200_nvl72"),
    "b300": Card(2250e12, "b300_pod"),
    "b200": Card(2250e12, "b200_pod"),
    "gh200": Card(989e12),  # one GPU per node, with a Grace CPU
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
"""Cards, keyed by the words that their names contain; the first entry that matches counts."""
OTHER_CARD = re.compile(r"mig|laptop|d|max|cnx|\d+(c|cme|q|a|b)")
"""Words in a GPU's name that mark a partition or variant of a card, such as 40C for a virtual GPU;
the table's numbers do not hold for it.
"""


def card_of(name: str) -> Card | None:
    """Return the card for a ``torch.cuda.get_device_name()``; None if the table lacks it."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    if any(map(OTHER_CARD.fullmatch, words)):
        return None
    for title, card in CARDS.items():
        if words.issuperset(title.split()):
            return card
    return None


def commit_of(root: Path = ROOT, *below: str) -> str:
    """Return a checkout's commit, with a note if files (or only files ``below``) were changed."""
    top = _git(root, "rev-parse", "--show-toplevel")
    head = _git(root, "rev-parse", "HEAD")
    if not head or not top or Path(top).resolve() != root.resolve():
        return "unknown (not taken from a git checkout)"
    changed = _git(root, "status", "--porcelain", "--untracked-files=normal", "--", *below)
    return f"{head} with changes" if changed else head


def _git(root: Path, *command: str) -> str:
    """Return git's output; an empty string if git is missing or fails."""
    try:
        result = subprocess.run(
            ["git", "-C", str(root), *command], capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


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
    if info.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)
        if match:
            return match[1]
    return platform.processor() or platform.machine()


def slug(name: str) -> str:
    """Reduce a name to lower-case letters, digits and hyphens, for use in a file name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def stamp() -> dict[str, str]:
    """Return the current date and the commit, to store with a result."""
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit_of()}


def describe(device: str) -> dict[str, Any]:
    """Return device, versions, date and commit for a result; missing packages are left out."""
    machine: dict[str, Any] = {
        "device": device_name(device),
        **stamp(),
        "platform": platform.platform(),
        "cores": len(usable_cores()),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for package in ("triton", "flash-attn-3", "flash-attn-4"):
        try:
            machine[package.replace("-", "_")] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if device == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        machine |= {
            "cuda": torch.version.cuda,
            "cudnn": loaded_cudnn(),
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 2),
        }
    return machine


def loaded_cudnn() -> int:
    """Return the version of the loaded cuDNN; 0 if there is none."""
    try:
        return torch.backends.cudnn.version() or 0
    except RuntimeError:
        # The loaded cuDNN is older than torch was built with, but torch's own calls accept it.
        return cudnn_number(".".join(map(str, torch._C._cudnn.getRuntimeVersion())))


def cudnn_number(version: str) -> int:
    """Return a version such as 9.20.0.48 in cuDNN's form: 92000."""
    major, minor, patch = (int(x) for x in version.split(".")[:3])
    return 10000 * major + 100 * minor + patch


def in_words(machine: dict[str, Any]) -> str:
    """Describe the result of ``describe`` in words; old results have no commit."""
    words = [
        machine["device"],
        f"{machine['cores']} cores",
        machine["platform"],
        f"torch {machine['torch']}",
        machine["date"],
    ]
    if "commit" in machine:
        words.append(f"commit {machine['commit']}")
    return ", ".join(words)


def results_file(folder: Path, name: str, machine: dict[str, Any]) -> Path:
    """Return the path of a benchmark's results for a machine: NAME-MACHINE-N-cores.jsonl."""
    return folder / f"{name}-{slug(machine['device'])}-{machine['cores']}-cores.jsonl"


def time_steps(
    step: Callable[[], object], device: str, repeats: int, warm_up: int = 2
) -> list[float]:
    """Return the seconds of each of ``repeats`` calls, after ``warm_up`` calls.

    Measures with CUDA events on a GPU, and with the clock on a CPU.
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
        return [start.elapsed_time(end) / 1e3 for start, end in pairwise(marks)]

    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return seconds
