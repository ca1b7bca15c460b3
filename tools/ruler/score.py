"""Score a run on RULER: the mean share of right answers by task and length, in percent as the paper has it."""

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from data.chat.template import load_template
from data.ruler.examples import Example, Maker, Prompts, makers
from data.ruler.tasks import Sources
from planner.choice import READING
from runtime.together import is_first, raise_together
from tools.common import answers
from tools.common.report import markdown, write_results
from tools.common.runs import Run, mesh_of, open_run
from train.config.derive import beyond_rope
from train.config.flags import ConfigError
from train.generation import Writer, opened
from train.run import check_writable

THRESHOLD = 85.6
"""Llama-2-7b-chat's average at 4K, above which the paper calls a length effective (section 4)."""
KEPT = 3


@dataclass
class Cell:
    """The examples of one task at one length."""

    task: str
    length: int
    scores: list[float] = field(default_factory=list)
    """The score of each example, 0 to 1."""
    wrong: list[dict[str, Any]] = field(default_factory=list)
    """The first ones that lack an answer: their number, the answers, and what was written."""

    @property
    def score(self) -> float:
        """The mean, in percent."""
        return 100 * sum(self.scores) / len(self.scores)


def score_run(args: argparse.Namespace, tasks: Sequence[str], sources: Sources) -> None:
    """Score a run and write what was found; collective. Raises UserError."""
    run = open_run(args.run, args.ckpt_step)
    lengths, table = sorted(set(args.lengths)), run.config.model.position_table
    if table is not None and lengths[-1] > table:
        raise ConfigError(
            f"lengths names {lengths[-1]}, and the model has max_position_embeddings {table}, so that prompts would be "
            "cut; give at most that"
        )
    folder = args.save or args.run / "evaluation"
    template = load_template(str(run.config.data.tokenizer_model), args.chat_template) if args.chat else None
    prompts = Prompts(run.tokenizer, template, run.begin)
    makes = makers(tasks, lengths, args.seed, prompts, sources)
    with opened(args.run, args.ckpt_step, replicas=True, choices=READING, **mesh_of(args)) as writer:
        with raise_together():
            if is_first():
                check_writable(folder, "save")
        longest = replace(run.config, train=replace(run.config.train, seq_length=lengths[-1]))
        if is_first() and (note := beyond_rope(longest)):
            print(note, flush=True)
        cells, started = list[Cell](), time.monotonic()
        for maker in makes:
            cells.append(score(writer, maker, prompts, args.samples, args.batch_size))
            if is_first():
                last, seconds = cells[-1], time.monotonic() - started
                print(f"{last.length} tokens, {last.task}: {last.score:.1f}, {seconds:.1f} s", flush=True)
        if is_first():
            _write(folder, run, args, sources, cells)


def score(writer: Writer, maker: Maker, prompts: Prompts, samples: int, batch_size: int) -> Cell:
    """Ask so many examples, so many at once; collective, and the whole cell is on every rank."""
    stop = sorted(prompts.ends)

    def ask(numbers: Sequence[int]) -> list[tuple[float, dict[str, Any]]]:
        with raise_together(writer.group):
            asked = [maker.make(number) for number in numbers]
        written = writer.write([example.ids for example in asked], asked[0].new_tokens, stop=stop)
        return [_judged(example, prompts.text(ids)) for example, ids in zip(asked, written, strict=True)]

    batches = [range(begin, min(begin + batch_size, samples)) for begin in range(0, samples, batch_size)]
    found = answers.shared(writer, batches, ask)
    wrong = [told for share, told in found if share < 1]
    return Cell(maker.name, maker.length, [share for share, _ in found], wrong[:KEPT])


def _judged(example: Example, written: str) -> tuple[float, dict[str, Any]]:
    told = {"number": example.number, "answers": list(example.question.answers), "written": written}
    return example.score(written), told


def _write(folder: Path, run: Run, args: argparse.Namespace, sources: Sources, cells: Sequence[Cell]) -> None:
    prompts = "prompts by the chat template" if args.chat else "prompts as of a base model"
    title = (
        f"{run.folder}, iteration {run.iteration}: RULER, {args.samples} examples of each task and length, {prompts}, "
        f"haystack of {sources.essays.title}"
    )
    result: dict[str, Any] = {"run": str(run.folder), "iteration": run.iteration, "seed": args.seed}
    result |= {"chat": args.chat, "haystack": sources.essays.title, "trained_seq_length": run.trained_length}
    result["cells"] = [asdict(cell) | {"score": cell.score} for cell in cells]
    lengths, tasks = sorted({cell.length for cell in cells}), list(dict.fromkeys(cell.task for cell in cells))
    shares = [[_of(cells, task, length).score / 100 for length in lengths] for task in tasks]
    figure = answers.heat_map(shares, lengths, tasks, "task", "right answers")
    write_results(folder, "ruler", title, table(cells), result, figure)


def _of(cells: Sequence[Cell], task: str, length: int) -> Cell:
    return next(cell for cell in cells if (cell.task, cell.length) == (task, length))


def table(cells: Sequence[Cell]) -> list[str]:
    """Return a row for each task and the averages, a column for each length and all; and the effective length."""
    lengths, tasks = sorted({cell.length for cell in cells}), list(dict.fromkeys(cell.task for cell in cells))
    rows = {task: [_of(cells, task, length).score for length in lengths] for task in tasks}
    rows["average"] = means = [sum(column) / len(tasks) for column in zip(*rows.values(), strict=True)]
    shown = [[name, *(f"{value:.1f}" for value in row), f"{sum(row) / len(row):.1f}"] for name, row in rows.items()]
    effective = [length for length, mean in zip(lengths, means, strict=True) if mean > THRESHOLD]
    said = f"effective length: {max(effective)}" if effective else "effective length: less than all of these"
    return [
        *markdown(["task", *map(str, lengths), "all"], shown, "---:"),
        "",
        f"{said} (the longest whose average is above {THRESHOLD}, Llama-2-7b-chat's at 4K, as in the paper)",
    ]
