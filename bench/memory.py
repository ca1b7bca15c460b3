"""Compare predicted and measured memory of a training step, for every kind of model.

The measured bytes are those of weights and optimizer before the second step, plus the peak of the
step's allocations: on the CPU from every allocation and release that torch.profiler records, on a
GPU from torch's allocator (max_memory_allocated). With several processes, the one that uses the
most counts. The prediction comes from ``planner.rehearsal``, which starts no process. "kept" is the
memory beyond weights and optimizer at the end of the forward pass. `make cuda-stub` does the same
for GPUs that this machine does not have.

    # 21 models and meshes, on 1, 4 and 8 gloo processes
    python -m bench.memory
    # recomputation policies, on 8192 tokens and 4 layers of 256 channels
    python -m bench.memory --policies
    # also with offload, in bfloat16
    python -m bench.memory --policies --device cuda
    # flags after -- are added to every case
    python -m bench.memory --only dit -- --hidden-size 64
"""

import os
import statistics
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from bench.harness import MeasureError, add_json, as_measure_errors, need_cuda, write_json
from parallel.mesh import distributed_mesh
from parallel.recompute import ATTENTION
from planner.rehearsal import rehearse
from runtime.errors import UserError
from runtime.machine import describe
from runtime.ranks import run_ranks
from tools.common.arguments import one_line_errors, parser_for, run_command
from tools.common.cases import case_of
from tools.common.report import Column, Table
from tools.fit import parsed
from train.ema import Ema
from train.optimizers.config import build_optimizer
from train.tasks.registry import task_of

LISTED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
MODELS: dict[str, str] = LISTED["models"]
CASES: str = LISTED["cases"]
POLICIES: str = LISTED["policies"]
OFFLOAD: str = LISTED["offload"]
COLUMNS: dict[str, Column] = {
    "case": "{name}",
    "processes": "{processes}",
    "predicted MB": lambda row: f"{row['predicted_bytes'] / 1e6:.2f}",
    "measured": lambda row: f"{row['measured_bytes'] / 1e6:.2f}",
    "error": "{error:+.1%}",
    "kept": lambda row: row["kept_bytes"] and f"{row['kept_bytes'] / 1e6:.2f}",
    "attention forwards": "{attention_forwards:.0f}",
    "s": "{seconds:.2f}",
}
FORWARD_END = "end of the forward"
"""Name of the event that marks the end of a forward pass in a profile."""
STEPS = 3
"""Number of measured steps; the one with the lowest peak counts."""


class Attentions(TorchDispatchMode):
    """Counts attention's forward passes, including those that a backward pass repeats."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name in ATTENTION and name.endswith(("attention", "_cpu")):
            self.count += 1
        return func(*args, **(kwargs or {}))


def lines_of(text: str, only: str = "") -> list[str]:
    """Return the lines of a list of cases that contain ``only``. Raises UserError if none does."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    chosen = [line for line in lines if only in line]
    if not chosen:
        raise UserError(
            f"--only is {only!r}, but no case has that in its name; the cases are: "
            f"{'; '.join(lines)}"
        )
    return chosen


def command(line: str, models: Mapping[str, str] = MODELS) -> tuple[int, str]:
    """Return the number of processes and the flags of a case, whose first word names a model.

    Raises UserError if there is no such model, or as ``case_of`` does.
    """
    model, _, words = line.partition(" ")
    if model not in models:
        raise UserError(
            f"{line!r} begins with {model!r}, but that is not a model; use one of "
            f"{', '.join(models)}"
        )
    case = case_of(words)
    return case.ranks, " ".join([models[model], *case.flags])


def configured(flags: str) -> tuple[Any, Any]:
    """Return a case's configuration, and the class of its training task."""
    config = parsed(flags.split())
    return config, task_of(config)


