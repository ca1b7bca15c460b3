"""Compare models over ranks with one process, by Longmesh and by axolotl-ringmaster.

    make model-peers
    python -m tests.peers.run --only families

`families`: the tiny models of tests/parallel/transformers on 2 processes; `batches`: kinds of
batches of a LLaMA on 2, 3 and 4 processes; `ways`: ringmaster's other ways of computing attention,
on 4 processes; `time`: seconds of a step of a larger LLaMA on 2 processes, in turns.

All is float32 on a CPU, with gloo. A result has the errors of the logits, of the loss and of the
gradients: the largest of a tensor, in the 2-norm, relative to one process that runs each document
alone. For each tensor the smaller error counts, that from one process in float32 or in float64.
`right`: all are at most 1e-5. `refused`: an exception, whose message is kept.
"""

import os
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallel.comparison import Float64Mode
from runtime.errors import UserError
from runtime.files import write_text
from runtime.machine import describe, results_file
from runtime.ranks import RankError, preload, run_ranks
from tests.parallel.transformers.families import errors, model_of
from tests.peers import cases
from tests.peers.cases import Batch, Case, one_process
from tests.peers.contestants import LONGMESH, STEPS, WAYS
from tests.peers.tables import cell, tables
from tests.peers.timing import measure
from tools.common.arguments import one_line_errors, parser_for, run_command

PACKAGE = "axolotl-ringmaster"
INSTALL = 'pip install -e ".[dev,ringmaster]" -c constraints.txt'
RIGHT = 1e-5
"""Largest error of a right result."""
TIMEOUT = 120.0
PARTS = {
    "families": (cases.family_cases, STEPS),
    "batches": (cases.batch_cases, STEPS),
    "ways": (cases.way_cases, WAYS),
}
"""Cases and contestants of each table."""
preload("tests.peers.preload")


def compare(rank: int, world_size: int, case: Case, name: str) -> dict[str, float] | None:
    """Return the errors of a contestant's logits, loss and gradients; None but on rank 0."""
    model = model_of(case.family, case.heads or world_size, torch.float32)
    batches = case.batches()
    step = (STEPS | WAYS)[name]
    logits, loss = step(model, batches)
    loss = loss.clone()
    dist.all_reduce(loss)
    tensors = [logits, loss / world_size]
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        dist.all_reduce(gradient)
        tensors.append(gradient / world_size)

    if rank > 0:
        return None
    return smaller_errors(tensors, case, world_size)


def smaller_errors(
    tensors: Sequence[torch.Tensor], case: Case, world_size: int
) -> dict[str, float]:
    """Return the errors against one process in float32 or, where smaller, in float64."""
    each = []
    for dtype in (torch.float32, torch.float64):
        logits, *rest = [x.double() for x in reference(case, world_size, dtype)]
        logit_error = float((tensors[0].double() - logits).norm() / logits.norm())
        each.append([logit_error, *errors(tensors[1:], rest)])

    logits_error, loss_error, *gradient_errors = map(min, *each)
    return {"logits": logits_error, "loss": loss_error, "gradients": max(gradient_errors)}


@cache
def reference(case: Case, world_size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return logits, loss and gradients of one process."""
    model = model_of(case.family, case.heads or world_size, dtype)
    batches: list[Batch] = case.batches()
    if dtype == torch.float64:
        with Float64Mode():
            return one_process(model, batches)
    return one_process(model, batches)


def result_of(case: Case, name: str) -> dict[str, Any]:
    """Run a contestant on a case; return a row of the results."""
    row: dict[str, Any] = {"family": case.family, "kind": case.kind, "ranks": case.ranks}
    row |= {"heads": case.heads or case.ranks, "contestant": name}
    try:
        figures = run_ranks(compare, case.ranks, case, name, timeout=TIMEOUT)[0]
    except RankError as error:
        return row | {"verdict": "refused", "message": last_line(str(error))}

    verdict = "wrong"
    if all(error <= RIGHT for error in figures.values()):  # NaN is wrong
        verdict = "right"
    return row | {"verdict": verdict, **figures}


def last_line(trace: str) -> str:
    """Return the exception of a traceback, without the path of its module."""
    lines = [line for line in trace.strip().splitlines() if line and not line.startswith(" ")]
    exception, _, message = lines[-1].partition(": ")
    return f"{exception.rpartition('.')[2]}: {message}"


def save(folder: Path | None, result: dict[str, Any]) -> None:
    """Write the tables to a folder, if one is given."""
    if folder:
        path = results_file(folder, "models", result["machine"]).with_suffix(".md")
        write_text(path, "\n".join(tables(result)) + "\n")
        print(f"written: {path}", flush=True)


def check_installed() -> None:
    """Raise UserError if the package to compare with is not installed."""
    if find_spec("ringmaster") is None:
        raise UserError(
            f"{PACKAGE} is not installed; run `make model-peers`, or install it: {INSTALL}"
        )


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Compare and time both packages; print the tables and write them."""
    parser = parser_for("python -m tests.peers.run", __doc__)
    parser.add_argument("--only", choices=(*PARTS, "time"), help="one part (default: all)")
    parser.add_argument(
        "--results", type=Path, metavar="DIR", help="folder for the tables, as in bench/results"
    )
    args = parser.parse_args(argv)
    check_installed()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    machine = describe("cpu")
    versions = {name: version(name) for name in (PACKAGE, "transformers")}
    result: dict[str, Any] = {"benchmark": "models", "machine": machine, "versions": versions}
    for part, (cases_of, steps) in PARTS.items():
        if args.only in (None, part):
            result[part] = []
            for case in cases_of():
                for name in dict.fromkeys([LONGMESH, *steps]):
                    row = result_of(case, name)
                    result[part].append(row)
                    title = f"{case.family}, {case.kind}, {case.ranks} ranks, {name}"
                    print(f"{title}: {row['verdict']} {cell(row)}", flush=True)
            save(args.results, result)

    if args.only in (None, "time"):
        result["time"] = run_ranks(measure, 2)[0]

    print("\n".join(tables(result)))
    save(args.results, result)


if __name__ == "__main__":
    run_command(main)
