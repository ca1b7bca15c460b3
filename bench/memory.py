"""Measure what each recompute policy costs in memory: one step of a LLaMA on one long sequence, forward and backward.

Every policy runs in a fresh process. "peak" is the most that torch's allocator had handed out during the step beyond
what weights and gradients take, and "kept" what it had handed out when the forward was over. On CUDA the allocator
tells (max_memory_allocated); on the CPU every allocation and release is added up, as torch.profiler records them, and
what is left at the end must be nothing. "resident" is a second witness on Linux: the highest resident set that the
kernel counted (VmHWM), with malloc told to give back every block of 64 KiB or more.

    python -m bench.memory                          # sequence 8192, 4 layers of 256
    python -m bench.memory --json bench/results/memory-NAME.jsonl
    python -m bench.memory --device cuda            # with offload too; sequence 65536, 8 layers of 1024, bfloat16
"""

import math
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from bench.errors import MeasureError
from bench.rounds import add_json, keep, need_cuda
from model.config import ModelConfig
from model.llama import Llama
from parallel.context import context_parallel
from parallel.recompute import ATTENTION, RecomputeConfig, recompute_layers
from runtime.machine import describe
from tools.arguments import one_line_errors, parser_for, positive, run_command
from train.objectives.language import NextToken

Granularity = Literal["none", "selective", "attention_boundary", "full"]
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # larger blocks go back to the system when they are freed


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is trained for one step."""

    seq_length: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    chunk_size: int
    """Tokens per chunk, of the loss and of the feed-forward layers."""
    device: str


DEFAULTS: dict[str, dict[str, int]] = {
    "cpu": {"seq_length": 8192, "num_layers": 4, "hidden_size": 256, "vocab_size": 8192, "chunk_size": 1024},
    "cuda": {"seq_length": 65536, "num_layers": 8, "hidden_size": 1024, "vocab_size": 32768, "chunk_size": 4096},
}


def cases(shape: Shape) -> dict[str, RecomputeConfig]:
    """Return the policies to compare, alone and with chunks."""
    size, found = shape.chunk_size, {"none": RecomputeConfig()}
    for name in get_args(Granularity):
        found[f"{name}, loss in chunks"] = RecomputeConfig(recompute_granularity=name, loss_chunk_size=size)
        if name != "selective":
            both = RecomputeConfig(recompute_granularity=name, loss_chunk_size=size, ffn_chunk_size=size)
            found[f"{name}, loss and FFN in chunks"] = both
            if shape.device == "cuda" and name != "none":
                found[f"{name}, both in chunks, offload"] = replace(both, recompute_offload=True)
    return found


def measure(shape: Shape, chosen: RecomputeConfig) -> dict[str, Any]:
    """Measure one step in this process, a fresh one: bytes, seconds, attention forwards per layer, loss.

    Raises MeasureError: the recorded allocations do not add up to zero, or the loss is not finite.
    """
    tiny = Shape(**{**asdict(shape), "seq_length": min(shape.seq_length, 512), "num_layers": 1, "chunk_size": 32})
    for part in _step(tiny, chosen):  # what a process's first step loads and keeps is not the policy's
        part()
    forward, backward = _step(shape, chosen)
    watch = _watch_cuda if shape.device == "cuda" else _watch_cpu
    with watch() as found:
        found["after"](forward)
        found["kept"] = found["now"]
        with Attentions() as again:
            found["after"](backward)
    if found["now"] or not math.isfinite(found["result"]):
        raise MeasureError(f"{found['now']} bytes were left after the step, and its loss was {found['result']}")
    numbers = {name: found[name] for name in ("peak", "kept", "resident", "seconds")}
    return {**numbers, "attention_forwards": 1 + again.count / shape.num_layers, "loss": found["result"]}


class Attentions(TorchDispatchMode):
    """Count the attention forwards."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.name() in ATTENTION
        return func(*args, **(kwargs or {}))


