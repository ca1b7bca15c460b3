"""Measure the rates of devices: matrix products, attention, launches of tiles, memory.

All ranks measure at once, since those of a node may share cores, memory and adapters; the median
over ranks counts. Of short work the mean counts: ranks that share a core now and then wait for it
longer than the work itself takes.
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
"""Value and the way it was measured, keyed by the key of a cluster file."""
FFN = 4
"""Width of the feed-forward layer as a multiple of the hidden size."""
REPEATS = 3
TINY = 4
"""Number of positions of a tile so small that its launch takes all of its time."""
TILES = 8
"""Number of tiles of the rank that has the most."""
HOST_BYTES = 1 << 28


def middle_of_ranks(measured: Callable[[], float]) -> float:
    """Return the median over ranks of a measurement that all of them make at once. Collective."""
    dist.barrier()
    return median(gather_results(measured))


def measure_products(device: torch.device, work: AttentionShape, rows: int) -> Figures:
    """Measure the best matrix product and the products of a layer, in TFLOP/s."""
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
        say(f"product of {' x '.join(map(str, shape))}: {rate:.4g} TFLOP/s")
        seconds += shape_seconds
        multiply_adds += prod(shape)

    about_peak = f"{work.dtype}: a GPU's data sheet, else the best product or kernel measured"
    about_layer = f"a layer of width {width}, {rows} rows"
    return {
        "peak_tflops": (peak, about_peak),
        "matmul_fraction": (2 * multiply_adds / seconds / 1e12, about_layer),
    }


def measure_tiles(device: torch.device, work: AttentionShape, lengths: tuple[int, ...]) -> Figures:
    """Measure attention's TFLOP/s, the share of masked pairs computed anyway, and a launch.

    Only the longest of the ascending lengths counts; the results of the others are just printed.
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
    """Turn rates of layers and attention into shares of the peak, the best of all rates."""
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
    """Return a function that runs a ring's last rank without communication, and its pairs.

    The last rank of a causal ring attends in every round. ``work`` is the shape on each of ``size``
    ranks.
    """
    plan = make_plan("ring", seq_len=size * work.seq_length, size=size, causal=causal)
    rank = size - 1
    executor = Executor(LoopbackTransport(plan.geometry, None, rank), "auto")
    pairs = sum(step.pairs for step in plan.rounds(rank))
    return step_of(plan, executor, *work.tensors(device.type)), pairs


def attention_seconds(device: torch.device, work: AttentionShape, causal: bool) -> float:
    """Measure one tile as runs compute it, in seconds of forward and backward pass together."""
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
    """Measure the executor's overhead in seconds per tile, without communication."""
    step, pairs = rank_step(device, replace(work, seq_length=TINY), TILES)
    seconds = median(time_steps(step, device.type, 3 * REPEATS))
    return (seconds - work.flops(pairs) / rate) / (2 * TILES)


def measure_memory(device: torch.device, sharing: int) -> Figures:
    """Return a processor's memory and, for a GPU, the host's memory and the rate of copies."""
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
