"""What a device can do at most, measured: copy bandwidth and matrix multiplication.

python -m bench.ceilings                    # this CPU, on all its cores
python -m bench.ceilings --device cuda --json ceilings.jsonl
"""

from statistics import median
from typing import Any

import torch

from bench.rounds import add_json, keep, need_cuda
from bench.workload import DTYPES
from kernels.products import linear
from runtime.machine import describe, time_steps, usable_cores
from tools.arguments import one_line_errors, parser_for, positive, run_command

# Large enough to leave the caches and to fill every multiprocessor; a second or so of work in all.
COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}
MATMUL_SIZES = {"cpu": (1024, 2048), "cuda": (4096, 8192, 16384)}
REPEATS = {"cpu": 5, "cuda": 20}


def copy_bandwidth(device: str) -> float:
    """Measure a copy inside the device's memory in GB/s (10^9 bytes), counting bytes read and written."""
    source = torch.ones(COPY_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / median(time_steps(lambda: target.copy_(source), device, REPEATS[device])) / 1e9


def matmul_rate(device: str, dtype: torch.dtype) -> float:
    """Measure the product of two square matrices in TFLOP/s, at the fastest size."""
    rates = []
    for size in MATMUL_SIZES[device]:
        rates.append(2 * size**3 / median(product_times(device, dtype, size, size, size)) / 1e12)
    return max(rates)


def product_times(
    device: str, dtype: torch.dtype, rows: int, inner: int, columns: int, repeats: int | None = None
) -> list[float]:
    """Time products of matrices ``[rows, inner]`` and ``[inner, columns]``, as a layer's forward does them."""
    a, b = torch.randn(rows, inner, device=device).to(dtype), torch.randn(columns, inner, device=device).to(dtype)
    return time_steps(lambda: linear(a, b), device, repeats or REPEATS[device])


def measure(device: str, dtypes: tuple[str, ...]) -> dict[str, Any]:
    """Measure a device's ceilings: ``copy_gb_per_s``, ``matmul_tflops`` by dtype and, on a CPU, ``threads``."""
    found: dict[str, Any] = {"copy_gb_per_s": copy_bandwidth(device)}
    found["matmul_tflops"] = {name: matmul_rate(device, DTYPES[name]) for name in dtypes}
    if device == "cpu":
        found["threads"] = torch.get_num_threads()
    return found


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = parser_for("python -m bench.ceilings", __doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=positive, help="of the CPU (default: one per core)")
    add_json(parser)
    args = parser.parse_args(argv)
    need_cuda(args.device)
    torch.set_num_threads(args.threads or len(usable_cores()))
    found = {"machine": describe(args.device), "ceilings": measure(args.device, ("bfloat16", "float32"))}
    print(found["machine"]["device"])
    print(f"  copy               {found['ceilings']['copy_gb_per_s']:10.1f} GB/s")
    for name, rate in found["ceilings"]["matmul_tflops"].items():
        print(f"  matmul {name:12}{rate:10.3f} TFLOP/s")
    keep(args, found)


if __name__ == "__main__":
    run_command(main)
