"""Hold predicted memory against what a training step takes: every kind of model on meshes, every
recompute policy.

Measured are the bytes of weights and optimizer before the second step, and the most that the step
allocates: on the CPU every allocation and release, as torch.profiler records them, on a GPU torch's
allocator (max_memory_allocated); of several processes counts the one that takes most. Predicted is
``planner.rehearsal``, which starts no process. "kept" is what is there beyond weights and optimizer
when the forward is over. On GPUs that are not there `make cuda-stub` does the same.

    python -m bench.memory                                   # 21 kinds and meshes, of 1, 4 and 8
    processes of gloo python -m bench.memory --policies                        # a sequence of 8192,
    4 layers of 256 python -m bench.memory --policies --device cuda          # with offload too, in
    bfloat16 python -m bench.memory --only dit -- --hidden-size 64    # flags after -- are every
    case's
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
CASES, POLICIES, OFFLOAD = (LISTED[name] for name in ("cases", "policies", "offload"))
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
OVER, STEPS = "the forward is over", 3


class Attentions(TorchDispatchMode):
    """Count the forwards of an attention, those that a backward makes again among them."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.name() in ATTENTION and func.name().endswith(("attention", "_cpu"))
        return func(*args, **(kwargs or {}))


def lines_of(text: str, only: str = "") -> list[str]:
    """Return the lines of a list of cases that contain ``only``. Raises UserError: none does."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if chosen := [line for line in lines if only in line]:
        return chosen
    raise UserError(
        f"--only is {only!r}, which no case has in its name; there are: {'; '.join(lines)}"
    )


def command(line: str, models: Mapping[str, str] = MODELS) -> tuple[int, str]:
    """Return the processes and the flags of a case whose first word names a model.

    Raises UserError: there is no such model, or as ``case_of``.
    """
    model, _, words = line.partition(" ")
    if model not in models:
        raise UserError(
            f"{line!r} begins with {model!r}, which is no model; use {', '.join(models)}"
        )
    case = case_of(words)
    return case.ranks, " ".join([models[model], *case.flags])


def configured(flags: str) -> tuple[Any, Any]:
    """Return a case's configuration, and the class of its task."""
    config = parsed(flags.split())
    return config, task_of(config)


