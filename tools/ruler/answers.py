"""Ask a run's model RULER's questions, and score each task and length.

The model's replicas answer different questions at the same time.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from planner.choice import method_to_read
from runtime.errors import UserError
from runtime.together import gather_results, is_first, raise_together
from tools.common.report import markdown, write_results
from tools.common.runs import Run, mesh_of, open_run
from tools.ruler.choices import makers_of
from tools.ruler.examples import ExampleMaker
from tools.ruler.lines import NAME, LineMaker
from tools.ruler.tasks import TASKS
from tools.ruler.texts import Essays
from train.callbacks import say
from train.config.derive import beyond_rope
from train.config.flags import ConfigError
from train.generation import Writer, opened
from train.run import check_writable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN_WRONG = 3
"""Maximum number of wrong answers that the results file shows per task and length."""
MAX_LENGTH = 1 << 24
"""Maximum length of an example in tokens; making a longer text would take minutes and gigabytes."""
THRESHOLD = 85.6
"""Average score above which RULER's paper calls a length effective (section 4): that of
Llama-2-7b-chat at 4K."""
Answer = tuple[float, dict[str, Any]]
"""Score of an answer, from 0 to 1, and its record for the results file, which shows some wrong
answers."""


@dataclass(frozen=True)
class Cell:
    """The answers to one task at one length: a cell of the table of scores."""

    task: str
    length: int
    answers: Sequence[Answer]

    @property
    def shares(self) -> list[float]:
        """Score of each answer, from 0 to 1."""
        return [share for share, _ in self.answers]

    @property
    def share(self) -> float:
        """Mean score of the answers, from 0 to 1."""
        return fmean(self.shares)

    def entry(self) -> dict[str, Any]:
        """Return the cell's entry in the results file."""
        wrong = [answer for share, answer in self.answers if share < 1]
        return {
            "task": self.task,
            "length": self.length,
            "scores": self.shares,
            "wrong": wrong[:SHOWN_WRONG],
            "score": 100 * self.share,
        }


def score_run(args: argparse.Namespace) -> None:
    """Ask a run's model all questions and write the scores; collective.

    Raises UserError if a length is beyond the model's positions or ``MAX_LENGTH``, or as
    ``makers_of`` does.
    """
    run = open_run(args.run, args.ckpt_step)
    lengths = sorted(set(args.lengths))
    positions = run.config.model.position_table
    _check_longest(lengths[-1], positions)
    makers = makers_of(
        args,
        lengths,
        run.tokenizer,
        template=lambda: run.template(args.chat_template),
        begin=run.begin(args.add_bos_token),
    )
    mesh = mesh_of(args)
    with opened(args.run, args.ckpt_step, replicas=True, choose=method_to_read, **mesh) as writer:
        with raise_together():
            if is_first():
                check_writable(_folder(args), "save")

        note = beyond_rope(run.config.updated(seq_length=lengths[-1]))
        if note:
            say(note)

        cells = []
        start_time = time.monotonic()
        for maker in makers:
            cell = ask_all(writer, maker, args.samples, args.batch_size, positions)
            score = 100 * cell.share
            seconds = time.monotonic() - start_time
            say(f"{cell.length} tokens, {cell.task}: {score:.1f}, {seconds:.1f} s")
            cells.append(cell)

    if is_first():
        _write(args, run, cells)


def _check_longest(length: int, positions: int | None) -> None:
    if positions is not None and length > positions:
        raise ConfigError(
            f"--lengths has {length}, but the model has max_position_embeddings {positions}, so "
            "prompts would be cut; give smaller lengths"
        )

    if length > MAX_LENGTH:
        raise ConfigError(
            f"--lengths has {length}, but texts have at most {MAX_LENGTH} tokens; give smaller "
            "lengths"
        )


def ask_all(
    writer: Writer,
    maker: ExampleMaker | LineMaker,
    samples: int,
    batch_size: int,
    positions: int | None = None,
) -> Cell:
    """Ask ``samples`` questions in batches, divided among the writer's replicas; collective.

    All ranks return the same cell. ``positions`` is the size of the model's position table, if it
    has one; answers end there. An error on one replica is raised on all, since the others would
    wait for its answers.
    """
    batches = []
    for begin in range(0, samples, batch_size):
        batches.append(range(begin, min(begin + batch_size, samples)))

    local_answers: dict[int, list[Answer]] = {}
    error: UserError | None = None
    try:
        for index in range(writer.replica, len(batches), writer.replicas):
            local_answers[index] = _ask(writer, maker, batches[index], positions)
    except UserError as caught:
        error = caught

    def result() -> dict[int, list[Answer]]:
        if error is not None:
            raise error
        return local_answers

    by_batch: dict[int, list[Answer]] = {}
    for replica_answers in gather_results(result):
        by_batch |= replica_answers

    answers = []
    for index in range(len(batches)):
        answers += by_batch[index]

    return Cell(maker.name, maker.length, answers)


