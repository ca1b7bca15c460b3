"""Rates of a device, copies inside its memory and products of matrices, and exchanges between
ranks, timed.
"""

from collections.abc import Callable, Sequence
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist

from kernels.operators import linear
from runtime.machine import describe, time_steps, usable_cores
from runtime.together import gather_results

# Large enough to leave the caches and to fill every multiprocessor; a second or so of work in all.
COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}
MATMUL_SIZES = {"cpu": (1024, 2048), "cuda": (4096, 8192, 16384)}
REPEATS = {"cpu": 5, "cuda": 20}
"""Times that a copy or a product is repeated."""
FIRST_BYTES = 1 << 10
PROBES, FIRST_PROBES = 5, 50
"""Exchanges that count, after two; of what is short, more."""
Step = Callable[[], object]


def copy_bandwidth(device: str) -> float:
    """Measure a copy inside the device's memory in GB/s (10^9 bytes), counting bytes read and
    written.
    """
    source = torch.ones(COPY_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return (
        2
        * source.numel()
        / median(time_steps(lambda: target.copy_(source), device, REPEATS[device]))
        / 1e9
    )


def matmul_rate(device: str, dtype: torch.dtype) -> float:
    """Measure the product of two square matrices in TFLOP/s, at the fastest size."""
    times = {
        n: product_times(device, dtype, n, n, n, REPEATS[device]) for n in MATMUL_SIZES[device]
    }
    return max(2 * n**3 / median(seconds) / 1e12 for n, seconds in times.items())


def product_times(
    device: str, dtype: torch.dtype, rows: int, inner: int, columns: int, repeats: int
) -> list[float]:
    """Time products of matrices ``[rows, inner]`` and ``[inner, columns]``, as a layer's forward
    does them.
    """
    a, b = (
        torch.randn(rows, inner, device=device).to(dtype),
        torch.randn(columns, inner, device=device).to(dtype),
    )
    return time_steps(lambda: linear(a, b), device, repeats)


def ceilings(device: str, dtypes: tuple[str, ...]) -> dict[str, Any]:
    """Measure a device's ceilings: ``copy_gb_per_s``, ``matmul_tflops`` by dtype and, on a CPU,
    ``threads``.
    """
    found: dict[str, Any] = {"copy_gb_per_s": copy_bandwidth(device)}
    found["matmul_tflops"] = {name: matmul_rate(device, getattr(torch, name)) for name in dtypes}
    if device == "cpu":
        found["threads"] = torch.get_num_threads()
    return found


def print_ceilings(asked: str) -> dict[str, Any]:
    """Measure the ceilings of a device, with all cores of a CPU; ``auto`` is a GPU where there is
    one. Print them.
    """
    device = asked if asked != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(len(usable_cores()))
    machine, found = describe(device), ceilings(device, ("bfloat16", "float32"))
    print(f"{machine['device']}\n  copy {found['copy_gb_per_s']:22.1f} GB/s")
    for name, rate in found["matmul_tflops"].items():
        print(f"  matmul {name:12}{rate:8.3f} TFLOP/s")
    return {"machine": machine, "ceilings": found}


def exchange_seconds(device: torch.device, peers: list[int], size: int) -> float:
    """Time the slowest rank that sends ``size`` bytes to the first of ``peers`` and receives as
    many from the last.
    """
    post = posting(device, peers[:1], peers[-1:], size)
    probes, middle = (PROBES, median) if size > FIRST_BYTES else (FIRST_PROBES, mean)
    return slowest(lambda: post()() if peers else None, device.type, probes, middle)


def posting(
    device: torch.device, to: Sequence[int], of: Sequence[int], size: int
) -> Callable[[], Step]:
    """Return what posts ``size`` bytes to each of some ranks and as many of each of others, and
    returns what waits.
    """
    sent, *received = (
        torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(1 + len(of))
    )

    def post() -> Step:
        operations = [
            dist.P2POp(dist.irecv, into, peer) for into, peer in zip(received, of, strict=True)
        ]
        under_way = dist.batch_isend_irecv(
            [*operations, *(dist.P2POp(dist.isend, sent, peer) for peer in to)]
        )
        return lambda: [one.wait() for one in under_way]

    return post


def slowest(
    step: Step | None, device: str, repeats: int, middle: Callable[[list[float]], float] = median
) -> float:
    """Time a step that ranks make at once, or not at all, by the middle of each; return the
    slowest's. Collective.
    """
    dist.barrier()
    mine = middle(time_steps(step, device, repeats)) if step else 0.0
    return max(gather_results(lambda: mine))
