"""Score a run on lines or needles: how many greedy answers are exact, by length and depth."""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from data.chat.template import load_template
from data.ruler.examples import Prompts
from data.tokenizer import HuggingFaceTokenizer
from runtime.together import is_first, raise_together
from tools.common.answers import Answer, Cell, Place, grid, heat_map, score_run, write_scores
from tools.common.report import markdown
from tools.common.runs import Run
from tools.line_retrieval.lines import Maker, Task
from train.generation import Writer

SPARE = 8
"""Tokens that an answer may take beyond the right one's before it is cut, as by other spelling."""


def depths_of(number: int) -> list[float]:
    """Return equally spaced depths from 0 to 1; one alone is the middle."""
    return [place / (number - 1) for place in range(number)] if number > 1 else [0.5]


def places(makers: Sequence[Maker], depths: Sequence[float], table: int | None = None) -> Iterator[Place]:
    """Yield each maker's length at each depth, with questions of its own.

    ``table`` has the model's learned positions, beyond which no answer goes.
    """

    def ask(maker: Maker, place: int, writer: Writer, numbers: Sequence[int]) -> list[Answer]:
        prompting = Prompts(maker.tokenizer, maker.template)
        with raise_together(writer.group):
            asked = [maker.make(number * len(depths) + place, depths[place]).turns for number in numbers]
            right = [turns[-1]["content"] for turns in asked]
            most = max(len(maker.tokenizer.tokenize(answer)) for answer in right) + SPARE
            prompts = [maker.prompt(turns) for turns in asked]
            most = most if table is None else min(most, table + 1 - max(map(len, prompts)))
        found: list[Answer] = []
        ids_of = writer.write(prompts, most, stop=sorted(prompting.ends))
        for turns, answer, ids in zip(asked, right, ids_of, strict=True):
            written, question = prompting.text(ids), turns[0]["content"].splitlines()[-1]
            found.append((written == answer, {"question": question, "answer": answer, "written": written}))
        return found

    for maker in makers:
        for place, depth in enumerate(depths):
            yield Place(depth, maker.task.tokens, partial(ask, maker, place))


def score_lines(args: argparse.Namespace) -> None:
    """Score a run and write what was found; collective. Raises UserError."""

    def asked(run: Run, lengths: Sequence[int]) -> Iterator[Place]:
        template = load_template(str(run.config.data.tokenizer_model), args.chat_template)
        assert isinstance(run.tokenizer, HuggingFaceTokenizer)  # or load_template would have refused it
        same: Any = {"purpose": "score", "seed": args.seed, "form": args.form, "vocabulary": args.vocabulary}
        makers = [Maker(Task(tokens=length, **same), template, run.tokenizer) for length in lengths]
        return places(makers, depths_of(args.depths), run.config.model.position_table)

    def said(cell: Cell) -> str:
        return f"depth {cell.row:.0%}: {round(cell.share * args.samples)} of {args.samples} right"

    run, cells = score_run(args, asked, said)
    if is_first():
        title = f"exact answers of {args.samples} at each place, {args.form}, {args.vocabulary} vocabulary"
        about: dict[str, Any] = {"form": args.form, "vocabulary": args.vocabulary, "seed": args.seed}
        about |= {"trained_seq_length": run.trained_length, "cells": [entry(cell) for cell in cells]}
        label = "depth of the asked line" if args.form == "lines" else "depth of the needle"
        figure = heat_map(cells, "{:.0%}".format, label, "exact answers")
        write_scores(args, run, "line_retrieval", title, about, table(cells), figure)


def entry(cell: Cell) -> dict[str, Any]:
    """Return a cell as its file has it."""
    samples, right = len(cell.answers), sum(share == 1 for share, _ in cell.answers)
    place = {"length": cell.length, "depth": cell.row}
    return {**place, "samples": samples, "right": right, "wrong": cell.wrong, "accuracy": cell.share}


def table(cells: Sequence[Cell]) -> list[str]:
    """Return the lines of a Markdown table: a row for each length, a column for each depth, and all of a length."""
    depths, lengths, found = grid(cells)
    rows = []
    for length in lengths:
        row = [found[depth, length].share for depth in depths]
        rows.append([str(length), *(f"{share:.0%}" for share in row), f"{sum(row) / len(row):.1%}"])
    return markdown(["tokens", *(f"{depth:.0%}" for depth in depths), "all"], rows, "---:")
