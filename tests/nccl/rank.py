"""A process of `make nccl-check` under torchrun: it trains on meshes, or measures links."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallel.context.transport import all_gather_single
from parallel.mesh import MeshConfig, distributed_mesh
from tests.parity.run import train_masked
from tools.common.ceilings import PROBES, exchange_seconds, slowest
from train.run import run_entry

CASES, LINKS = "cases.json", "links.json"
SIZES = {"cuda": tuple(1 << n for n in (20, 24, 28, 30)), "cpu": tuple(1 << n for n in (16, 20))}
"""Bytes that a rank has of a message."""


def result(folder: Path, name: str, rank: int) -> Path:
    """Return where a rank writes what it found of a case."""
    return folder / f"{name} on rank {rank}.pt"


def train_cases(folder: Path) -> None:
    """Train by the flags of each case, one after the other.

    A rank's findings are on the disk before the next.
    """
    rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    for name, flags in json.loads((folder / CASES).read_text()).items():
        run, path = train_masked(rank, size, flags), result(folder, name, rank)
        torch.save(run, draft := path.with_suffix(".tmp"))
        draft.rename(path)
        if rank == 0:
            print(f"trained: {name}", flush=True)


def measure_links(folder: Path, device: str) -> None:
    """Write GB/s of every size.

    What a rank sends to the next one, and nccl-tests' bus bandwidth of collectives.
    """
    rows = []
    with distributed_mesh(MeshConfig(device=device)) as mesh:  # type: ignore[arg-type]
        rank, ranks = dist.get_rank(), dist.get_world_size()
        for size in SIZES[device]:
            seconds = exchange_seconds(
                mesh.device, [(rank + step) % ranks for step in (1, -1)], size
            )
            row: dict[str, Any] = {"bytes": size, "ring": size / seconds / 1e9}
            for name, (times, step) in _collectives(mesh.device, size, ranks).items():
                seconds = slowest(step, device, PROBES)
                row[name] = times * (ranks - 1) / ranks * size / seconds / 1e9
            rows.append(row)
            if rank == 0:
                print(", ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
    if rank == 0:
        (folder / LINKS).write_text(json.dumps(rows))


def _collectives(
    device: torch.device, size: int, ranks: int
) -> dict[str, tuple[int, Callable[[], Any]]]:
    """Return each collective of ``size`` bytes, and its share of traffic.

    That is how often a ring passes each rank's part of them on.
    """
    whole = torch.zeros(size // 4 // ranks * ranks, device=device)
    other, part = torch.empty_like(whole), whole[: len(whole) // ranks].clone()
    return {
        "all_reduce": (2, lambda: dist.all_reduce(whole)),
        "all_gather": (1, lambda: all_gather_single(other, part)),
        "all_to_all": (1, lambda: dist.all_to_all_single(other, whole)),
    }


def main(arguments: list[str]) -> None:
    """Do what the first argument names, with the others."""
    what, folder, *more = arguments
    work = {"train": train_cases, "links": measure_links}[what]
    work(Path(folder), *more)  # type: ignore[operator]


if __name__ == "__main__":
    run_entry(main)
