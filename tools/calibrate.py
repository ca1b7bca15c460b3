r"""Measure the devices at hand, and the links between the processes started, and write a cluster
file for the planner.

python -m tools.calibrate --out laptop.toml --links configs/clusters/cpu.toml      # alone: links as in that file
torchrun --nproc-per-node 4 -m tools.calibrate --out laptop.toml --links configs/clusters/cpu.toml
srun --nodes 2 --ntasks-per-node 8 python -m tools.calibrate --out pod.toml --name "our pod"
python -m tools.plan --config configs/models/llama_tiny.toml --cluster laptop.toml --context-parallel-size 4 \
    --vocab-size 8192
python -m tools.calibrate --ceilings               # copies and matrix products on all cores; no
file

Links inside nodes need two processes on each, links between nodes two nodes. What was not measured,
and is not taken from --links, stands in the file as a comment, and the planner names it. On a CPU
every process has one thread.

All ranks measure at once, since those of a node may share cores, memory and adapters; of what each
finds the median counts. What is short counts by its mean: ranks that share a core wait for it now
and then, for longer than that.
"""

import argparse
import json
import os
import socket
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from functools import partial
from math import prod
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist

from parallel.context import make_plan
from parallel.context.executor import Executor
from parallel.mesh import MeshConfig, distributed_mesh
from planner.cluster import Cluster, load_cluster
from runtime.errors import UserError
from runtime.files import unwritable, write_text
from runtime.machine import describe, in_words, time_steps, usable_cores
from runtime.progress import counted
from runtime.together import from_first, gather_results, is_first
from tools.common.arguments import parser_for, positive, refuse_folder
from tools.common.ceilings import (
    FIRST_BYTES,
    FIRST_PROBES,
    PROBES,
    exchange_seconds,
    posting,
    print_ceilings,
    product_times,
    slowest,
)
from tools.common.loopback import LoopbackTransport, step_of
from tools.common.report import write_records
from tools.common.shapes import DTYPES, AttentionShape
from train.callbacks import say
from train.callbacks.progress import peak_flops
from train.run import run_entry

Figures = dict[str, tuple[Any, str]]
"""Value, and how it was measured, by key of a cluster file."""
LENGTHS = {"cpu": (256, 512, 1024, 2048), "cuda": (2048, 4096, 8192, 16384)}
HEADS, WIDTHS = {"cpu": 8, "cuda": 32}, {"cpu": 64, "cuda": 128}
FFN = 4
"""Widths of a layer's feed-forward."""
REPEATS = 3
TINY, TILES = 4, 8
"""Positions of a tile whose computing is nothing beside its launch, and tiles of the rank that has
most.
"""
GROWTH, MOST_BYTES = 4, 1 << 28
LONG_ENOUGH = 0.05
"""Seconds of an exchange's bytes after which no larger message is tried: one that waits longer than
TCP's least timeout, 0.2 s, behind what its sender has posted is sent again for nothing."""
HOST_BYTES = 1 << 28
ABOUT_LINKS = [
    entry.name for entry in fields(Cluster) if entry.name.startswith(("inside_", "between_"))
]


def measure(device: torch.device, work: AttentionShape, lengths: tuple[int, ...]) -> Figures:
    """Return every figure that can be measured here, with a line for each measurement. Collective.

    Args:
        work: heads and batch of the model at hand, and the dtype; its width is that of all heads
            together.
        lengths: positions of a rank, at which attention is measured; the longest gives its rate.

    Raises UserError: nodes have unequal numbers of processes, or no attention kernel runs here.
    """
    size = dist.get_world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if len(set(gather_results(lambda: local))) > 1 or size % local:
        raise UserError(
            "nodes have unequal numbers of processes (LOCAL_WORLD_SIZE); start as many on each"
        )
    figures = _products(device, work, lengths[-1] * work.batch) | _tiles(device, work, lengths)
    _relate(figures)
    here = len(usable_cores()) if device.type == "cpu" else torch.cuda.device_count()
    figures["gpus_per_node"] = (
        (here, "those here") if size == 1 else (local, "processes started on each node")
    )
    figures |= _memory(device, figures["gpus_per_node"][0])
    if local > 1:
        figures |= _link_inside(device, local)
    if size > local:
        figures |= _link_between(device, local)
    if size > 1:
        figures |= _overlaps(device, replace(work, seq_length=lengths[-1]), local)
    return figures


def _middle(measured: Callable[[], float]) -> float:
    """Return the median over ranks of what all of them measure at once."""
    dist.barrier()
    return median(gather_results(measured))


