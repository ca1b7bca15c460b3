"""Train tiny models on every kind of mesh and compare each with one process.

Losses, gradients and weights are compared.

Every row is 3 steps of 8 micro-batches, float32, on processes joined by gloo: language models on
the default corpus with labels masked, the diffusion transformer (dit) on handwritten digits of
which some carry no loss, so that the ranks hold unequal numbers of valid tokens. Its modulations,
which start at zero and let no gradient through, start as small numbers here. The reference is one
process, softmax attention with plain SDPA. "loss" is the largest difference over the 3 steps,
"norm" that of the gradient norms, relative; "gradients" and "weights" the largest over every
element of every parameter, of the first step's gradients before they are clipped, and of the
weights after the 3 steps. Adam divides by the root of the squared gradient, so that rounding of
tiny gradients moves weights far: weights are reported, not bounded. A key's bias in a gpt or dit is
left out of them, since its gradient is zero but for rounding: it adds the same to all scores of a
query. The initial weights must be one process's, to the bit. "MB" is what the largest process grew
by, "s" seconds per step on these cores, however many processes share them.

    python -m tests.parity.run                                  # LLaMA and GPT, into runs/parity.md
    python -m tests.parity.run --only "pp 2" --kind gpt         # the meshes whose title has it
"""

import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.loader import Samples
from data.text.prepare import Request, prepare
from data.tokenizer import load_tokenizer
from runtime.errors import UserError
from runtime.files import write_text
from runtime.machine import describe, in_words
from runtime.ranks import run_ranks
from tests.parity.cases import DIFFUSION, KINDS, chosen_cases, flags_of, reference_of
from tools.common.arguments import one_line_errors, parser_for, run_command
from tools.common.cases import Case
from tools.parity.own import LOSS, NORM, MergedRun, furthest, merged
from tools.parity.rank import RankResult, train
from train.callbacks.metrics import loss_name
from train.tasks.diffusion import DiffusionTask
from train.tasks.language import LanguageTask
from train.tasks.task import Task

GRADIENTS = 3e-7
"""Bound on each element of a gradient: five roundings of float32 near 1."""
ZERO_GRADIENT = "attention.wk.bias"


@dataclass(frozen=True)
class Row:
    """Differences of a run from the reference."""

    loss: float
    norm: float
    gradients: float
    weights: float
    same_start: bool
    memory_mb: float
    seconds: float
    copies_differ: tuple[str, ...]

    @property
    def within(self) -> bool:
        """True where every bound holds; NaN does not."""
        return self.holds(1.0)

    def holds(self, times: float) -> bool:
        """Say whether so many times every bound holds, and what must be equal is."""
        pairs = (self.loss, LOSS), (self.gradients, GRADIENTS), (self.norm, NORM)
        return (
            all(size <= times * bound for size, bound in pairs)
            and self.same_start
            and not self.copies_differ
        )

    @property
    def cells(self) -> str:
        """The figures as cells of a Markdown table."""
        start = "same" if self.same_start else "differ"
        copies = f" (copies of {self.copies_differ[0]} differ)" if self.copies_differ else ""
        return (
            f"{start} | {self.loss:.1e} | {self.norm:.1e} | {self.gradients:.1e} | "
            f"{self.weights:.1e}{copies} | "
            f"{self.memory_mb:.0f} | {self.seconds:.2f}"
        )


