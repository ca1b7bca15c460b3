"""Ceilings of one device: copies inside its memory, and products of matrices."""

from statistics import median
from typing import Any

import torch

from kernels.products import linear
from runtime.machine import time_steps

# Large enough to leave the caches and to fill every multiprocessor; a second or so of work in all.
COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}
MATMUL_SIZES = {"cpu": (1024, 2048), "cuda": (4096, 8192, 16384)}
REPEATS = {"cpu": 5, "cuda": 20}
"""Times that a copy or a product is repeated."""


def copy_bandwidth(device: str) -> float:
    """Measure a copy inside the device's memory in GB/s (10^9 bytes), counting bytes read and written."""
    source = torch.ones(COPY_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / median(time_steps(lambda: target.copy_(source), device, REPEATS[device])) / 1e9


def matmul_rate(device: str, dtype: torch.dtype) -> float:
    """Measure the product of two square matrices in TFLOP/s, at the fastest size."""
    times = {n: product_times(device, dtype, n, n, n, REPEATS[device]) for n in MATMUL_SIZES[device]}
    return max(2 * n**3 / median(seconds) / 1e12 for n, seconds in times.items())


def product_times(device: str, dtype: torch.dtype, rows: int, inner: int, columns: int, repeats: int) -> list[float]:
    """Time products of matrices ``[rows, inner]`` and ``[inner, columns]``, as a layer's forward does them."""
    a, b = torch.randn(rows, inner, device=device).to(dtype), torch.randn(columns, inner, device=device).to(dtype)
    return time_steps(lambda: linear(a, b), device, repeats)


def ceilings(device: str, dtypes: tuple[str, ...]) -> dict[str, Any]:
    """Measure a device's ceilings: ``copy_gb_per_s``, ``matmul_tflops`` by dtype and, on a CPU, ``threads``."""
    found: dict[str, Any] = {"copy_gb_per_s": copy_bandwidth(device)}
    found["matmul_tflops"] = {name: matmul_rate(device, getattr(torch, name)) for name in dtypes}
    if device == "cpu":
        found["threads"] = torch.get_num_threads()
    return found
