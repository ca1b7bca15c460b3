"""Check 2 to 8 GPUs together under NCCL, in steps.

Links, every method, a pipeline with tied embeddings, other meshes against one GPU, a killed rank.

    make nccl-check
    make nccl-check ARGS="--device cpu --nproc 4"

Each step is a process of its own, and its result is on the disk before the next begins, in
bench/results/<device>-nccl-check-<processes>.jsonl. Exit status 1 where something is wrong, or
where there are fewer than 2 GPUs (then nothing is written). With --device cpu the same steps are
small and run under gloo, to try them.

Models are tiny and in float32: what is compared is what ranks send each other. Weights, losses,
gradients and their norms of two steps must be those of one process, within the bounds of `make
parity` on a CPU and ten times them on GPUs.
"""

import json
import os
import re
import signal
import time
from collections.abc import Sequence
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any

import torch

from data.text.prepare import prepare
from data.text.record import Request
from parallel.context import LINEAR_METHODS, METHODS
from runtime.errors import UserError
from tests.chaos.victim import PLAN, marked
from tests.nccl.rank import CASES, LINKS, result
from tests.parity.cases import LINEAR, reference_of
from tests.parity.cases import flags_of as parity_flags
from tests.parity.run import compare
from tests.steps import Step, asked, check, launched
from tools.common.arguments import one_line_errors, parser_for, positive, run_command
from tools.common.cases import Case
from tools.parity.own import MergedRun, merged

BOUNDS = {"cuda": 10.0, "cpu": 1.0}
"""Times the bounds of `make parity`; a GPU adds up in other orders, by how much is not measured."""
SECONDS_TO_END = {"cuda": 40.0, "cpu": 20.0}
"""The other ranks' limit after a kill.

Those that wait for a GPU heed no SIGTERM, and torchrun kills them after 30.
"""
FAILED = re.compile(r"^(?:\[rank\d+\]: *)?((?:[\w.]+Error|error|hung)\b.*)", re.M)
Row = tuple[str, Case]
"""A kind of model, and its mesh."""


def links(processes: int, device: str, folder: Path) -> dict[str, Any]:
    """Measure what each rank sends at once, in GB/s: to the next, and in collectives, by sizes."""
    status, output = launched(processes, "-m", "tests.nccl.rank", "links", str(folder), device)
    if not (folder / LINKS).exists():
        raise UserError(reason(status, output))
    rows = json.loads((folder / LINKS).read_text())
    about: dict[str, Any] = {"nccl": list(torch.cuda.nccl.version())} if device == "cuda" else {}
    about |= {
        "environment": {
            name: value for name, value in os.environ.items() if name.startswith("NCCL_")
        }
    }
    return rows[-1] | about | {"gb_per_s": rows}


