"""Measure the rates of devices: matmuls, attention, launches of tiles, memory.

All ranks measure at once, since those of a node may share cores and memory; a figure is the median
over ranks. For short work the mean over repetitions counts, not the median: a rank that shares a
core sometimes waits for it longer than the work itself takes.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist

from parallel.context import make_plan
from parallel.context.executor import Executor
from runtime.errors import UserError
from runtime.machine import time_steps
from runtime.together import gather_results
from tools.common.ceilings import FIRST_PROBES, PROBES, product_times
from tools.common.loopback import LoopbackTransport, step_of
from tools.common.shapes import DTYPES, AttentionShape
from train.callbacks import say
from train.callbacks.progress import peak_flops

Figures = dict[str, tuple[Any, str]]
"""Values for a cluster file, each with a note on how it was measured, keyed as in the file."""
FFN = 4
"""Width of the feed-forward layer as a multiple of the hidden size."""
REPEATS = 3
TINY = 4
"""Side of a tile, in positions, that is so small that its time is all launch overhead."""
TILES = 8
"""Number of ranks of the ring that measures launches; its last rank computes as many tiles."""
HOST_BYTES = 1 << 28


def middle_of_ranks(measured: Callable[[], float]) -> float:
    """Measure on all ranks at once; return the median over ranks. Collective."""
    dist.barrier()
    return median(gather_results(measured))


def measure_products(device: torch.device, work: AttentionShape, rows: int) -> Figures:
    """Return the device's peak and the rate of a layer's matmuls, both in TFLOP/s."""
    dtype = DTYPES[work.dtype]
    width = work.num_heads * work.head_dim
    peak = middle_of_ranks(lambda: peak_flops(device, dtype)) / 1e12
    say(f"peak: {peak:.4g} TFLOP/s, {work.dtype}")

    layer_shapes = (
        (rows, width, width),
        (rows, width, FFN * width),
        (rows, FFN * width, width),
        (width, rows, FFN * width),
    )
    seconds = 0.0
    multiply_adds = 0
    for shape in layer_shapes:
        times = partial(product_times, device.type, dtype, *shape, FIRST_PROBES)
        shape_seconds = middle_of_ranks(lambda times=times: mean(times()))  # type: ignore[misc]
        rate = 2 * prod(shape) / shape_seconds / 1e12
        say(f"matmul of {' x '.join(map(str, shape))}: {rate:.4g} TFLOP/s")
        seconds += shape_seconds
        multiply_adds += prod(shape)

    about_peak = f"{work.dtype}: a GPU's data sheet, else the best matmul or kernel measured"
    about_layer = f"a layer of width {width}, {rows} rows"
    return {
        "peak_tflops": (peak, about_peak),
        "matmul_fraction": (2 * multiply_adds / seconds / 1e12, about_layer),
    }


def measure_tiles(device: torch.device, work: AttentionShape, lengths: tuple[int, ...]) -> Figures:
    """Measure attention's rate, the cost of masked pairs, and the launch time of a tile.

    The results are in TFLOP/s, as the share of masked pairs in a causal tile that is computed
    anyway, and in microseconds. Only the longest of the ascending lengths counts; the results of
    the others are just printed.
    """
    for length in lengths:
        tile = replace(work, seq_length=length)
        whole_seconds = attention_seconds(device, tile, causal=False)

    rate = tile.flops(tile.seq_length**2) / whole_seconds

    visible = tile.pairs / tile.seq_length**2
    computed = attention_seconds(device, tile, causal=True) / whole_seconds
    masked = 0.0
    if visible < 1:
        masked = min(1.0, max(0.0, (computed - visible) / (1 - visible)))
    launch = max(0.0, middle_of_ranks(lambda: launch_seconds(device, work, rate)))
    say(f"launch and merge of a tile: {1e6 * launch:.4g} us")

    length = tile.seq_length
    about_rate = f"forward and backward, {length} positions of a whole tile"
    about_masked = f"a causal tile of {length} positions beside a whole one"
    about_launch = f"{TILES} tiles of {TINY} positions, forward and backward"
    return {
        "attention_fraction": (rate / 1e12, about_rate),
        "masked_share": (masked, about_masked),
        "launch_us": (1e6 * launch, about_launch),
    }


def relate(figures: Figures) -> None:
    """Turn the rates of layers and attention into fractions of the peak, in place.

    The peak becomes the highest of the three rates.
    """
    data_sheet, about_peak = figures["peak_tflops"]
    layers, about_layers = figures["matmul_fraction"]
    attention, about_attention = figures["attention_fraction"]

    peak = max(data_sheet, layers, attention)
    figures["peak_tflops"] = (peak, about_peak)
    figures["matmul_fraction"] = (layers / peak, about_layers)
    figures["attention_fraction"] = (attention / peak, about_attention)


def rank_step(
    device: torch.device, work: AttentionShape, size: int = 1, causal: bool = True
) -> tuple[Callable[[], None], int]:
    """Return a function that runs a ring's last rank without communication, and its pair count.

    The last rank is the busiest: in a causal ring it attends in every round. ``work`` is the shape
    on each of ``size`` ranks.
    """
    plan = make_plan("ring", seq_len=size * work.seq_length, size=size, causal=causal)
    rank = size - 1
    executor = Executor(LoopbackTransport(plan.geometry, None, rank), "auto")
    pairs = sum(step.pairs for step in plan.rounds(rank))
    return step_of(plan, executor, *work.tensors(device.type)), pairs


def attention_seconds(device: torch.device, work: AttentionShape, causal: bool) -> float:
    """Time one attention tile, computed as in a run: seconds of forward plus backward pass."""
    try:
        step, pairs = rank_step(device, work, causal=causal)
        seconds = middle_of_ranks(lambda: mean(time_steps(step, device.type, 3 * PROBES)))
    except (RuntimeError, ValueError, NotImplementedError) as error:
        why = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        raise UserError(
            f"attention cannot be measured at {work.seq_length} positions: {why}"
        ) from error

    kind = "a causal tile" if causal else "a whole tile"
    rate = work.flops(pairs) / seconds / 1e12
    say(
        f"attention, {kind} of {work.seq_length} positions: {rate:.4g} TFLOP/s forward and backward"
    )
    return seconds


def launch_seconds(device: torch.device, work: AttentionShape, rate: float) -> float:
    """Measure the executor's overhead in seconds per tile and pass, without communication."""
    step, pairs = rank_step(device, replace(work, seq_length=TINY), TILES)
    seconds = median(time_steps(step, device.type, 3 * REPEATS))
    return (seconds - work.flops(pairs) / rate) / (2 * TILES)


def measure_memory(device: torch.device, sharing: int) -> Figures:
    """Measure a device's memory and, for a GPU, its host memory and the rate of copies there.

    ``sharing`` is the number of devices that share the host's memory.
    """
    host_gb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / sharing / 1e9
    if device.type == "cpu":
        return {"memory_gb": (host_gb, "the machine's, shared by its processes")}

    pinned = torch.empty(HOST_BYTES, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(HOST_BYTES, dtype=torch.uint8, device=device)

    def copy_seconds() -> float:
        to_host = median(time_steps(lambda: pinned.copy_(on_device), "cuda", PROBES))
        to_device = median(time_steps(lambda: on_device.copy_(pinned), "cuda", PROBES))
        return max(to_host, to_device)

    rate = HOST_BYTES / middle_of_ranks(copy_seconds) / 1e9
    say(f"copies to host memory and back: {rate:.4g} GB/s, the slower way")
    return {
        "memory_gb": (torch.cuda.mem_get_info(device)[1] / 1e9, "the GPU's"),
        "host_gb_per_s": (rate, "pinned memory, the slower way"),
        "host_memory_gb": (host_gb, "the machine's, shared by its GPUs"),
    }
