"""Measure the rates of a device and its links: copies, matmuls, exchanges between ranks."""

from collections.abc import Callable, Sequence
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist

from kernels.operators import linear
from runtime.machine import describe, time_steps, usable_cores
from runtime.together import gather_results

# These sizes exceed the caches and fill every multiprocessor; about a second of work in all.
COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}
MATMUL_SIZES = {"cpu": (1024, 2048), "cuda": (4096, 8192, 16384)}
REPEATS = {"cpu": 5, "cuda": 20}
"""Number of timed repetitions of each copy and matmul, keyed by device type."""
FIRST_BYTES = 1 << 10
PROBES = 5
FIRST_PROBES = 50
"""Number of timed repetitions of short work, such as an exchange of ``FIRST_BYTES``.

Longer work is repeated ``PROBES`` times.
"""
Step = Callable[[], object]


def copy_bandwidth(device: str) -> float:
    """Measure a copy inside device memory in GB/s (10^9 bytes), counting bytes read and written."""
    source = torch.ones(COPY_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = time_steps(lambda: target.copy_(source), device, REPEATS[device])
    return 2 * source.numel() / median(seconds) / 1e9


def matmul_rate(device: str, dtype: torch.dtype) -> float:
    """Measure square matmuls of several sizes; return the TFLOP/s of the fastest size."""
    rates = []
    for n in MATMUL_SIZES[device]:
        seconds = product_times(device, dtype, n, n, n, REPEATS[device])
        rates.append(2 * n**3 / median(seconds) / 1e12)
    return max(rates)


def product_times(
    device: str, dtype: torch.dtype, rows: int, inner: int, columns: int, repeats: int
) -> list[float]:
    """Time matmuls ``[rows, inner] x [inner, columns]``, run as in a layer's forward pass.

    Returns the seconds of each repetition.
    """
    x = torch.randn(rows, inner, device=device).to(dtype)
    weight = torch.randn(columns, inner, device=device).to(dtype)
    return time_steps(lambda: linear(x, weight), device, repeats)


def ceilings(device: str, dtypes: tuple[str, ...]) -> dict[str, Any]:
    """Measure a device's peak rates.

    Returns ``copy_gb_per_s``, ``matmul_tflops`` keyed by dtype and, on a CPU, the number of
    ``threads`` that computed.
    """
    result: dict[str, Any] = {"copy_gb_per_s": copy_bandwidth(device)}
    result["matmul_tflops"] = {name: matmul_rate(device, getattr(torch, name)) for name in dtypes}
    if device == "cpu":
        result["threads"] = torch.get_num_threads()
    return result


def print_ceilings(requested: str) -> dict[str, Any]:
    """Measure and print a device's peak copy bandwidth and matmul rates; return them.

    A CPU uses all its cores. ``requested`` may be ``auto``: a GPU if there is one, else the CPU.
    """
    device = requested
    if requested == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(len(usable_cores()))
    machine = describe(device)
    result = ceilings(device, ("bfloat16", "float32"))

    print(f"{machine['device']}\n  copy {result['copy_gb_per_s']:22.1f} GB/s")
    for name, rate in result["matmul_tflops"].items():
        print(f"  matmul {name:12}{rate:8.3f} TFLOP/s")

    return {"machine": machine, "ceilings": result}


def exchange_seconds(device: torch.device, peers: list[int], size: int) -> float:
    """Time an exchange on all ranks; return the slowest rank's seconds. Collective.

    Each rank sends ``size`` bytes to the first of ``peers`` and receives the same number from the
    last of them; a rank without peers only takes part in the timing.
    """
    post = posting(device, peers[:1], peers[-1:], size)

    def exchange() -> None:
        if peers:
            post()()

    if size > FIRST_BYTES:
        return slowest(exchange, device.type, PROBES, median)

    return slowest(exchange, device.type, FIRST_PROBES, mean)


def posting(
    device: torch.device, to: Sequence[int], sources: Sequence[int], size: int
) -> Callable[[], Step]:
    """Return a function that posts sends and receives of ``size`` bytes.

    The function sends to each rank of ``to`` and receives from each of ``sources``. It does not
    wait, but returns a second function that waits for all transfers.
    """
    outgoing = torch.zeros(size, dtype=torch.uint8, device=device)
    incoming = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in sources]

    def post() -> Step:
        operations = []
        for buffer, peer in zip(incoming, sources, strict=True):
            operations.append(dist.P2POp(dist.irecv, buffer, peer))
        for peer in to:
            operations.append(dist.P2POp(dist.isend, outgoing, peer))
        requests = dist.batch_isend_irecv(operations)
        return lambda: [request.wait() for request in requests]

    return post


def slowest(
    step: Step | None, device: str, repeats: int, middle: Callable[[list[float]], float] = median
) -> float:
    """Time a step on all ranks at once; return the slowest rank's seconds. Collective.

    A rank with ``step`` None only waits. ``middle`` (median or mean) averages a rank's repetitions.
    """
    dist.barrier()
    seconds = 0.0
    if step is not None:
        seconds = middle(time_steps(step, device, repeats))
    return max(gather_results(lambda: seconds))