def measured(rank: int, world_size: int, flags: str) -> dict[str, Any]:
    """Measure this rank's memory in real steps: at the peak, and after the forward pass.

    A first step, which allocates the optimizer's state, is not measured. Collective.
    """
    config, make_task = configured(flags)
    with distributed_mesh(config.mesh) as mesh:
        task = make_task(config, mesh)
        objective = task.objective
        parts = task.build_parts()
        optimizer = build_optimizer(config.optimizer, *parts, mesh=mesh)
        averages = Ema(config.ema_decay, parts).weights.values() if config.ema_decay else ()
        on_gpu = mesh.device.type == "cuda"
        watch = watch_cuda if on_gpu else watch_cpu
        unmarked_loss_sum = objective.loss_sum
        marks: list[int] = []

        def loss_sum(*arguments: Any) -> Any:
            total = unmarked_loss_sum(*arguments)
            marks.append(torch.cuda.memory_allocated() if on_gpu else 0)
            with record_function(FORWARD_END):
                return total

        objective.loss_sum = loss_sum
        runner = task.build_runner(parts)
        stages = config.mesh.pipeline_model_parallel_size
        size = config.train.micro_batch_size
        count = config.train.micro_batches(mesh.dp.size())
        batches = [objective.local(objective.blank(size)) for _ in range(count)]
        with Attentions() as attentions:
            runner.forward_backward(batches, 1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        tensors: list[Any] = [*averages]
        for part in parts:
            tensors += part.parameters()
        for state in optimizer.state.values():
            tensors += state.values()
        permanent_bytes = 0
        for x in tensors:
            local = x.to_local() if hasattr(x, "to_local") else x
            permanent_bytes += local.nbytes

        steps = []
        for _ in range(STEPS):
            marks.clear()
            steps.append(watch(lambda: runner.forward_backward(batches, 1), marks))
            optimizer.zero_grad(set_to_none=True)
    # gloo's workers release a tensor some time after it is sent, so steps differ.
    lowest = min(steps, key=lambda step: step["peak"])
    return {
        "bytes": permanent_bytes + lowest["peak"],
        "kept": lowest["kept"],
        "seconds": min(step["seconds"] for step in steps),
        "attention_forwards": attentions.count / count / config.model.num_layers * stages,
    }


def watch_cpu(step: Callable[[], object], marks: list[int]) -> dict[str, Any]:
    """Run a step and add up its allocations and releases.

    Returns ``peak``, ``kept`` (the maximum at the ends of forward passes) and ``seconds``; memory
    is in bytes, beyond what was allocated before the step.
    """
    with (
        _no_messages(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded,
    ):
        start = time.perf_counter()
        step()
        seconds = time.perf_counter() - start
    total = 0
    peak = 0
    after_forward = []
    for name, allocated in events(recorded):
        total += allocated
        peak = max(peak, total)
        if name == FORWARD_END:
            after_forward.append(total)
    return {"peak": peak, "kept": max(after_forward, default=None), "seconds": seconds}


def watch_cuda(step: Callable[[], object], marks: list[int]) -> dict[str, Any]:
    """Measure a step as ``watch_cpu`` does, with torch's CUDA allocator."""
    torch.cuda.synchronize()
    bytes_before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() - bytes_before
    after_forward = max(marks) - bytes_before if marks else None
    return {"peak": peak, "kept": after_forward, "seconds": seconds}


def events(recorded: Any) -> Iterator[tuple[str, int]]:
    """Yield the name of each event of a profile, and the bytes that it allocates.

    The bytes are negative for a release, and 0 for events other than memory.
    """
    recorded_events = recorded.profiler.kineto_results.events()
    for event in sorted(recorded_events, key=lambda event: event.start_ns()):
        yield event.name(), event.nbytes() if event.name() == "[memory]" else 0


@contextmanager
def _no_messages() -> Iterator[None]:
    """Discard the messages of the profiler's library on stderr, whatever its settings."""
    sys.stderr.flush()
    stderr = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)


def compare(processes: int, flags: str) -> dict[str, Any]:
    """Compare predicted and measured bytes of the process that uses the most.

    Raises MeasureError if a process failed.
    """
    config, task = configured(flags)
    stages = config.mesh.pipeline_model_parallel_size
    ranks = {*range(0, processes, processes // stages), processes - 1}
    rehearsals = [
        rehearse(config, task, rank, processes, per_node=processes) for rank in sorted(ranks)
    ]
    predicted = max(rehearsals, key=lambda rehearsal: rehearsal.bytes)
    with as_measure_errors():
        real = max(run_ranks(measured, processes, flags), key=lambda rank: rank["bytes"])
    return {
        "processes": processes,
        "flags": flags,
        "predicted_bytes": predicted.bytes,
        "measured_bytes": real["bytes"],
        "error": predicted.bytes / real["bytes"] - 1,
        "kept_bytes": real["kept"],
        "attention_forwards": real["attention_forwards"],
        "seconds": real["seconds"],
        "by_cause": predicted.memory,
    }


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Compare predicted and measured memory for each case, and print the errors."""
    parser = parser_for("python -m bench.memory", __doc__)
    parser.add_argument(
        "--policies", action="store_true", help="measure recompute policies on a long sequence"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s"
    )
    parser.add_argument(
        "--only", default="", help="measure only the cases whose line contains this text"
    )
    parser.add_argument(
        "more", nargs="*", metavar="FLAG", help="after --: flags to add to every case"
    )
    add_json(parser)
    args = parser.parse_args(argv)
    need_cuda(args.device)
    on_gpu = args.device == "cuda"
    listed = CASES
    if args.policies:
        listed = POLICIES + OFFLOAD if on_gpu else POLICIES
    device_flags = f" --device {args.device}"
    if on_gpu:
        device_flags += " --bf16"

    rows: dict[str, dict[str, Any]] = {}
    for line in lines_of(listed, args.only):
        processes, flags = command(line)
        if on_gpu and processes > torch.cuda.device_count():
            raise MeasureError(
                f"{line} needs {processes} GPUs, more than torch finds here; choose other cases "
                "with --only"
            )
        rows[line] = compare(processes, " ".join([flags + device_flags, *args.more]))
        print(Table(COLUMNS).line({"name": line, **rows[line]}), flush=True)

    errors = [abs(row["error"]) for row in rows.values()]
    print(
        f"{len(rows)} configurations: median {statistics.median(errors):.1%},"
        f" worst {max(errors):.1%}"
    )
    result = {
        "benchmark": "memory predicted against measured",
        "machine": describe(args.device),
        "cases": rows,
    }
    write_json(args, result)


if __name__ == "__main__":
    run_command(main)
