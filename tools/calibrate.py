r"""Measure the devices at hand, and the links between the processes started, and write a cluster file for the planner.

python -m tools.calibrate --out laptop.toml --links configs/clusters/cpu.toml      # alone: links as in that file
torchrun --nproc-per-node 4 -m tools.calibrate --out laptop.toml --links configs/clusters/cpu.toml
srun --nodes 2 --ntasks-per-node 8 python -m tools.calibrate --out pod.toml --name "our pod"
python -m tools.plan --config configs/models/llama_tiny.toml --cluster laptop.toml --context-parallel-size 4 \
    --vocab-size 8192
python -m tools.calibrate --ceilings               # copies and matrix products on all cores; no file

Links inside nodes need two processes on each, links between nodes two nodes. What was not measured, and is not taken
from --links, stands in the file as a comment, and the planner names it. On a CPU every process has one thread.

All ranks measure at once, since those of a node may share cores, memory and adapters; of what each finds the median
counts. What is short counts by its mean: ranks that share a core wait for it now and then, for longer than that.
"""

import argparse
import json
import os
import socket
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from functools import partial
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
from tools.common.arguments import parser_for, positive
from tools.common.ceilings import (
    FIRST_BYTES,
    FIRST_PROBES,
    PROBES,
    copy_bandwidth,
    exchange_seconds,
    posting,
    print_ceilings,
    product_times,
    slowest,
)
from tools.common.loopback import LoopbackTransport, step_of
from tools.common.report import write_records
from tools.common.shapes import DTYPES, AttentionShape
from train.run import run_entry
from train.watching import say
from train.watching.progress import peak_flops

Figures = dict[str, tuple[Any, str]]
"""Value, and how it was measured, by key of a cluster file."""
LENGTHS = {"cpu": (256, 512, 1024, 2048), "cuda": (2048, 4096, 8192, 16384)}
HEADS, WIDTHS = {"cpu": 8, "cuda": 32}, {"cpu": 64, "cuda": 128}
FFN = 4
"""Widths of a layer's feed-forward."""
REPEATS = 3
TINY, TILES = 4, 8
"""Positions of a tile whose computing is nothing beside its launch, and tiles of the rank that has most."""
GROWTH, MOST_BYTES = 4, 1 << 28
LONG_ENOUGH = 0.05
"""Seconds of an exchange's bytes after which no larger message is tried: one that waits longer than TCP's least
timeout, 0.2 s, behind what its sender has posted is sent again for nothing."""
HOST_BYTES = 1 << 28
ABOUT_LINKS = [entry.name for entry in fields(Cluster) if entry.name.startswith(("inside_", "between_"))]


