"""Read the tasks and files that a command line names, and build the makers of their examples."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from data.chat.template import ChatTemplate
from data.tokenizer import Tokenizer
from runtime.errors import DataError
from tools.ruler import lines
from tools.ruler.examples import ExampleMaker, Purpose, left_out, makers
from tools.ruler.lines import LineMaker, LineTask
from tools.ruler.prompts import Prompts
from tools.ruler.tasks import TASKS, Sources
from tools.ruler.texts import Essays, Questions


def makers_of(
    args: argparse.Namespace,
    lengths: Sequence[int],
    tokenizer: Tokenizer,
    template: Callable[[], ChatTemplate],
    begin: tuple[int, ...],
    purpose: Purpose = "score",
) -> list[ExampleMaker | LineMaker]:
    """Return a maker of examples for each length and task; line retrieval has one per depth.

    ``template`` loads the chat template; ``begin`` holds the tokens that precede a base model's
    prompt. With ``purpose`` "train", the examples are drawn from other hashes than those to score.

    Raises DataError if a task or a file does not exist, or a length is too short for a task.
    """
    tasks = tasks_of(args)
    chosen: list[ExampleMaker | LineMaker] = []
    ruler_tasks = [task for task in tasks if task != lines.NAME]
    if ruler_tasks:
        prompts = Prompts(tokenizer, template() if args.chat else None, begin)
        ruler_makers = makers(
            ruler_tasks,
            lengths,
            args.seed,
            prompts,
            sources_of(args),
            purpose,
            samples=args.samples,
        )
        print_notes(left_out(ruler_makers))
        chosen += ruler_makers

    if lines.NAME in tasks:
        # Line retrieval needs the chat template even without --chat, because the questions about a
        # record are turns of a conversation.
        chosen += _line_makers(args, lengths, Prompts(tokenizer, template()), purpose)

    return chosen


def _line_makers(
    args: argparse.Namespace, lengths: Sequence[int], prompts: Prompts, purpose: Purpose
) -> list[LineMaker]:
    """Return a line-retrieval maker per length and depth; for training, one for all depths."""
    depths = 0 if purpose == "train" else args.depths
    makers = []
    for length in lengths:
        task = LineTask(
            tokens=length,
            purpose=purpose,
            seed=args.seed,
            form=args.form,
            vocabulary=args.vocabulary,
            questions=args.questions,
        )
        for depth in range(max(1, depths)):
            makers.append(LineMaker(task, prompts, depth, depths))

    return makers


def sources_of(args: argparse.Namespace) -> Sources:
    """Read the haystack and the questions from the files that the command line names.

    Raises DataError if a file cannot be read.
    """
    essays = Essays(args.essays)
    files = {"qa_1": args.qa_1, "qa_2": args.qa_2}
    questions = {task: Questions(file) for task, file in files.items() if file is not None}
    return Sources(essays, questions)


def tasks_of(args: argparse.Namespace) -> list[str]:
    """Return the requested tasks; by default, all of RULER's except those without their file.

    In the default case, a note names the tasks that are left out.

    Raises DataError if a requested task is unknown, or the file of its questions is not given.
    """
    files = {"qa_1": args.qa_1, "qa_2": args.qa_2}
    lacking = [task for task, file in files.items() if file is None]
    if not args.tasks:
        if lacking:
            note = (
                f"{', '.join(lacking)} left out, since their questions come from files; "
                "give the files with --qa-1 FILE and --qa-2 FILE"
            )
            print_notes([note])
        return [task for task in TASKS if task not in lacking]

    known_tasks = [*TASKS, lines.NAME]
    for task in args.tasks:
        if task not in known_tasks:
            raise DataError(
                f"--tasks has {task}, but there is no such task; choose from "
                f"{', '.join(known_tasks)}"
            )
        if task in lacking:
            flag = task.replace("_", "-")
            kind = "SQuAD's" if task == "qa_1" else "HotpotQA's"
            raise DataError(
                f"--tasks has {task}, but its questions come from a file; give {kind} JSON with "
                f"--{flag} FILE"
            )

    return list(dict.fromkeys(args.tasks))


def print_notes(notes: Sequence[str]) -> None:
    """Print notes if the variable RANK is 0 or unset, since there is no process group yet."""
    if os.environ.get("RANK", "0") == "0":
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