def _step(shape: Shape, chosen: RecomputeConfig) -> tuple[Callable[[], None], Callable[[], float]]:
    """Return the forward and backward of a step, with gradients allocated; the backward returns the loss."""
    device = torch.device(shape.device)
    cp = context_parallel("ring", seq_len=shape.seq_length)
    heads = max(1, shape.hidden_size // 64)
    sizes: dict[str, Any] = {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
    }
    model = Llama(ModelConfig(**sizes, num_attention_heads=heads), cp.attend)
    model.init_weights(0)
    recompute_layers(model.layers, chosen)
    model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    objective = NextToken(cp, device, chosen.loss_chunk_size)
    tokens = torch.randint(shape.vocab_size, (1, shape.seq_length), generator=torch.Generator().manual_seed(0))
    local = objective.local({"tokens": tokens, "labels": tokens.roll(-1)})
    losses: list[Tensor] = []

    def forward() -> None:
        losses.append(objective.loss_sum(model, local) / shape.seq_length)

    def backward() -> float:
        losses[0].backward()
        return losses.pop().item()

    return forward, backward


@contextmanager
def _watch_cuda() -> Iterator[dict[str, Any]]:
    """Run parts of a step by ``found["after"](part)``: ``now`` is what they left allocated, ``peak`` the maximum."""
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found: dict[str, Any] = {"resident": None, "seconds": 0.0}

    def after(part: Callable[[], Any]) -> None:
        begun = time.perf_counter()
        found["result"] = part()
        torch.cuda.synchronize()
        found["seconds"] += time.perf_counter() - begun
        found["now"] = torch.cuda.memory_allocated() - start
        found["peak"] = torch.cuda.max_memory_allocated() - start

    found["after"] = after
    yield found


@contextmanager
def _watch_cpu() -> Iterator[dict[str, Any]]:
    """As ``_watch_cuda``; seconds are user-mode CPU time, which page faults and other load disturb least."""
    found: dict[str, Any] = {"now": 0, "peak": 0, "seconds": 0.0, "resident": None}
    resident = status("VmRSS")
    if resident is not None:
        CLEAR.write_text("5")  # resets VmHWM

    def after(part: Callable[[], Any]) -> None:
        with _no_messages(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            begun = resource.getrusage(resource.RUSAGE_SELF).ru_utime
            found["result"] = part()
            found["seconds"] += resource.getrusage(resource.RUSAGE_SELF).ru_utime - begun
            # Before the profiler makes its own tables.
            found["resident"] = (status("VmHWM") or 0) - resident if resident is not None else None
        for allocated in allocations(recorded):
            found["now"] += allocated
            found["peak"] = max(found["peak"], found["now"])

    found["after"] = after
    yield found


def allocations(recorded: Any) -> Iterator[int]:
    """Yield the bytes of each allocation, and of each release below 0, in a profile with memory, in their order."""
    events = recorded.profiler.kineto_results.events()
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda one: one.start_ns()):
        yield event.nbytes()


@contextmanager
def _no_messages() -> Iterator[None]:
    """Discard what the profiler's library writes to stderr, whatever its settings."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def status(field: str) -> int | None:
    """Return a field of /proc/self/status in bytes; None where there is none."""
    if not (STATUS.exists() and CLEAR.exists()):
        return None
    found = re.search(rf"^{field}:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def run(shape: Shape) -> dict[str, Any]:
    """Measure every case, each in a process of its own.

    Raises MeasureError: a policy changed the loss by more than rounding.
    """
    os.environ.update(ENVIRONMENT)
    results = {}
    for name, chosen in cases(shape).items():
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
            results[name] = fresh.submit(measure, shape, chosen).result()
        if abs(results[name]["loss"] - results["none"]["loss"]) > 1e-5 * results["none"]["loss"]:
            raise MeasureError(f"{name}: the loss is {results[name]['loss']}, not {results['none']['loss']}")
        print(row(name, results[name], results["none"]["peak"]), flush=True)
    return {
        "benchmark": "memory of one step, forward + backward",
        "machine": describe(shape.device),
        "shape": asdict(shape),
        "cases": results,
    }


HEADER = f"{'MiB':42}{'peak':>9}{'of none':>9}{'kept':>9}{'resident':>10}{'s':>8}{'attention':>11}"


def row(name: str, found: dict[str, Any], most: int) -> str:
    """Format one line of the table; ``attention`` is forwards per layer and step."""
    resident = "" if found["resident"] is None else f"{found['resident'] / 2**20:.1f}"
    return (
        f"{name:42}{found['peak'] / 2**20:9.1f}{found['peak'] / most:9.1%}{found['kept'] / 2**20:9.1f}{resident:>10}"
        f"{found['seconds']:8.2f}{found['attention_forwards']:11.0f}"
    )


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = parser_for("python -m bench.memory", __doc__)
    parser.add_argument("--device", choices=tuple(DEFAULTS), default="cpu", help="default: %(default)s")
    for name in DEFAULTS["cpu"]:
        on_cpu, on_cuda = (DEFAULTS[device][name] for device in ("cpu", "cuda"))
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive, help=f"default: {on_cpu}; on cuda {on_cuda}")
    add_json(parser)
    args = parser.parse_args(argv)
    need_cuda(args.device)
    sizes = {name: vars(args)[name] or default for name, default in DEFAULTS[args.device].items()}
    shape = Shape(**sizes, device=args.device)
    asked = ", ".join(f"{name} {size}" for name, size in sizes.items())
    print(f"{args.device}, torch {torch.__version__}: {asked}\n{HEADER}")
    keep(args, run(shape))


if __name__ == "__main__":
    run_command(main)