def measure(device: torch.device, work: AttentionShape, lengths: tuple[int, ...]) -> Figures:
    """Return every figure that can be measured here, with a line for each measurement. Collective.

    Args:
        work: heads and batch of the model at hand, and the dtype; its width is that of all heads together.
        lengths: positions of a rank, at which attention is measured; the longest gives its rate.

    Raises UserError: nodes have unequal numbers of processes, or no attention kernel runs here.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    if len(set(gather_results(lambda: local))) > 1 or dist.get_world_size() % local:
        raise UserError("nodes have unequal numbers of processes (LOCAL_WORLD_SIZE); start as many on each")
    figures = _rates(device, work, lengths)
    alone = dist.get_world_size() == 1
    there = len(usable_cores()) if device.type == "cpu" else torch.cuda.device_count()
    figures["gpus_per_node"] = (there, "those here") if alone else (local, "processes started on each node")
    figures |= _memory(device, figures["gpus_per_node"][0])
    figures |= _links(device, local)
    return figures if alone else figures | _overlaps(device, replace(work, seq_length=lengths[-1]), local)


def _rates(device: torch.device, work: AttentionShape, lengths: tuple[int, ...]) -> Figures:
    """Measure matrix products and attention."""
    dtype, width, rows = DTYPES[work.dtype], work.num_heads * work.head_dim, lengths[-1] * work.batch
    peak = _middle(lambda: peak_flops(device, dtype)) / 1e12
    say(f"peak: {peak:.4g} TFLOP/s, {work.dtype}")
    shapes = ((rows, width, width), (rows, width, FFN * width), (rows, FFN * width, width), (width, rows, FFN * width))
    seconds = 0.0
    for a, b, c in shapes:
        product = partial(product_times, device.type, dtype, a, b, c, FIRST_PROBES)
        taken = _middle(lambda product=product: mean(product()))  # type: ignore[misc]
        say(f"product of {a} x {b} and {b} x {c}: {2 * a * b * c / taken / 1e12:.4g} TFLOP/s")
        seconds += taken
    products = sum(2 * a * b * c for a, b, c in shapes) / seconds / 1e12
    tiles = [replace(work, seq_length=length) for length in lengths]
    whole = [_attention(device, tile, False) for tile in tiles][-1]
    attention = tiles[-1].flops(lengths[-1] ** 2) / whole / 1e12
    visible = tiles[-1].pairs / lengths[-1] ** 2
    computed = _attention(device, tiles[-1], True) / whole
    masked = min(1.0, max(0.0, (computed - visible) / (1 - visible))) if visible < 1 else 0.0
    launch = max(0.0, _middle(lambda: _launch(device, work, 1e12 * attention)))
    say(f"launch and merge of a tile: {1e6 * launch:.4g} us")
    peak = max(peak, products, attention)
    return {
        "peak_tflops": (peak, f"{work.dtype}: a GPU's data sheet, else the best product or kernel measured"),
        "matmul_fraction": (products / peak, f"a layer of width {width}, {rows} rows"),
        "attention_fraction": (attention / peak, f"forward and backward, {lengths[-1]} positions of a whole tile"),
        "masked_share": (masked, f"a causal tile of {lengths[-1]} positions beside a whole one"),
        "launch_us": (1e6 * launch, f"{TILES} tiles of {TINY} positions, forward and backward"),
    }


def _middle(measured: Callable[[], float]) -> float:
    """Return the median over ranks of what all of them measure at once."""
    dist.barrier()
    return median(gather_results(measured))


def _alone(
    device: torch.device, work: AttentionShape, size: int = 1, causal: bool = True
) -> tuple[Callable[[], None], int]:
    """Return what the last rank of a ring does forward and backward, without traffic, and its (query, key) pairs.

    The ``work`` is of each of ``size`` ranks.
    """
    plan, rank = make_plan("ring", seq_len=size * work.seq_length, size=size, causal=causal), size - 1
    executor = Executor(LoopbackTransport(plan.geometry, None, rank), "auto")
    return step_of(plan, executor, *work.tensors(device.type)), sum(step.pairs for step in plan.rounds(rank))


def _attention(device: torch.device, work: AttentionShape, causal: bool) -> float:
    """Measure what runs take for one tile, in seconds forward and backward together."""
    try:
        step, pairs = _alone(device, work, causal=causal)
        taken = _middle(lambda: mean(time_steps(step, device.type, 3 * PROBES)))
    except (RuntimeError, ValueError, NotImplementedError) as error:
        why = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        raise UserError(f"attention cannot be measured at {work.seq_length} positions: {why}") from error
    kind, rate = "a causal tile" if causal else "a whole tile", work.flops(pairs) / taken / 1e12
    say(f"attention, {kind} of {work.seq_length} positions: {rate:.4g} TFLOP/s forward and backward")
    return taken


def _launch(device: torch.device, work: AttentionShape, rate: float) -> float:
    """Measure the seconds of a tile besides its computing, by the executor, without traffic."""
    step, pairs = _alone(device, replace(work, seq_length=TINY), TILES)  # the last rank attends in every round
    taken = median(time_steps(step, device.type, 3 * REPEATS))
    return (taken - work.flops(pairs) / rate) / (2 * TILES)


def _memory(device: torch.device, sharing: int) -> Figures:
    """Return a processor's memory and, of a GPU, the host's and the rate of copies to it and back."""
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / sharing / 1e9
    if device.type == "cpu":
        say(f"memory: {host:.4g} GB a process")
        return {"memory_gb": (host, "the machine's, shared by its processes")}
    own = torch.cuda.mem_get_info(device)[1] / 1e9
    where: list[dict[str, Any]] = [{"pin_memory": True}, {"device": device}]
    kept, there = (torch.empty(HOST_BYTES, dtype=torch.uint8, **one) for one in where)

    def copies() -> float:
        both = ((kept, there), (there, kept))
        return max(median(time_steps(lambda a=a, b=b: a.copy_(b), "cuda", PROBES)) for a, b in both)  # type: ignore[misc]

    rate = HOST_BYTES / _middle(copies) / 1e9
    say(f"copies to host memory and back: {rate:.4g} GB/s, the slower way; memory: {own:.4g} GB, host {host:.4g} GB")
    return {
        "memory_gb": (own, "the GPU's"),
        "host_gb_per_s": (rate, "pinned memory, the slower way"),
        "host_memory_gb": (host, "the machine's, shared by its GPUs"),
    }


def _links(device: torch.device, local: int) -> Figures:
    """Measure the links inside nodes and between them, where there are several ranks and nodes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    first, own = rank - rank % local, rank % local
    found: Figures = {}
    if local > 1:
        ring = [first + (own + step) % local for step in (1, -1)]
        latency, rate, _ = _link("inside a node", device, ring)
        how = f"{local} ranks of a node at once, each to the next"
        found |= {"inside_gb_per_s": (rate / 1e9, how), "inside_latency_us": (1e6 * latency, how)}
    if size > local:
        across = [(rank + step * local) % size for step in (1, -1)]
        latency, together, largest = _link("between nodes", device, across)
        own_peers = across if own == 0 else []
        less, more = (exchange_seconds(device, own_peers, count) for count in (largest // GROWTH, largest))
        alone = _rate(largest, less, more)
        say(f"between nodes, one rank of each alone: {alone / 1e9:.4g} GB/s")
        # all ranks of a node together get one link's rate, or each its own: halfway in the logarithm decides
        shared = local == 1 or alone / together > local**0.5
        how = f"{local} ranks of a node at once, each to its like"
        # The link's own rate: of ranks that meet some wait longer, and processors may bound ranks with a link each.
        found["between_gb_per_s"] = max(alone, together * local if shared else 0.0) / 1e9, f"one rank alone, or {how}"
        found["between_latency_us"] = 1e6 * latency, how
        found["between_link"] = "node" if shared else "rank", f"one rank alone is {alone / together:.2g} times as fast"
    return found


def _overlaps(device: torch.device, work: AttentionShape, local: int) -> Figures:
    """Measure what goes on at once of computing and of an exchange about as long, posted before it or waited for."""
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
    near = sorted({first + (rank + step) % local for step in (1, -1)} - {rank})  # neighbours wait for each other
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

    found: Figures = {}
    for name, step, how in (("posted_overlap", posted, "posted before it"), ("shared_overlap", waited, "waited for")):
        together = slowest(step, device.type, 3 * PROBES, mean)
        share = min(1.0, max(0.0, (busy + sent - together) / min(busy, sent)))
        say(f"computing {1e3 * busy:.4g} ms, an exchange {1e3 * sent:.4g} ms, {how}: {1e3 * together:.4g} ms")
        found[name] = share, f"an exchange of {1e3 * sent:.3g} ms {how}, with {1e3 * busy:.3g} ms of computing"
    return found


def _link(name: str, device: torch.device, peers: list[int]) -> tuple[float, float, int]:
    """Return a link's latency in seconds, its rate in bytes per second and the largest message, by growing sizes."""
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

    Most of the time of so large a message is its bytes': where less than half is left, the smaller one was disturbed.
    """
    return (size - size // GROWTH) / max(more - less, more / 2, 1e-9)


def checked(args: argparse.Namespace) -> Cluster | None:
    """Return the cluster of --links. Raises UserError: it cannot be read, or the output exists or cannot be written."""
    folder = args.out.parent
    if not folder.is_dir():
        raise UserError(f"--out is {args.out}, and there is no folder {folder}; make it, or give another --out")
    if args.out.is_dir() or (args.out.exists() and not args.force):
        fix = "give a file" if args.out.is_dir() else "give --force to replace it, or another --out"
        raise UserError(f"--out is {args.out}, which exists; {fix}")
    if why := unwritable(folder, "give another --out"):
        raise UserError(f"--out is {args.out}, in {folder}, {why}")
    return load_cluster(args.links) if args.links else None


def text_of(name: str, device: str, figures: Figures, links: Cluster | None, about: list[str]) -> str:
    """Return a cluster file's text: ``about`` as comments, then a line for each figure, or its name as missing."""
    lines = [*(f"# {line}" for line in about), ""]
    known: Figures = {"name": (name, ""), "device": (device, ""), **figures}
    for entry in fields(Cluster):
        value, said = known.get(entry.name, (None, ""))
        if value is None and links is not None and entry.name in ABOUT_LINKS:
            value, said = getattr(links, entry.name), f"not measured: of {' '.join(links.name.split())}"
        if value is not None:
            written = f"{value:.4g}" if isinstance(value, float) else json.dumps(value)
            lines.append(f"{entry.name} = {written}" + (f"  # {said}" if said else ""))
        elif entry.default is MISSING:
            lines.append(f"# {entry.name} is missing: not measured by the processes started; add it")
    return "\n".join(lines) + "\n"


def calibrate(argv: list[str]) -> None:
    """Measure and write. Raises UserError: bad flags, or what cannot be measured."""
    parser = parser_for("python -m tools.calibrate", __doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path("cluster.toml"), metavar="FILE", help="to write (default: %(default)s)")
    add("--force", action="store_true", help="replace FILE")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda where there is one")
    add("--name", help="a few words for the planner's output (default: processes and device)")
    add("--links", type=Path, metavar="FILE", help="cluster file with the links that cannot be measured here")
    add("--num-heads", type=positive, metavar="N", help="query heads")
    add("--head-dim", type=positive, metavar="N", help="width of a head")
    add("--batch", type=positive, default=1, metavar="N", help="sequences (default: %(default)s)")
    add("--ceilings", action="store_true", help="measure what one device can do at most, and write no cluster file")
    add("--json", type=Path, metavar="PATH", help="write the ceilings here too, as JSON lines")
    add("--lengths", type=positive, nargs="+", metavar="N", help="tokens of a process, at which to measure attention")
    args = parser.parse_args(argv)
    if args.ceilings:
        found = print_ceilings(args.device)
        if args.json:
            write_records(args.json, found)
        return
    torch.set_num_threads(1)
    with distributed_mesh(MeshConfig(device=args.device)) as mesh:
        device, world_size = mesh.device, mesh.dp.size()
        links = from_first(lambda: checked(args))
        heads, width = args.num_heads or HEADS[device.type], args.head_dim or WIDTHS[device.type]
        dtype = "float32" if device.type == "cpu" else "bfloat16"
        work = AttentionShape(batch=args.batch, num_heads=heads, kv_heads=heads, head_dim=width, dtype=dtype)
        lengths = tuple(sorted(args.lengths or LENGTHS[device.type]))
        figures = measure(device, work, lengths)
        if not is_first():
            return
        copies = copy_bandwidth(device.type)
        say(f"copies inside the memory: {copies:.4g} GB/s read and written")
        machine = describe(device.type)
        name, started = args.name or f"{world_size} x {machine['device']}", counted(world_size, "process")
        about = [
            f"Measured by python -m tools.calibrate on {socket.gethostname()}: {in_words(machine)}.",
            f"{started}; copies inside the memory {copies:.4g} GB/s, which the planner does not count.",
        ]
        text = text_of(name, device.type, figures, links, about)
        write_text(args.out, text)
        missing = [key for key in ABOUT_LINKS if f"# {key} is missing" in text]
        print(f"written: {args.out}")
        if missing:
            print(f"not measured, and missing there: {', '.join(missing)}")
            print("start it on two nodes, with two processes on each, or take what is missing from --links FILE")


if __name__ == "__main__":
    run_entry(calibrate)
