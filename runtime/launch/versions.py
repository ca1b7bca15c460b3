"""Refuse a run whose ranks have different source files, or different versions of torch or Python.

Such ranks may hang in collectives of different shapes, or train on with numbers that differ a
little.
"""

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

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = "longmesh/versions of rank {}"
"""Store key of the versions on a rank."""
DIFFERENCES = "longmesh/versions that differ"
"""Store key of rank 0's message about the differences between all ranks' versions."""


def sources(root: Path) -> str:
    """Return a digest of the Python files of a checkout, without tests: 8 hexadecimal digits."""
    paths = sorted(root.glob("*.py"))
    packages = [init.parent for init in root.glob("*/__init__.py")]
    for package in sorted(packages):
        if package.name != "tests":
            paths += sorted(package.rglob("*.py"))

    digest = hashlib.sha256()
    for path in paths:
        file_digest = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(root)} {file_digest}\n".encode())
    return digest.hexdigest()[:8]


def check_versions(store: dist.Store, rank: int, world_size: int) -> None:
    """Raise UserError on all ranks if their versions differ. Collective, through the store."""
    python = ".".join(platform.python_version_tuple()[:2])
    local_versions = {
        "host": socket.gethostname(),
        "torch": torch.__version__,
        "Python": python,
        "sources": sources(ROOT),
    }
    store.set(VERSIONS.format(rank), json.dumps(local_versions))
    if rank == 0:
        texts = store.multi_get([VERSIONS.format(other) for other in range(world_size)])
        versions = [json.loads(text) for text in texts]
        store.set(DIFFERENCES, "; ".join(differences(versions)))

    message = store.get(DIFFERENCES).decode()
    if message:
        raise UserError(f"ranks differ: {message}; start all from one checkout and one environment")


def differences(versions: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield, for each version that differs, the ranks whose value is not the majority's.

    If two values are equally frequent, rank 0's counts as the majority's.
    """
    names = {name for rank_versions in versions for name in rank_versions} - {"host"}
    for name in sorted(names):
        values = [rank_versions.get(name, "unknown") for rank_versions in versions]
        usual = Counter(values).most_common(1)[0][0]
        ranks_of: dict[tuple[str, str], list[str]] = defaultdict(list)
        for rank, value in enumerate(values):
            if value != usual:
                ranks_of[value, versions[rank]["host"]].append(str(rank))

        deviations = []
        for (value, host), ranks in ranks_of.items():
            deviations.append(f"{value} on rank {', '.join(ranks)} ({host})")
        if deviations:
            yield f"{name} {', '.join(deviations)}, and {usual} on the others"
