"""Score a run on lines or needles: how many greedy answers are exact, by length and depth."""

import argparse
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.chat.template import load_template
from data.tokenizer import HuggingFaceTokenizer
from planner.choice import READING
from runtime.together import is_first, raise_together
from tools.common import answers
from tools.common.report import markdown, write_results
from tools.common.runs import Run, mesh_of, open_run
from tools.line_retrieval.lines import Maker, Task
from train.config.derive import beyond_rope
from train.config.flags import ConfigError
from train.generation import Writer, opened
from train.run import check_writable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SPARE = 8
"""Tokens that an answer may take beyond the right one's before it is cut, as by other spelling."""
MOST_WRONG = 3


@dataclass
class Cell:
    """The questions of one length whose asked line stands at one depth."""

    length: int
    depth: float
    """0 for the first line, 1 for the last."""
    samples: int = 0
    right: int = 0
    wrong: list[dict[str, str]] = field(default_factory=list)
    """The first ones: what was asked, the right answer, and what was written."""

    @property
    def accuracy(self) -> float:
        """The share of right answers."""
        return self.right / self.samples


def depths_of(number: int) -> list[float]:
    """Return equally spaced depths from 0 to 1; one alone is the middle."""
    return [place / (number - 1) for place in range(number)] if number > 1 else [0.5]


def score(
    writer: Writer,
    makers: Iterable[Maker],
    depths: Sequence[float],
    samples: int,
    batch_size: int,
    table: int | None = None,
) -> Iterator[Cell]:
    """Ask so many questions of each maker's length at each depth, so many at once; yield each depth's cell.

    Collective if the writer is: its copies of the model take turns, and every rank gets the whole cell. ``table`` has
    the model's learned positions, beyond which no answer goes.
    """
    for maker in makers:
        for place, depth in enumerate(depths):
            questions = [number * len(depths) + place for number in range(samples)]
            batches = [questions[begin : begin + batch_size] for begin in range(0, samples, batch_size)]
            found = answers.shared(writer, batches, partial(_ask, writer, maker, depth, table))
            wrong = [answer for answer in found if answer is not None]
            yield Cell(maker.task.tokens, depth, samples, samples - len(wrong), wrong[:MOST_WRONG])


def _ask(
    writer: Writer, maker: Maker, depth: float, table: int | None, numbers: Sequence[int]
) -> list[dict[str, str] | None]:
    """Ask questions of these numbers; return of each None if the answer is right, else all three."""
    with raise_together(writer.group):
        asked = [maker.make(number, depth).turns for number in numbers]
        right = [turns[-1]["content"] for turns in asked]
        most = max(len(maker.tokenizer.tokenize(answer)) for answer in right) + SPARE
        prompts, stop = [maker.prompt(turns) for turns in asked], sorted(maker.ends(asked[0]))
        most = most if table is None else min(most, table + 1 - max(map(len, prompts)))
    found: list[dict[str, str] | None] = []
    for turns, answer, ids in zip(asked, right, writer.write(prompts, most, stop=stop), strict=True):
        known = [i for i in ids if i < maker.tokenizer.vocab_size]  # those that pad the vocabulary have no text
        written, question = maker.tokenizer.detokenize(known).strip(), turns[0]["content"].splitlines()[-1]
        wrong = {"question": question, "answer": answer, "written": written}
        found.append(None if written == answer else wrong)
    return found


def score_run(args: argparse.Namespace) -> None:
    """Score a run and write what was found; collective. Raises UserError."""
    run = open_run(args.run, args.ckpt_step)
    lengths, table = sorted(set(args.lengths)), run.config.model.position_table
    if table is not None and lengths[-1] > table:
        raise ConfigError(
            f"lengths names {lengths[-1]}, and the model has max_position_embeddings {table}; give at most that"
        )
    template = load_template(str(run.config.data.tokenizer_model), args.chat_template)
    assert isinstance(run.tokenizer, HuggingFaceTokenizer)  # or load_template would have refused it
    folder = args.save or args.run / "evaluation"
    same: Any = {"purpose": "score", "seed": args.seed, "form": args.form, "vocabulary": args.vocabulary}
    makers = [Maker(Task(tokens=length, **same), template, run.tokenizer) for length in lengths]
    with opened(args.run, args.ckpt_step, replicas=True, choices=READING, **mesh_of(args)) as writer:
        with raise_together():
            if is_first():
                check_writable(folder, "save")
        longest = replace(run.config, train=replace(run.config.train, seq_length=lengths[-1]))
        if is_first() and (note := beyond_rope(longest)):
            print(note, flush=True)
        cells, started = list[Cell](), time.monotonic()
        for cell in score(writer, makers, depths_of(args.depths), args.samples, args.batch_size, table):
            cells.append(cell)
            if is_first():
                seconds = time.monotonic() - started
                where = f"{cell.length} tokens, depth {cell.depth:.0%}"
                print(f"{where}: {cell.right} of {cell.samples} right, {seconds:.1f} s", flush=True)
        if is_first():
            _write(folder, run, args, cells)


def _write(folder: Path, run: Run, args: argparse.Namespace, cells: Sequence[Cell]) -> None:
    where, asked = f"{run.folder}, iteration {run.iteration}", f"{args.form}, {args.vocabulary} vocabulary"
    title = f"{where}: exact answers of {args.samples} at each place, {asked}"
    result: dict[str, Any] = {"run": str(run.folder), "iteration": run.iteration, "form": args.form}
    result |= {"vocabulary": args.vocabulary, "seed": args.seed, "trained_seq_length": run.trained_length}
    result["cells"] = [asdict(cell) | {"accuracy": cell.accuracy} for cell in cells]
    write_results(folder, "line_retrieval", title, table(cells), result, heat_map(cells, args.form))


def table(cells: Sequence[Cell]) -> list[str]:
    """Return the lines of a Markdown table: a row for each length, a column for each depth, and all of a length."""
    depths = sorted({cell.depth for cell in cells})
    rows = []
    for length in sorted({cell.length for cell in cells}):
        row = sorted((cell for cell in cells if cell.length == length), key=lambda cell: cell.depth)
        whole = sum(cell.right for cell in row) / sum(cell.samples for cell in row)
        rows.append([str(length), *(f"{cell.accuracy:.0%}" for cell in row), f"{whole:.1%}"])
    return markdown(["tokens", *(f"{depth:.0%}" for depth in depths), "all"], rows, "---:")


def heat_map(cells: Sequence[Cell], form: str) -> "Figure":
    """Draw the accuracy over length (across) and depth (down)."""
    lengths, depths = sorted({cell.length for cell in cells}), sorted({cell.depth for cell in cells})
    found = {(cell.length, cell.depth): cell.accuracy for cell in cells}
    shares = [[found[length, depth] for length in lengths] for depth in depths]
    label = "depth of the asked line" if form == "lines" else "depth of the needle"
    return answers.heat_map(shares, lengths, [f"{depth:.0%}" for depth in depths], label, "exact answers")