def measured(rank: int, world_size: int, flags: str) -> dict[str, Any]:
    """Return what this rank has at the peak of a real step, the second, and after its forward;
    collective.
    """
    config, make_task = configured(flags)
    with distributed_mesh(config.mesh) as mesh:
        task = make_task(config, mesh)
        objective, parts = task.objective, task.build_parts()
        optimizer = build_optimizer(config.optimizer, *parts)
        averages = Ema(config.ema_decay, parts).weights.values() if config.ema_decay else ()
        watch = watch_cuda if mesh.device.type == "cuda" else watch_cpu
        plain, marks = objective.loss_sum, list[int]()

        def loss_sum(*given: Any) -> Any:
            total = plain(*given)
            marks.append(torch.cuda.memory_allocated() if mesh.device.type == "cuda" else 0)
            with record_function(OVER):
                return total

        objective.loss_sum = loss_sum
        runner = task.build_runner(parts)
        stages = config.mesh.pipeline_model_parallel_size
        size, count = config.train.micro_batch_size, config.train.micro_batches(mesh.dp.size())
        batches = [objective.local(objective.blank(size)) for _ in range(count)]
        with Attentions() as seen:
            runner.forward_backward(batches, 1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tensors: list[Any] = [*averages, *(p for part in parts for p in part.parameters())]
        tensors += [x for state in optimizer.state.values() for x in state.values()]
        standing = sum((x.to_local() if hasattr(x, "to_local") else x).nbytes for x in tensors)
        steps = []
        for _ in range(STEPS):
            marks.clear()
            steps.append(watch(lambda: runner.forward_backward(batches, 1), marks))
            optimizer.zero_grad(set_to_none=True)
    leanest = min(
        steps, key=lambda step: step["peak"]
    )  # gloo's workers let go of a tensor some time after it is sent
    return {
        "bytes": standing + leanest["peak"],
        "kept": leanest["kept"],
        "seconds": min(step["seconds"] for step in steps),
        "attention_forwards": seen.count / count / config.model.num_layers * stages,
    }


def watch_cpu(step: Callable[[], object], marks: list[int]) -> dict[str, Any]:
    """Add up what a step allocates and releases; return its peak and what is kept at marks."""
    with (
        _no_messages(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded,
    ):
        begun = time.perf_counter()
        step()
        seconds = time.perf_counter() - begun
    now, peak, after_forward = 0, 0, list[int]()
    for name, allocated in events(recorded):
        now += allocated
        peak = max(peak, now)
        after_forward += [now] * (name == OVER)
    return {"peak": peak, "kept": max(after_forward, default=None), "seconds": seconds}


def watch_cuda(step: Callable[[], object], marks: list[int]) -> dict[str, Any]:
    """As ``watch_cpu``, by torch's allocator."""
    torch.cuda.synchronize()
    start, begun = torch.cuda.memory_allocated(), time.perf_counter()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    peak, after_forward = (
        torch.cuda.max_memory_allocated() - start,
        max(marks) - start if marks else None,
    )
    return {"peak": peak, "kept": after_forward, "seconds": seconds}


def events(recorded: Any) -> Iterator[tuple[str, int]]:
    """Yield the name of each event of a profile with memory, and the bytes that it allocates or,
    below 0, releases.
    """
    for event in sorted(
        recorded.profiler.kineto_results.events(), key=lambda event: event.start_ns()
    ):
        yield event.name(), event.nbytes() if event.name() == "[memory]" else 0


@contextmanager
def _no_messages() -> Iterator[None]:
    """Discard what the profiler's library writes to stderr, whatever its settings."""
    sys.stderr.flush()
    plain, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(plain, 2)
        os.close(plain)
        os.close(nowhere)


def compare(processes: int, flags: str) -> dict[str, Any]:
    """Return predicted and measured bytes of the process that takes most, and the prediction's
    relative error.

    Raises MeasureError: a process failed.
    """
    config, task = configured(flags)
    stages = config.mesh.pipeline_model_parallel_size
    ranks = {*range(0, processes, processes // stages), processes - 1}
    predicted = {
        rank: rehearse(config, task, rank, processes, per_node=processes) for rank in sorted(ranks)
    }
    with as_measure_errors():
        real = max(run_ranks(measured, processes, flags), key=lambda each: each["bytes"])
    largest = max(predicted.values(), key=lambda each: each.bytes)
    return {
        "processes": processes,
        "flags": flags,
        "predicted_bytes": largest.bytes,
        "measured_bytes": real["bytes"],
        "error": largest.bytes / real["bytes"] - 1,
        "kept_bytes": real["kept"],
        "attention_forwards": real["attention_forwards"],
        "seconds": real["seconds"],
        "by_cause": largest.memory,
    }


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = parser_for("python -m bench.memory", __doc__)
    parser.add_argument(
        "--policies", action="store_true", help="the recompute policies, on one long sequence"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s"
    )
    parser.add_argument("--only", default="", help="only the cases that have this in them")
    parser.add_argument("more", nargs="*", metavar="FLAG", help="after --: flags of every case")
    add_json(parser)
    args = parser.parse_args(argv)
    need_cuda(args.device)
    listed = POLICIES + OFFLOAD * (args.device == "cuda") if args.policies else CASES
    more = f" --device {args.device}" + " --bf16" * (args.device == "cuda")
    rows: dict[str, dict[str, Any]] = {}
    for line in lines_of(listed, args.only):
        processes, flags = command(line)
        if args.device == "cuda" and processes > torch.cuda.device_count():
            raise MeasureError(f"{line} needs {processes} GPUs; choose by --only")
        rows[line] = compare(processes, " ".join([flags + more, *args.more]))
        print(Table(COLUMNS).line({"name": line, **rows[line]}), flush=True)
    errors = [abs(row["error"]) for row in rows.values()]
    print(
        f"{len(rows)} configurations: median {statistics.median(errors):.1%}, worst {max(errors):.1%}"
    )
    result = {
        "benchmark": "memory predicted against measured",
        "machine": describe(args.device),
        "cases": rows,
    }
    write_json(args, result)


if __name__ == "__main__":
    run_command(main)
