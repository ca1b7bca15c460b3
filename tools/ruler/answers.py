"""A run asked questions: its copies over a mesh take turns, and each task and length gets a cell of
a table.
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
from tools.ruler import lines
from tools.ruler.choices import makers_of
from tools.ruler.examples import Maker
from tools.ruler.tasks import TASKS
from tools.ruler.texts import Essays
from train.callbacks import say
from train.config.derive import beyond_rope
from train.config.flags import ConfigError
from train.generation import Writer, opened
from train.run import check_writable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEPT = 3
"""Wrong answers that a cell tells."""
LONGEST = 1 << 24
"""Tokens of a prompt at most: a longer text would take minutes and gigabytes before anything is
asked.
"""
THRESHOLD = 85.6
"""Llama-2-7b-chat's average at 4K, above which RULER's paper calls a length effective (section 4).
"""
Answer = tuple[float, dict[str, Any]]
"""The share of it that is right, 0 to 1, and what to tell of it where that is below 1."""


@dataclass(frozen=True)
class Cell:
    """The answers to a task at a length."""

    task: str
    length: int
    answers: Sequence[Answer]

    @property
    def share(self) -> float:
        """The mean share of right answers."""
        return fmean(share for share, _ in self.answers)

    def entry(self) -> dict[str, Any]:
        """Return the cell as its file has it."""
        shares = [share for share, _ in self.answers]
        wrong = [answer for share, answer in self.answers if share < 1][:KEPT]
        return {
            "task": self.task,
            "length": self.length,
            "scores": shares,
            "wrong": wrong,
            "score": 100 * self.share,
        }


def score_run(args: argparse.Namespace) -> None:
    """Ask a run all questions and write the scores; collective.

    Raises UserError: a length is beyond the model's positions or ``LONGEST``, or as ``makers_of``.
    """
    run = open_run(args.run, args.ckpt_step)
    lengths, positions = sorted(set(args.lengths)), run.config.model.position_table
    _check_longest(lengths[-1], positions)
    makes = makers_of(
        args,
        lengths,
        run.tokenizer,
        lambda: run.template(args.chat_template),
        run.begin(args.add_bos_token),
    )
    with opened(
        args.run, args.ckpt_step, replicas=True, choose=method_to_read, **mesh_of(args)
    ) as writer:
        with raise_together():
            if is_first():
                check_writable(_folder(args), "save")
        if note := beyond_rope(run.config.updated(seq_length=lengths[-1])):
            say(note)
        cells, started = list[Cell](), time.monotonic()
        for maker in makes:
            cell = ask_all(writer, maker, args.samples, args.batch_size, positions)
            say(
                f"{cell.length} tokens, {cell.task}: {100 * cell.share:.1f}, {time.monotonic() - started:.1f} s"
            )
            cells.append(cell)
    if is_first():
        _write(args, run, cells)


def _check_longest(length: int, positions: int | None) -> None:
    if positions is not None and length > positions:
        raise ConfigError(
            f"lengths names {length}, and the model has max_position_embeddings {positions}, so that prompts would be "
            "cut; give at most that"
        )
    if length > LONGEST:
        raise ConfigError(
            f"lengths names {length}, and texts of up to {LONGEST} tokens are made; give at most that"
        )


def ask_all(
    writer: Writer,
    maker: Maker | lines.Maker,
    samples: int,
    batch_size: int,
    positions: int | None = None,
) -> Cell:
    """Ask so many questions, so many at once, each batch of one of the writer's copies; every rank
    gets the cell.

    ``positions`` are those of a model that has a table of them, beyond which no answer goes.
    """
    batches = [
        range(begin, min(begin + batch_size, samples)) for begin in range(0, samples, batch_size)
    ]
    answers: dict[int, list[Answer]] = {}
    error: UserError | None = None
    try:
        for turn in range(writer.replica, len(batches), writer.replicas):
            answers[turn] = _ask(writer, maker, batches[turn], positions)
    except UserError as caught:  # the other copies wait for these answers
        error = caught

    def local() -> dict[int, list[Answer]]:
        if error is not None:
            raise error
        return answers

    everyone = {turn: batch for part in gather_results(local) for turn, batch in part.items()}
    return Cell(
        maker.name,
        maker.length,
        [answer for turn in range(len(batches)) for answer in everyone[turn]],
    )


def _ask(
    writer: Writer, maker: Maker | lines.Maker, numbers: Sequence[int], positions: int | None
) -> list[Answer]:
    """Ask the questions of these numbers at once."""
    with raise_together(writer.group):
        examples = [maker.make(number) for number in numbers]
        new_tokens = max(example.new_tokens for example in examples)
        if positions is not None:
            new_tokens = min(
                new_tokens, positions + 1 - max(len(example.ids) for example in examples)
            )
    written = writer.write(
        [example.ids for example in examples], new_tokens, stop=sorted(maker.prompts.ends)
    )
    answers: list[Answer] = []
    for example, ids in zip(examples, written, strict=True):
        text = maker.prompts.text(ids)
        about = {
            "number": example.number,
            "answers": list(example.question.answers),
            "written": text,
        }
        answers.append((example.score(text), about))
    return answers


def _write(args: argparse.Namespace, run: Run, cells: Sequence[Cell]) -> None:
    """Write a table, a picture, and the figures of all cells."""
    about: dict[str, Any] = {"seed": args.seed}
    parts = [f"{args.samples} examples of each task and length"]
    if any(cell.task in TASKS for cell in cells):
        about |= {"chat": args.chat, "haystack": Essays(args.essays).title}
        asked = "by the chat template" if args.chat else "as of a base model"
        parts.append(f"RULER's prompts {asked}, haystack of {about['haystack']}")
    if any(cell.task not in TASKS for cell in cells):
        about |= {"form": args.form, "vocabulary": args.vocabulary}
        parts.append(f"{lines.NAME} of {args.form} in the {args.vocabulary} vocabulary")
    scores = {
        "run": str(run.folder),
        "iteration": run.iteration,
        **about,
        "trained_seq_length": run.trained_length,
    }
    scores["cells"] = [cell.entry() for cell in cells]
    title = f"{run.folder}, iteration {run.iteration}: {'; '.join(parts)}"
    write_results(_folder(args), "ruler", title, table(cells), scores, heat_map(cells))


def _folder(args: argparse.Namespace) -> Path:
    return args.save or args.run / "evaluation"


def _grid(cells: Sequence[Cell]) -> tuple[list[str], list[int], list[list[float]]]:
    """Return the tasks in their order, ascending lengths, and the shares of each task by length."""
    shares = {(cell.task, cell.length): cell.share for cell in cells}
    tasks, lengths = (
        list(dict.fromkeys(cell.task for cell in cells)),
        sorted({cell.length for cell in cells}),
    )
    return tasks, lengths, [[shares[task, length] for length in lengths] for task in tasks]


def table(cells: Sequence[Cell]) -> list[str]:
    """Return a row for each task and the averages, a column for each length and all; RULER's
    effective length.
    """
    tasks, lengths, shares = _grid(cells)
    scores = [[100 * share for share in row] for row in shares]
    means = [fmean(column) for column in zip(*scores, strict=True)]
    named = zip([*tasks, "average"], [*scores, means], strict=True)
    rows = [[name, *(f"{score:.1f}" for score in row), f"{fmean(row):.1f}"] for name, row in named]
    shown = markdown(["task", *map(str, lengths), "all"], rows, "---:")
    if any(task not in TASKS for task in tasks):
        return shown

    effective = [length for length, mean in zip(lengths, means, strict=True) if mean > THRESHOLD]
    longest = max(effective) if effective else "less than all of these"
    of = f"the longest whose average is above {THRESHOLD}, Llama-2-7b-chat's at 4K, as in the paper"
    return [*shown, "", f"effective length: {longest} ({of})"]


def heat_map(cells: Sequence[Cell]) -> "Figure":
    """Draw the shares of right answers over lengths in tokens (across) and tasks (down)."""
    from matplotlib.figure import Figure

    tasks, lengths, shares = _grid(cells)
    figure = Figure(
        figsize=(2.5 + 0.9 * len(lengths), 1.6 + 0.5 * len(tasks)), layout="constrained"
    )
    axes = figure.subplots()
    image = axes.imshow(shares, vmin=0, vmax=1, cmap="cividis", aspect="auto")
    for y, row in enumerate(shares):
        for x, share in enumerate(row):
            axes.text(
                x,
                y,
                f"{share:.0%}",
                ha="center",
                va="center",
                color="white" if share < 0.5 else "black",
            )
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(tasks)), tasks)
    axes.set(xlabel="tokens", ylabel="task")
    figure.colorbar(image, label="right answers")
    return figure