def methods(processes: int, device: str, folder: Path) -> dict[str, Any]:
    """Train by every method of context parallelism, for softmax attention and for linear."""
    shaped: dict[str, dict[str, Any]] = {}
    if processes % 4 == 0:
        shaped = {"wallfacer": {"team": 2}, "double_ring": {"per_node": processes // 2}}
    rows = [("llama", Case(cp=processes, method=name, **shaped.get(name, {}))) for name in METHODS]
    rows += [("transnormer", Case(cp=processes, method=name)) for name in LINEAR_METHODS]
    return compared(processes, device, folder, rows)


def pipeline(processes: int, device: str, folder: Path) -> dict[str, Any]:
    """Train with a stage on every rank, by two schedules.

    The first and the last stage have the same embedding.
    """
    interleaved = Case(pp=processes, schedule="Interleaved1F1B", virtual=2)
    return compared(processes, device, folder, [("gpt", Case(pp=processes)), ("gpt", interleaved)])


def meshes(processes: int, device: str, folder: Path) -> dict[str, Any]:
    """Train by the other dimensions, alone and two together."""
    cases = [
        Case(tp=processes),
        *(Case(dp=processes, mode=mode) for mode in ("zero3", "zero1", "ddp")),
    ]
    if processes % 2 == 0 and processes > 2:
        half = processes // 2
        cases += [
            Case(tp=2, cp=half),
            Case(pp=2, cp=half),
            Case(pp=2, dp=half),
            Case(dp=2, cp=half),
        ]
    return compared(processes, device, folder, [("llama", case) for case in cases])


def compared(processes: int, device: str, folder: Path, rows: Sequence[Row]) -> dict[str, Any]:
    """Train every row, and one process for each kind of model.

    Return how far apart they are, and which too far.
    """
    prepare(Request(max_bytes=4 << 20), data := folder / "data", progress=False)
    alone = {kind: flags_of(kind, reference_of(kind), data, processes, device) for kind, _ in rows}
    cases = {
        f"{kind}, {case.title}": flags_of(kind, case, data, processes, device)
        for kind, case in rows
    }
    want, got = trained(1, alone, folder), trained(processes, cases, folder)
    figures, wrong = dict[str, dict[str, float]](), list[str]()
    for (kind, _), (name, run) in zip(rows, got.items(), strict=True):
        reference = want[kind]
        if isinstance(reference, str):
            raise UserError(f"{kind} in one process: {reference}")
        if isinstance(run, str):
            wrong.append(f"{name}: {run}")
            continue
        row = compare(run, reference)
        figures[name] = {
            field: getattr(row, field) for field in ("loss", "norm", "gradients", "seconds")
        }
        if not row.holds(BOUNDS[device]):
            wrong.append(f"{name}: {row.cells}")
    worst = {
        field: max((row[field] for row in figures.values()), default=None)
        for field in ("loss", "gradients")
    }
    return {"cases": len(rows), **worst, "rows": figures, "wrong": wrong}


def flags_of(kind: str, case: Case, data: Path, processes: int, device: str) -> list[str]:
    """Return the command line of two steps.

    Heads, layers and micro-batches can be shared by all processes.
    """
    sizes = {"num-layers": 2, "hidden-size": 32, "num-attention-heads": 2, "global-batch-size": 2}
    sizes |= {"num-query-groups": 1} if kind == "llama" else {}
    more = [word for name, each in sizes.items() for word in (f"--{name}", str(each * processes))]
    # a minute and not ten until a collective that hangs is an error
    if device == "cuda" and kind not in LINEAR and case.method != "none":
        more += ["--attention-backend", "reference"]  # the kernels take 16 bits alone
    return [
        *parity_flags(kind, case, data, 2),
        *more,
        "--device",
        device,
        "--distributed-timeout-minutes",
        "1",
    ]


def trained(
    processes: int, cases: dict[str, list[str]], folder: Path
) -> dict[str, MergedRun | str]:
    """Train cases one after another.

    Return a run of each, or why there is none. After a failure all start anew.
    """
    runs: dict[str, MergedRun | str] = {}
    while left := {name: flags for name, flags in cases.items() if name not in runs}:
        (folder / CASES).write_text(json.dumps(left))
        status, output = launched(processes, "-m", "tests.nccl.rank", "train", str(folder))
        for name in left:
            files = [result(folder, name, rank) for rank in range(processes)]
            if not all(file.exists() for file in files):
                runs[name] = reason(status, output)
                break
            runs[name] = merged([torch.load(file, weights_only=False) for file in files])
    return runs


def reason(status: int, output: str) -> str:
    """Return the first error that a launch printed."""
    error = FAILED.search(output)
    return error[1] if error else f"it ended with status {status}"


def killed(processes: int, device: str, folder: Path) -> dict[str, Any]:
    """Kill a training rank: it is named, the others end within seconds, and no process is left."""
    prepare(Request(max_bytes=4 << 20), data := folder / "data", progress=False)
    struck, last = folder / "struck", processes - 1
    plan = {
        "hook": "random",
        "rank": last,
        "nth": 3,
        "when": "before",
        "whom": "rank",
        "signal": int(signal.SIGKILL),
    }
    os.environ[PLAN] = json.dumps(plan | {"async": False, "note": str(struck)})
    flags = flags_of("llama", Case(cp=processes), data, processes, device)
    status, output = launched(
        processes, "-m", "tests.chaos.victim", *flags, "--train-iters", "1000"
    )
    if not struck.exists():
        return {"wrong": [f"no rank came to the step where it is killed: {reason(status, output)}"]}
    seconds = time.time() - struck.stat().st_mtime
    left = marked(os.environ[PLAN])
    named = re.search(rf"rank *: {last} \(local_rank: {last}\)\s+exitcode *: -9 ", output)
    checks = {
        f"the killed rank {last} is not named": not named,
        f"the others ended after {seconds:.0f} s": seconds > SECONDS_TO_END[device],
        f"processes left: {left}": bool(left),
    }
    return {"seconds_to_end": seconds, "wrong": [words for words, wrong in checks.items() if wrong]}


STEPS = {links: 180, methods: 1200, pipeline: 300, meshes: 600, killed: 300}
"""And the seconds after which each is ended."""


def processes_of(device: str, requested: int | None) -> int:
    """Return the count of processes; raise UserError unless 2 to 8, and a GPU for each."""
    available = torch.cuda.device_count() if device == "cuda" else 8
    if available < 2:
        raise UserError(
            f"nccl-check needs 2 to 8 CUDA GPUs, and torch sees {available} here; "
            "nothing was written"
        )
    num_processes = requested or (min(available, 8) if device == "cuda" else 2)
    if not 2 <= num_processes <= min(available, 8):
        raise UserError(f"nproc is {num_processes}; it must be from 2 to {min(available, 8)}")
    return num_processes


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = parser_for("python -m tests.nccl", __doc__)
    parser.add_argument(
        "--nproc",
        type=positive,
        metavar="N",
        help="processes (default: one for each GPU, 2 on a CPU)",
    )
    args = asked(parser, [step.__name__ for step in STEPS], argv)
    processes = processes_of(args.device, args.nproc)
    steps = {
        step.__name__: Step(update_wrapper(partial(step, processes), step), limit)
        for step, limit in STEPS.items()
    }
    check("tests.nccl", f"nccl-check-{processes}", args, steps, "--nproc", str(processes))


if __name__ == "__main__":
    run_command(main)