def _products(device: torch.device, work: AttentionShape, rows: int) -> Figures:
    """Measure the best matrix product, and those of a layer, in TFLOP/s."""
    dtype, width = DTYPES[work.dtype], work.num_heads * work.head_dim
    peak = _middle(lambda: peak_flops(device, dtype)) / 1e12
    say(f"peak: {peak:.4g} TFLOP/s, {work.dtype}")
    seconds, operations = 0.0, 0
    for shape in (
        (rows, width, width),
        (rows, width, FFN * width),
        (rows, FFN * width, width),
        (width, rows, FFN * width),
    ):
        times = partial(product_times, device.type, dtype, *shape, FIRST_PROBES)
        taken = _middle(lambda times=times: mean(times()))  # type: ignore[misc]
        say(
            f"product of {' x '.join(map(str, shape))}: {2 * prod(shape) / taken / 1e12:.4g} TFLOP/s"
        )
        seconds += taken
        operations += 2 * prod(shape)
    return {
        "peak_tflops": (
            peak,
            f"{work.dtype}: a GPU's data sheet, else the best product or kernel measured",
        ),
        "matmul_fraction": (operations / seconds / 1e12, f"a layer of width {width}, {rows} rows"),
    }


def _tiles(device: torch.device, work: AttentionShape, lengths: tuple[int, ...]) -> Figures:
    """Measure a rank's attention in TFLOP/s, the share of a causal tile that is computed in vain,
    and a launch.
    """
    for length in lengths:
        tile = replace(work, seq_length=length)
        whole = _attention(device, tile, causal=False)
    rate = tile.flops(tile.seq_length**2) / whole
    visible = tile.pairs / tile.seq_length**2
    computed = _attention(device, tile, causal=True) / whole
    masked = min(1.0, max(0.0, (computed - visible) / (1 - visible))) if visible < 1 else 0.0
    launch = max(0.0, _middle(lambda: _launch(device, work, rate)))
    say(f"launch and merge of a tile: {1e6 * launch:.4g} us")
    length = tile.seq_length
    return {
        "attention_fraction": (
            rate / 1e12,
            f"forward and backward, {length} positions of a whole tile",
        ),
        "masked_share": (masked, f"a causal tile of {length} positions beside a whole one"),
        "launch_us": (1e6 * launch, f"{TILES} tiles of {TINY} positions, forward and backward"),
    }


def _relate(figures: Figures) -> None:
    """Turn rates of layers and attention into shares of the peak, which is the best of them."""
    shares = ("matmul_fraction", "attention_fraction")
    peak = max(figures[name][0] for name in ("peak_tflops", *shares))
    figures["peak_tflops"] = peak, figures["peak_tflops"][1]
    for name in shares:
        figures[name] = figures[name][0] / peak, figures[name][1]


def _alone(
    device: torch.device, work: AttentionShape, size: int = 1, causal: bool = True
) -> tuple[Callable[[], None], int]:
    """Return what the last rank of a ring does forward and backward, without traffic, and its
    (query, key) pairs.

    The ``work`` is of each of ``size`` ranks.
    """
    plan, rank = (
        make_plan("ring", seq_len=size * work.seq_length, size=size, causal=causal),
        size - 1,
    )
    executor = Executor(LoopbackTransport(plan.geometry, None, rank), "auto")
    return step_of(plan, executor, *work.tensors(device.type)), sum(
        step.pairs for step in plan.rounds(rank)
    )


def _attention(device: torch.device, work: AttentionShape, causal: bool) -> float:
    """Measure what runs take for one tile, in seconds forward and backward together."""
    try:
        step, pairs = _alone(device, work, causal=causal)
        taken = _middle(lambda: mean(time_steps(step, device.type, 3 * PROBES)))
    except (RuntimeError, ValueError, NotImplementedError) as error:
        why = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        raise UserError(
            f"attention cannot be measured at {work.seq_length} positions: {why}"
        ) from error
    kind, rate = "a causal tile" if causal else "a whole tile", work.flops(pairs) / taken / 1e12
    say(
        f"attention, {kind} of {work.seq_length} positions: {rate:.4g} TFLOP/s forward and backward"
    )
    return taken


def _launch(device: torch.device, work: AttentionShape, rate: float) -> float:
    """Measure the seconds of a tile besides its computing, by the executor, without traffic."""
    step, pairs = _alone(
        device, replace(work, seq_length=TINY), TILES
    )  # the last rank attends in every round
    taken = median(time_steps(step, device.type, 3 * REPEATS))
    return (taken - work.flops(pairs) / rate) / (2 * TILES)