def _ask(
    writer: Writer, maker: ExampleMaker | LineMaker, numbers: Sequence[int], positions: int | None
) -> list[Answer]:
    """Ask the questions with these numbers as one batch, and score the answers."""
    with raise_together(writer.group):
        examples = [maker.make(number) for number in numbers]
        prompts = [example.ids for example in examples]
        new_tokens = max(example.new_tokens for example in examples)
        if positions is not None:
            new_tokens = min(new_tokens, positions + 1 - max(map(len, prompts)))

    written = writer.write(prompts, new_tokens, stop=sorted(maker.prompts.ends))

    answers: list[Answer] = []
    for example, ids in zip(examples, written, strict=True):
        text = maker.prompts.text(ids)
        record = {
            "number": example.number,
            "answers": list(example.question.answers),
            "written": text,
        }
        answers.append((example.score(text), record))

    return answers


def _write(args: argparse.Namespace, run: Run, cells: Sequence[Cell]) -> None:
    """Write the results: a table, a picture, and a record of all cells."""
    tasks = {cell.task for cell in cells}
    settings: dict[str, Any] = {"seed": args.seed}
    parts = [f"{args.samples} examples of each task and length"]
    if tasks & TASKS.keys():
        haystack = Essays(args.essays).title
        settings |= {"chat": args.chat, "haystack": haystack}
        manner = "in the chat template" if args.chat else "as for a base model"
        parts.append(f"RULER's prompts {manner}, haystack of {haystack}")

    if tasks - TASKS.keys():
        settings |= {"form": args.form, "vocabulary": args.vocabulary}
        parts.append(f"{NAME} of {args.form} in the {args.vocabulary} vocabulary")

    record = {
        "run": str(run.folder),
        "iteration": run.iteration,
        **settings,
        "trained_seq_length": run.trained_length,
        "cells": [cell.entry() for cell in cells],
    }
    title = f"{run.folder}, iteration {run.iteration}: {'; '.join(parts)}"
    write_results(_folder(args), "ruler", title, table(cells), record, heat_map(cells))


def _folder(args: argparse.Namespace) -> Path:
    return args.save or args.run / "evaluation"


def _grid(cells: Sequence[Cell]) -> tuple[list[str], list[int], list[list[float]]]:
    """Return the tasks, the lengths, and the score of each task at each length, from 0 to 1.

    Tasks are in order of first appearance, lengths ascend; scores are indexed [task][length].
    """
    by_task: dict[str, dict[int, float]] = {}
    for cell in cells:
        by_task.setdefault(cell.task, {})[cell.length] = cell.share

    lengths = sorted({cell.length for cell in cells})
    shares = []
    for by_length in by_task.values():
        shares.append([by_length[length] for length in lengths])

    return list(by_task), lengths, shares


def table(cells: Sequence[Cell]) -> list[str]:
    """Format the scores in percent: a row per task, a column per length, and their averages.

    If all tasks are RULER's, a line below the table states the effective length.
    """
    tasks, lengths, shares = _grid(cells)
    scores = [[100 * share for share in row] for row in shares]
    means = [fmean(column) for column in zip(*scores, strict=True)]
    rows = []
    for name, row in zip([*tasks, "average"], [*scores, means], strict=True):
        rows.append([name, *(f"{score:.1f}" for score in row), f"{fmean(row):.1f}"])

    lines = markdown(["task", *map(str, lengths), "all"], rows, "---:")
    if set(tasks) - TASKS.keys():
        return lines

    effective = [length for length, mean in zip(lengths, means, strict=True) if mean > THRESHOLD]
    longest = str(max(effective, default="less than all of these"))
    rule = (
        f"the longest whose average is above {THRESHOLD}, Llama-2-7b-chat's at 4K, as in the paper"
    )
    return [*lines, "", f"effective length: {longest} ({rule})"]


def heat_map(cells: Sequence[Cell]) -> "Figure":
    """Draw the share of right answers by length in tokens (across) and task (down)."""
    from matplotlib.figure import Figure

    tasks, lengths, shares = _grid(cells)
    figsize = (2.5 + 0.9 * len(lengths), 1.6 + 0.5 * len(tasks))
    figure = Figure(figsize=figsize, layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shares, vmin=0, vmax=1, cmap="cividis", aspect="auto")
    for y, row in enumerate(shares):
        for x, share in enumerate(row):
            ink = "white" if share < 0.5 else "black"
            axes.text(x, y, f"{share:.0%}", ha="center", va="center", color=ink)

    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(tasks)), tasks)
    axes.set(xlabel="tokens", ylabel="task")
    figure.colorbar(image, label="right answers")
    return figure