class Masked:
    """Samples without some of their loss, so that ranks get unequal numbers of valid tokens.

    The index says which part.

    Of eight texts, one has none, two end early, two start late, and the rest lack a range in the
    middle; of eight latents three are fillers.
    """

    def __init__(self, data: Samples) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int | None) -> dict[str, Tensor]:
        sample = dict(self._data[index])
        if index is not None and "loss_mask" in sample:
            mask = sample["loss_mask"] = sample["loss_mask"].clone()
            kinds = (0, len(mask)), (len(mask) // 4, len(mask)), (0, len(mask) // 2), (40, 47)
            mask[slice(*kinds[(0, 1, 2, 3, 3, 2, 1, 3)[index % 8]])] = 0
        elif index is not None and index % 8 in (0, 4, 6):
            return self._data[None]
        return sample


def train_masked(
    rank: int,
    world_size: int,
    flags: Sequence[str],
    sabotage: Callable[[], None] | None = None,
    task: type[Task[Any]] = LanguageTask,
) -> RankResult:
    """Train on masked samples, and note by how much the process grew.

    The training is that of ``tools.parity.rank.train``.
    """
    before = _peak_mb()
    run = train(rank, world_size, flags, sabotage, task, wrap=Masked)
    run.memory_mb = _peak_mb() - before
    return run


def _peak_mb() -> float:
    """Return this process's largest resident set so far, in MB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e6 if sys.platform == "darwin" else 1e6 / 1024)


def trained(
    kind: str,
    case: Case,
    data: Path,
    sabotage: Callable[[], None] | None = None,
    *more: str,
    iterations: int = 3,
) -> MergedRun:
    """Train a kind of model on a mesh, in fresh processes."""
    flags: list[str] = flags_of(kind, case, data, iterations)
    task: type[Task[Any]] = DiffusionTask
    if kind != DIFFUSION:
        odd = load_tokenizer(f"{data}.model").vocab_size + 3
        flags, task = [*flags, "--vocab-size", str(odd)], LanguageTask
    ranks = run_ranks(train_masked, case.ranks, [*flags, *more], sabotage, task, timeout=300.0)
    return merged(ranks)


def compare(got: MergedRun, want: MergedRun) -> Row:
    """Return how far a run is from the reference."""
    pairs, loss = list(zip(got.records, want.records, strict=True)), loss_name(want.records[0])
    moved = {name for name in want.tensors["final"] if not name.endswith(ZERO_GRADIENT)}
    return Row(
        loss=max(abs(a[loss] - b[loss]) for a, b in pairs),
        norm=max(abs(a["grad_norm"] - b["grad_norm"]) / b["grad_norm"] for a, b in pairs),
        gradients=furthest(got.tensors["gradients"], want.tensors["gradients"]),
        weights=furthest(
            *({n: t for n, t in run.tensors["final"].items() if n in moved} for run in (got, want))
        ),
        same_start=equal(got.tensors["initial"], want.tensors["initial"]),
        memory_mb=got.memory_mb,
        seconds=sum(record["iteration_time_ms"] for record in got.records[1:])
        / 1e3
        / (len(got.records) - 1),
        copies_differ=got.copies_differ,
    )


def equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    """Return whether the names are equal, and the values to the bit."""
    return got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


HEADER = """\
| model | processes | mesh | start | loss | norm | gradients | weights | MB | s |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def rows(kinds: list[str], only: str, data: Path) -> Iterator[tuple[str, bool]]:
    """Yield each line of the table as it is measured, and whether it is as it should be."""
    references = {kind: trained(kind, reference_of(kind), data) for kind in kinds}
    for kind in kinds:
        title, reference = reference_of(kind).title, references[kind]
        yield f"| {kind} | 1 | {title} | {compare(reference, reference).cells} |", True
    for kind in kinds:
        for case in chosen_cases(kind, only):
            row = compare(trained(kind, case, data), references[kind])
            mark = "" if row.within else " **outside of the bounds**"
            yield f"| {kind} | {case.ranks} | {case.title}{mark} | {row.cells} |", row.within


def report(lines: list[str], failed: int, seconds: float) -> str:
    """Return the table, headed by the machine, the verdict and the bounds."""
    verdict = f"{failed} of them not as they should be" if failed else "all as they should be"
    return (
        f"{in_words(describe('cpu'))}: {len(lines)} rows in {seconds / 60:.0f} minutes, "
        f"{verdict}.\n"
        f"Bounds: loss {LOSS:.0e}, gradients {GRADIENTS:.0e}, norm {NORM:.0e} relative; "
        f"`tests/parity/run.py` has "
        "what the columns are.\n\n" + "\n".join([HEADER, *lines]) + "\n"
    )


@one_line_errors
def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status, 1 if a row is not as it should be."""
    parser = parser_for("python -m tests.parity.run", __doc__)
    add = parser.add_argument
    add(
        "--kind",
        nargs="+",
        choices=[*KINDS],
        default=["llama", "gpt"],
        help="kinds of model (default: llama gpt)",
    )
    add("--only", metavar="TEXT", default="", help="meshes whose title has this")
    data, output = Path("runs/data/stdlib"), Path("runs/parity.md")
    add("--data", type=Path, metavar="PREFIX", default=data, help="corpus (default: %(default)s)")
    add(
        "--output",
        type=Path,
        metavar="PATH",
        default=output,
        help="the table (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    kinds = list(dict.fromkeys(args.kind))
    if not any(chosen_cases(kind, args.only) for kind in kinds):
        raise UserError(
            f"--only is {args.only!r}, which is in no mesh's title, such as "
            f"{chosen_cases(kinds[0])[0].title}"
        )
    if (
        kinds != [DIFFUSION] and not Path(f"{args.data}.idx").exists()
    ):  # tests have a part of the corpus
        prepare(Request(), args.data)
    started, lines, failed = time.monotonic(), list[str](), 0
    print(HEADER, flush=True)
    for line, good in rows(kinds, args.only, args.data):
        print(line, flush=True)
        lines.append(line)
        failed += not good
    write_text(args.output, report(lines, failed, time.monotonic() - started))
    print(f"\n{len(lines)} rows, {failed} of them not as they should be; wrote {args.output}")
    return int(failed > 0)


if __name__ == "__main__":
    run_command(main)
