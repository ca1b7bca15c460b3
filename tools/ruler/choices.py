"""The tasks and files that a command line names, and the makers of their examples."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from data.chat.template import ChatTemplate
from data.tokenizer import Tokenizer
from runtime.errors import DataError
from tools.ruler import lines
from tools.ruler.examples import Maker, Prompts, Purpose, left_out, makers
from tools.ruler.tasks import TASKS, Sources
from tools.ruler.texts import Essays, Questions


def makers_of(
    args: argparse.Namespace,
    lengths: Sequence[int],
    tokenizer: Tokenizer,
    template: Callable[[], ChatTemplate],
    begin: tuple[int, ...],
    purpose: Purpose = "score",
) -> "list[Maker | lines.Maker]":
    """Return a maker for each length and task, and of line retrieval for each depth.

    ``template`` loads the chat template, ``begin`` are the tokens before a base model's prompt.
    Raises DataError: a task or a file is not there, or a length is too short for a task.
    """
    tasks = tasks_of(args)
    chosen: list[Maker | lines.Maker] = []
    if ruler := [task for task in tasks if task != lines.NAME]:
        prompts = Prompts(tokenizer, template() if args.chat else None, begin)
        sources = sources_of(args)
        ruler_makers = makers(
            ruler, lengths, args.seed, prompts, sources, purpose, samples=args.samples
        )
        tell(left_out(ruler_makers))
        chosen += ruler_makers
    if lines.NAME in tasks:
        prompts = Prompts(
            tokenizer, template()
        )  # whatever --chat says: a record is asked about in turns
        depths = 0 if purpose == "train" else args.depths
        settings = {"form": args.form, "vocabulary": args.vocabulary, "questions": args.questions}
        for length in lengths:
            task = lines.Task(tokens=length, purpose=purpose, seed=args.seed, **settings)
            chosen += [lines.Maker(task, prompts, depth, depths) for depth in range(max(1, depths))]
    return chosen


def sources_of(args: argparse.Namespace) -> Sources:
    """Read the files that the command line names. Raises DataError."""
    files = {"qa_1": args.qa_1, "qa_2": args.qa_2}
    return Sources(
        Essays(args.essays),
        {task: Questions(file) for task, file in files.items() if file is not None},
    )


def tasks_of(args: argparse.Namespace) -> list[str]:
    """Return the tasks that are asked for, by default RULER's whose files are given; say which
    others it has.

    Raises DataError: a task that there is not, or whose file is not given.
    """
    files = {"qa_1": args.qa_1, "qa_2": args.qa_2}
    lacking = [task for task, file in files.items() if file is None]
    if not args.tasks and lacking:
        tell(
            [
                f"{', '.join(lacking)} left out: their questions come from files, which --qa-1 and --qa-2 name"
            ]
        )
    for task in args.tasks or ():
        if task not in (*TASKS, lines.NAME):
            raise DataError(
                f"tasks names {task}, and there are {', '.join([*TASKS, lines.NAME])}; name some of these"
            )
        if task in lacking:
            flag, kind = task.replace("_", "-"), "SQuAD's" if task == "qa_1" else "HotpotQA's"
            raise DataError(
                f"tasks names {task}, whose questions come from a file; give --{flag} FILE, {kind} JSON"
            )
    return list(dict.fromkeys(args.tasks or [task for task in TASKS if task not in lacking]))


def tell(notes: Sequence[str]) -> None:
    """Print notes by the first process, before the processes have joined."""
    if os.environ.get("RANK", "0") == "0":
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
