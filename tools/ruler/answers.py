"""A run asked questions: its copies over a mesh take turns, and each place, a row and a length, gets a cell."""

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from planner.choice import method_to_read
from runtime.errors import UserError
from runtime.together import gather_results, is_first, raise_together
from tools.common.report import write_results
from tools.common.runs import Run, mesh_of, open_run
from train.config.derive import beyond_rope
from train.config.flags import ConfigError
from train.generation import Writer, opened
from train.run import check_writable
from train.watching import say

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEPT = 3
"""Wrong answers that a cell tells."""
LONGEST = 1 << 24
"""Tokens of a prompt at most: a longer text would take minutes and gigabytes before anything is asked."""
Answer = tuple[float, dict[str, Any]]
"""The share of it that is right, 0 to 1, and what to tell of it where that is below 1."""


@dataclass(frozen=True)
class Place:
    """A row, such as a task or a depth, and a length, with what asks a writer questions of it by their numbers."""

    row: Any
    length: int
    ask: Callable[[Writer, Sequence[int]], list[Answer]]


@dataclass(frozen=True)
class Cell:
    """The answers at a place."""

    row: Any
    length: int
    answers: Sequence[Answer]

    @property
    def share(self) -> float:
        """The mean share of right answers."""
        return fmean(share for share, _ in self.answers)

    @property
    def wrong(self) -> list[dict[str, Any]]:
        """The first answers that are not right."""
        return [told for share, told in self.answers if share < 1][:KEPT]


def ask_all(writer: Writer, place: Place, samples: int, batch_size: int) -> Cell:
    """Ask so many questions, so many at once, each batch of one of the writer's copies; every rank gets the cell."""
    batches = [range(begin, min(begin + batch_size, samples)) for begin in range(0, samples, batch_size)]
    found: dict[int, list[Answer]] = {}
    error: UserError | None = None
    try:
        for turn in range(writer.replica, len(batches), writer.replicas):
            found[turn] = place.ask(writer, batches[turn])
    except UserError as caught:  # the other copies wait for these answers
        error = caught

    def own() -> dict[int, list[Answer]]:
        if error is not None:
            raise error
        return found

    everyone = {turn: answers for part in gather_results(own) for turn, answers in part.items()}
    return Cell(place.row, place.length, [answer for turn in range(len(batches)) for answer in everyone[turn]])


def score_run(
    args: argparse.Namespace,
    places: Callable[[Run, Sequence[int]], Iterable[Place]],
    said: Callable[[Cell], str],
) -> tuple[Run, list[Cell]]:
    """Ask a run at all places, of it and ascending lengths, and print a line for each; collective.

    ``args`` are those of ``add_scoring``. Raises UserError: a length is beyond the model's positions or
    ``LONGEST``, or as ``places``.
    """
    run = open_run(args.run, args.ckpt_step)
    lengths, table = sorted(set(args.lengths)), run.config.model.position_table
    if table is not None and lengths[-1] > table:
        raise ConfigError(
            f"lengths names {lengths[-1]}, and the model has max_position_embeddings {table}, so that prompts would be "
            "cut; give at most that"
        )
    if lengths[-1] > LONGEST:
        raise ConfigError(
            f"lengths names {lengths[-1]}, and texts of up to {LONGEST} tokens are made; give at most that"
        )
    asked = list(places(run, lengths))
    with opened(args.run, args.ckpt_step, replicas=True, choose=method_to_read, **mesh_of(args)) as writer:
        with raise_together():
            if is_first():
                check_writable(_folder(args), "save")
        longest = replace(run.config, train=replace(run.config.train, seq_length=lengths[-1]))
        if note := beyond_rope(longest):
            say(note)
        cells, started = list[Cell](), time.monotonic()
        for place in asked:
            cells.append(ask_all(writer, place, args.samples, args.batch_size))
            say(f"{place.length} tokens, {said(cells[-1])}, {time.monotonic() - started:.1f} s")
    return run, cells


def write_scores(
    args: argparse.Namespace,
    run: Run,
    name: str,
    title: str,
    about: dict[str, Any],
    cells: list[dict[str, Any]],
    table: list[str],
    figure: "Figure",
) -> None:
    """Write what was found of a run: a table, a picture, and figures of ``about`` and of all cells."""
    found = {"run": str(run.folder), "iteration": run.iteration, **about}
    found |= {"trained_seq_length": run.trained_length, "cells": cells}
    write_results(_folder(args), name, f"{run.folder}, iteration {run.iteration}: {title}", table, found, figure)


def _folder(args: argparse.Namespace) -> Path:
    return args.save or args.run / "evaluation"


def grid(cells: Sequence[Cell]) -> tuple[list[Any], list[int], dict[tuple[Any, int], Cell]]:
    """Return rows in their order, ascending lengths, and the cells by both."""
    found = {(cell.row, cell.length): cell for cell in cells}
    return list(dict.fromkeys(cell.row for cell in cells)), sorted({cell.length for cell in cells}), found


def heat_map(cells: Sequence[Cell], name: Callable[[Any], str], label: str, meaning: str) -> "Figure":
    """Draw the shares over lengths in tokens (across) and rows, each with its name (down)."""
    from matplotlib.figure import Figure

    rows, lengths, found = grid(cells)
    shares = [[found[row, length].share for length in lengths] for row in rows]
    figure = Figure(figsize=(2.5 + 0.9 * len(lengths), 1.6 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shares, vmin=0, vmax=1, cmap="cividis", aspect="auto")
    for y, row in enumerate(shares):
        for x, share in enumerate(row):
            axes.text(x, y, f"{share:.0%}", ha="center", va="center", color="white" if share < 0.5 else "black")
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(rows)), map(name, rows))
    axes.set(xlabel="tokens", ylabel=label)
    figure.colorbar(image, label=meaning)
    return figure