def _memory(device: torch.device, sharing: int) -> Figures:
    """Return a processor's memory and, of a GPU, the host's and the rate of copies to it and back."""
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / sharing / 1e9
    if device.type == "cpu":
        return {"memory_gb": (host, "the machine's, shared by its processes")}
    pinned = torch.empty(HOST_BYTES, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(HOST_BYTES, dtype=torch.uint8, device=device)

    def copies() -> float:
        down = median(time_steps(lambda: pinned.copy_(on_device), "cuda", PROBES))
        return max(down, median(time_steps(lambda: on_device.copy_(pinned), "cuda", PROBES)))

    rate = HOST_BYTES / _middle(copies) / 1e9
    say(f"copies to host memory and back: {rate:.4g} GB/s, the slower way")
    return {
        "memory_gb": (torch.cuda.mem_get_info(device)[1] / 1e9, "the GPU's"),
        "host_gb_per_s": (rate, "pinned memory, the slower way"),
        "host_memory_gb": (host, "the machine's, shared by its GPUs"),
    }


def _link_inside(device: torch.device, local: int) -> Figures:
    """Measure the link inside a node."""
    first, place = divmod(dist.get_rank(), local)
    ring = [first * local + (place + step) % local for step in (1, -1)]
    latency, rate, _ = _link("inside a node", device, ring)
    how = f"{local} ranks of a node at once, each to the next"
    return {"inside_gb_per_s": (rate / 1e9, how), "inside_latency_us": (1e6 * latency, how)}


def _link_between(device: torch.device, local: int) -> Figures:
    """Measure the link between nodes, and whether the ranks of a node share it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    across = [(rank + step * local) % size for step in (1, -1)]
    latency, together, largest = _link("between nodes", device, across)
    peers = across if rank % local == 0 else []
    less, more = (exchange_seconds(device, peers, count) for count in (largest // GROWTH, largest))
    alone = _rate(largest, less, more)
    say(f"between nodes, one rank of each alone: {alone / 1e9:.4g} GB/s")
    # all ranks of a node together get one link's rate, or each its own: halfway in the logarithm
    # decides
    shared = local == 1 or alone / together > local**0.5
    how = f"{local} ranks of a node at once, each to its like"
    # The link's own rate: of ranks that meet some wait longer, and processors may bound ranks with
    # a link each.
    rate = max(alone, together * local if shared else 0.0)
    return {
        "between_gb_per_s": (rate / 1e9, f"one rank alone, or {how}"),
        "between_latency_us": (1e6 * latency, how),
        "between_link": (
            "node" if shared else "rank",
            f"one rank alone is {alone / together:.2g} times as fast",
        ),
    }


def _overlaps(device: torch.device, work: AttentionShape, local: int) -> Figures:
    """Measure what goes on at once of computing and of an exchange about as long, posted before it
    or waited for.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    peers = [(rank + step * (local if size > local else 1)) % size for step in (1, -1)]
    attend, _ = _alone(device, work)
    times = max(1, round(LONG_ENOUGH / slowest(attend, device.type, PROBES)))

    def compute() -> None:
        for _ in range(times):
            attend()

    busy, count = slowest(compute, device.type, 3 * PROBES, mean), FIRST_BYTES
    while (sent := exchange_seconds(device, peers, count)) < busy and count < MOST_BYTES:
        count = min(MOST_BYTES, int(count * min(GROWTH, max(2.0, busy / sent))))
    post, first = posting(device, peers[:1], peers[1:], count), rank - rank % local
    near = sorted(
        {first + (rank + step) % local for step in (1, -1)} - {rank}
    )  # neighbours wait for each other
    meet = posting(device, near, near, 1) if near else None

    def posted() -> None:
        wait = post()
        compute()
        wait()

    def waited() -> None:
        post()()
        compute()
        if meet is not None:
            meet()()

    figures: Figures = {}
    for name, step, how in (
        ("posted_overlap", posted, "posted before it"),
        ("shared_overlap", waited, "waited for"),
    ):
        together = slowest(step, device.type, 3 * PROBES, mean)
        share = min(1.0, max(0.0, (busy + sent - together) / min(busy, sent)))
        about = f"an exchange of {1e3 * sent:.3g} ms {how}, with {1e3 * busy:.3g} ms of computing"
        say(f"{about}: {1e3 * together:.4g} ms")
        figures[name] = share, about
    return figures


def _link(name: str, device: torch.device, peers: list[int]) -> tuple[float, float, int]:
    """Return a link's latency in seconds, its rate in bytes per second and the largest message, by
    growing sizes.
    """
    size, latency, before = FIRST_BYTES, 0.0, 0.0
    while True:
        seconds = exchange_seconds(device, peers, size)
        say(f"{name}, {size} bytes: {1e6 * seconds:.4g} us")
        latency = latency or seconds
        if size > FIRST_BYTES and (seconds - latency > LONG_ENOUGH or size * GROWTH > MOST_BYTES):
            return latency, _rate(size, before, seconds), size
        size, before = size * GROWTH, seconds


def _rate(size: int, less: float, more: float) -> float:
    """Return the bytes per second of a size and of the one before it, whose latencies are alike.

    Most of the time of so large a message is its bytes': where less than half is left, the smaller
    one was disturbed.
    """
    return (size - size // GROWTH) / max(more - less, more / 2, 1e-9)


def checked(args: argparse.Namespace) -> Cluster | None:
    """Return the cluster of --links. Raises UserError: it cannot be read, or the output exists or
    cannot be written.
    """
    refuse_folder("--out", args.out)
    if args.out.exists() and not args.force:
        raise UserError(
            f"--out is {args.out}, which exists; give --force to replace it, or another --out"
        )
    if why := unwritable(args.out.parent, "give another --out"):
        raise UserError(f"--out is {args.out}, in {args.out.parent}, {why}")
    return load_cluster(args.links) if args.links else None


def text_of(
    name: str, device: str, figures: Figures, links: Cluster | None, about: list[str]
) -> str:
    """Return a cluster file's text: ``about`` as comments, then a line for each figure, or its name
    as missing.
    """
    lines = [*(f"# {line}" for line in about), ""]
    values: Figures = {"name": (name, ""), "device": (device, ""), **figures}
    for entry in fields(Cluster):
        value, how = values.get(entry.name, (None, ""))
        if value is None and links is not None and entry.name in ABOUT_LINKS:
            value, how = (
                getattr(links, entry.name),
                f"not measured: of {' '.join(links.name.split())}",
            )
        if value is not None:
            written = f"{value:.4g}" if isinstance(value, float) else json.dumps(value)
            lines.append(f"{entry.name} = {written}" + (f"  # {how}" if how else ""))
        elif entry.default is MISSING:
            lines.append(
                f"# {entry.name} is missing: not measured by the processes started; add it"
            )
    return "\n".join(lines) + "\n"


def calibrate(argv: list[str]) -> None:
    """Measure and write. Raises UserError: bad flags, or what cannot be measured."""
    parser = parser_for("python -m tools.calibrate", __doc__)
    add = parser.add_argument
    add(
        "--out",
        type=Path,
        default=Path("cluster.toml"),
        metavar="FILE",
        help="to write (default: %(default)s)",
    )
    add("--force", action="store_true", help="replace FILE")
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="default: cuda where there is one",
    )
    add("--name", help="a few words for the planner's output (default: processes and device)")
    add(
        "--links",
        type=Path,
        metavar="FILE",
        help="cluster file with the links that cannot be measured here",
    )
    add("--num-heads", type=positive, metavar="N", help="query heads")
    add("--head-dim", type=positive, metavar="N", help="width of a head")
    add("--batch", type=positive, default=1, metavar="N", help="sequences (default: %(default)s)")
    add(
        "--ceilings",
        action="store_true",
        help="measure what one device can do at most, and write no cluster file",
    )
    add("--json", type=Path, metavar="PATH", help="write the ceilings here too, as JSON lines")
    add(
        "--lengths",
        type=positive,
        nargs="+",
        metavar="N",
        help="tokens of a process, at which to measure attention",
    )
    args = parser.parse_args(argv)
    if args.ceilings:
        ceilings = print_ceilings(args.device)
        if args.json:
            write_records(args.json, ceilings)
        return
    torch.set_num_threads(1)
    with distributed_mesh(MeshConfig(device=args.device)) as mesh:
        device, world_size = mesh.device, mesh.dp.size()
        links = from_first(lambda: checked(args))
        heads, width = args.num_heads or HEADS[device.type], args.head_dim or WIDTHS[device.type]
        dtype = "float32" if device.type == "cpu" else "bfloat16"
        work = AttentionShape(
            batch=args.batch, num_heads=heads, kv_heads=heads, head_dim=width, dtype=dtype
        )
        lengths = tuple(sorted(args.lengths or LENGTHS[device.type]))
        figures = measure(device, work, lengths)
        if not is_first():
            return
        machine = describe(device.type)
        name = args.name or f"{world_size} x {machine['device']}"
        about = [
            f"Measured by python -m tools.calibrate on {socket.gethostname()}: {in_words(machine)}.",
            f"{counted(world_size, 'process')} at once.",
        ]
        text = text_of(name, device.type, figures, links, about)
        write_text(args.out, text)
        print(f"written: {args.out}")
        if missing := [key for key in ABOUT_LINKS if f"# {key} is missing" in text]:
            print(f"not measured, and missing there: {', '.join(missing)}")
            print(
                "start it on two nodes, with two processes on each, or take what is missing from --links FILE"
            )


if __name__ == "__main__":
    run_entry(calibrate)
