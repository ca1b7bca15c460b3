"""Score a run on RULER: the mean share of right answers by task and length, in percent as the paper has it."""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from data.chat.template import load_template
from data.ruler.examples import Maker, Prompts, makers
from data.ruler.tasks import Sources
from runtime.together import is_first, raise_together
from tools.common.answers import Answer, Cell, Place, grid, heat_map, score_run, write_scores
from tools.common.report import markdown
from tools.common.runs import Run
from train.generation import Writer

THRESHOLD = 85.6
"""Llama-2-7b-chat's average at 4K, above which the paper calls a length effective (section 4)."""


def place_of(prompts: Prompts, maker: Maker) -> Place:
    """Return the place of a maker's task and length."""

    def ask(writer: Writer, numbers: Sequence[int]) -> list[Answer]:
        with raise_together(writer.group):
            asked = [maker.make(number) for number in numbers]
        ids = writer.write([example.ids for example in asked], asked[0].new_tokens, stop=sorted(prompts.ends))
        found: list[Answer] = []
        for example, written in zip(asked, map(prompts.text, ids), strict=True):
            told = {"number": example.number, "answers": list(example.question.answers), "written": written}
            found.append((example.score(written), told))
        return found

    return Place(maker.name, maker.length, ask)


def score_tasks(args: argparse.Namespace, tasks: Sequence[str], sources: Sources) -> None:
    """Score a run and write what was found; collective. Raises UserError."""

    def places(run: Run, lengths: Sequence[int]) -> Iterator[Place]:
        template = load_template(str(run.config.data.tokenizer_model), args.chat_template) if args.chat else None
        prompts = Prompts(run.tokenizer, template, run.begin)
        return map(partial(place_of, prompts), makers(tasks, lengths, args.seed, prompts, sources))

    run, cells = score_run(args, places, lambda cell: f"{cell.row}: {100 * cell.share:.1f}")
    if is_first():
        by, haystack = "by the chat template" if args.chat else "as of a base model", sources.essays.title
        title = f"RULER, {args.samples} examples of each task and length, prompts {by}, haystack of {haystack}"
        about: dict[str, Any] = {"seed": args.seed, "chat": args.chat, "haystack": haystack}
        about |= {"trained_seq_length": run.trained_length, "cells": [entry(cell) for cell in cells]}
        write_scores(args, run, "ruler", title, about, table(cells), heat_map(cells, str, "task", "right answers"))


def entry(cell: Cell) -> dict[str, Any]:
    """Return a cell as its file has it."""
    scores = {"scores": [share for share, _ in cell.answers], "wrong": cell.wrong, "score": 100 * cell.share}
    return {"task": cell.row, "length": cell.length, **scores}


def table(cells: Sequence[Cell]) -> list[str]:
    """Return a row for each task and the averages, a column for each length and all; and the effective length."""
    tasks, lengths, found = grid(cells)
    rows = {task: [100 * found[task, length].share for length in lengths] for task in tasks}
    rows["average"] = means = [sum(column) / len(tasks) for column in zip(*rows.values(), strict=True)]
    shown = [[name, *(f"{value:.1f}" for value in row), f"{sum(row) / len(row):.1f}"] for name, row in rows.items()]
    effective = [length for length, mean in zip(lengths, means, strict=True) if mean > THRESHOLD]
    said = f"effective length: {max(effective)}" if effective else "effective length: less than all of these"
    return [
        *markdown(["task", *map(str, lengths), "all"], shown, "---:"),
        "",
        f"{said} (the longest whose average is above {THRESHOLD}, Llama-2-7b-chat's at 4K, as in the paper)",
    ]
