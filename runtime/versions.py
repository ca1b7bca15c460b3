"""Whether all ranks run the same code on the same torch and Python, before they join: other bytes may go unnoticed."""

import hashlib
import json
import platform
import socket
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from runtime.errors import UserError

OWN = "longmesh/versions of rank {}"
FOUND = "longmesh/versions that differ"
ROOT = Path(__file__).resolve().parents[1]


def versions() -> dict[str, str]:
    """Return the host of this process, and what all ranks must have alike."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"host": socket.gethostname(), "torch": torch.__version__, "Python": python, "sources": sources(ROOT)}


def sources(root: Path) -> str:
    """Return a digest of the Python files in ``root`` and in its packages, but for the tests: 8 hexadecimal digits."""
    folders = sorted(file.parent for file in root.glob("*/__init__.py") if file.parent.name != "tests")
    found = hashlib.sha256()
    for path in (*sorted(root.glob("*.py")), *(path for folder in folders for path in sorted(folder.rglob("*.py")))):
        found.update(f"{path.relative_to(root)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()[:8]


def check_alike(store: dist.Store, rank: int, size: int) -> None:
    """Raise UserError on all ranks, with one line, where ``versions`` differ; through the store alone. Collective."""
    store.set(OWN.format(rank), json.dumps(versions()))
    if rank == 0:
        everyone = [json.loads(text) for text in store.multi_get([OWN.format(other) for other in range(size)])]
        store.set(FOUND, "; ".join(_differences(everyone)))
    if line := store.get(FOUND).decode():
        raise UserError(f"ranks differ: {line}; start all from one checkout and one environment")


def _differences(everyone: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield, for each name, who has another value than most; rank 0 decides between two as frequent."""
    for name in sorted({name for one in everyone for name in one} - {"host"}):
        values = [one.get(name, "unknown") for one in everyone]
        usual = Counter(values).most_common(1)[0][0]
        others: dict[tuple[str, str], list[str]] = defaultdict(list)
        for rank, value in enumerate(values):
            if value != usual:
                others[value, everyone[rank]["host"]].append(str(rank))
        told = [f"{value} on rank {', '.join(ranks)} ({host})" for (value, host), ranks in others.items()]
        if told:
            yield f"{name} {', '.join(told)}, and {usual} on the others"
