"""RULER (Hsieh et al. 2024, arXiv:2404.06654): score a run by task and length, or make the examples.

    python -m tools.ruler score runs/long --lengths 4096 8192 --samples 20
    torchrun --standalone --nproc-per-node 8 -m tools.ruler score runs/long --lengths 131072 --chat
    python -m tools.ruler make runs/ruler.jsonl --tasks niah_single_1 vt --lengths 4096 --samples 100 \\
        --tokenizer-model tokenizer.json

An example fills its length, the tokens kept for the answer included, and depends on task, length, seed, number and
tokenizer alone. make writes rows as the benchmark's own; with --messages they are conversations to train on, drawn from
other hashes than what score asks, whatever the seeds.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.common.arguments import one_line_errors, parser_for, positive, run_command
from tools.common.report import markdown
from tools.common.runs import Run, add_begin, add_scoring

if TYPE_CHECKING:
    from tools.ruler.answers import Answer, Cell, Place
    from tools.ruler.examples import Maker, Prompts, Purpose
    from tools.ruler.tasks import Sources
    from train.generation import Writer

THRESHOLD = 85.6
"""Llama-2-7b-chat's average at 4K, above which the paper calls a length effective (section 4)."""


@one_line_errors
def main(argv: list[str]) -> None:
    """Run the command."""
    args = _parse(argv)
    if args.command == "score":
        from train.run import run_entry

        run_entry(lambda _: score_tasks(args, tasks_of(args), sources_of(args)))
    elif args.command == "model":
        from tools.ruler.tiny import tokenizer_of_needles, write_model

        print(write_model(args.folder, args.hidden_size, args.seed, tokenizer_of_needles, tie_word_embeddings=True))
    elif args.command == "repeat":
        from tools.ruler.lines import write_rows
        from tools.ruler.tiny import repeated

        write_rows(
            args.output, ({"messages": repeated(sample, args.seed, args.times)} for sample in range(args.samples))
        )
        print(f"wrote {args.output}: {args.samples:,} conversations of names and numbers to say again")
    else:
        make(args)


def make(args: argparse.Namespace) -> None:
    """Write the examples that the command line asks for. Raises DataError."""
    from data.chat.template import load_template
    from data.tokenizer import load_tokenizer
    from tools.ruler.examples import Prompts, answer_of, left_out, makers
    from tools.ruler.lines import write_rows

    tokenizer = load_tokenizer(args.tokenizer_model)
    chat = args.chat or args.messages
    template = load_template(args.tokenizer_model, args.chat_template) if chat else None
    prompts = Prompts(tokenizer, template, tokenizer.begin(args.add_bos_token or "auto"))
    purpose: Purpose = "train" if args.messages else "score"
    tasks, tokens = tasks_of(args), 0
    makes = makers(tasks, args.lengths, args.seed, prompts, sources_of(args), purpose, samples=args.samples)
    _tell(left_out(makes))

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal tokens
        for number in range(args.samples):
            for made in (maker.make(number) for maker in makes):
                asked, tokens = made.question, tokens + len(made.ids)
                if args.messages:
                    turns = ("user", asked.text), ("assistant", asked.prefix + answer_of(asked))
                    yield {"messages": [{"role": role, "content": text} for role, text in turns]}
                else:
                    row = {"index": number, "task": made.task, "max_length": made.length, "input": asked.text}
                    row |= {"answer_prefix": asked.prefix, "outputs": asked.answers}
                    yield row | {"length": len(made.ids) + made.new_tokens}

    write_rows(args.output, rows())
    count = args.samples * len(makes)
    print(f"wrote {args.output}: {count:,} examples, prompts of {tokens / count:,.1f} tokens in the mean")


def sources_of(args: argparse.Namespace) -> "Sources":
    """Read the files that the command line names. Raises DataError."""
    from tools.ruler.tasks import Sources
    from tools.ruler.texts import Essays, Questions

    files = {"qa_1": args.qa_1, "qa_2": args.qa_2}
    return Sources(Essays(args.essays), {task: Questions(file) for task, file in files.items() if file is not None})


def tasks_of(args: argparse.Namespace) -> list[str]:
    """Return the tasks that are asked for, by default all whose files are given; say which others there are.

    Raises DataError: a task that there is not, or whose file is not given.
    """
    from runtime.errors import DataError
    from tools.ruler.tasks import TASKS

    given = {"qa_1": args.qa_1, "qa_2": args.qa_2}
    there = [task for task in TASKS if given.get(task, True) is not None]
    if not args.tasks and len(there) < len(TASKS):
        without = ", ".join(task for task in TASKS if task not in there)
        _tell([f"{without} left out: their questions come from files, which --qa-1 and --qa-2 name"])
    for task in args.tasks or ():
        if task not in TASKS:
            raise DataError(f"tasks names {task}, and there are {', '.join(TASKS)}; name some of these")
        if task not in there:
            flag, kind = task.replace("_", "-"), "SQuAD's" if task == "qa_1" else "HotpotQA's"
            raise DataError(f"tasks names {task}, whose questions come from a file; give --{flag} FILE, {kind} JSON")
    return list(dict.fromkeys(args.tasks or there))


def _tell(notes: Sequence[str]) -> None:
    """Print notes by the first process, before the processes have joined."""
    if os.environ.get("RANK", "0") == "0":
        for note in notes:
            print(f"note: {note}", file=sys.stderr)


def place_of(prompts: "Prompts", maker: "Maker") -> "Place":
    """Return the place of a maker's task and length."""
    from runtime.together import raise_together
    from tools.ruler.answers import Place

    def ask(writer: "Writer", numbers: Sequence[int]) -> "list[Answer]":
        with raise_together(writer.group):
            asked = [maker.make(number) for number in numbers]
        ids = writer.write([example.ids for example in asked], asked[0].new_tokens, stop=sorted(prompts.ends))
        found: list[Answer] = []
        for example, written in zip(asked, map(prompts.text, ids), strict=True):
            told = {"number": example.number, "answers": list(example.question.answers), "written": written}
            found.append((example.score(written), told))
        return found

    return Place(maker.name, maker.length, ask)


def score_tasks(args: argparse.Namespace, tasks: Sequence[str], sources: "Sources") -> None:
    """Score a run and write what was found; collective. Raises UserError."""
    from runtime.together import is_first
    from tools.ruler.answers import heat_map, score_run, write_scores
    from tools.ruler.examples import Prompts, left_out, makers

    def places(run: Run, lengths: Sequence[int]) -> "Iterator[Place]":
        template = run.template(args.chat_template) if args.chat else None
        prompts = Prompts(run.tokenizer, template, run.begin(args.add_bos_token))
        makes = makers(tasks, lengths, args.seed, prompts, sources, samples=args.samples)
        _tell(left_out(makes))
        return map(partial(place_of, prompts), makes)

    run, cells = score_run(args, places, lambda cell: f"{cell.row}: {100 * cell.share:.1f}")
    if is_first():
        by, haystack = "by the chat template" if args.chat else "as of a base model", sources.essays.title
        title = f"RULER, {args.samples} examples of each task and length, prompts {by}, haystack of {haystack}"
        about: dict[str, Any] = {"seed": args.seed, "chat": args.chat, "haystack": haystack}
        figure = heat_map(cells, str, "task", "right answers")
        write_scores(args, run, "ruler", title, about, list(map(entry, cells)), table(cells), figure)


def entry(cell: "Cell") -> dict[str, Any]:
    """Return a cell as its file has it."""
    scores = {"scores": [share for share, _ in cell.answers], "wrong": cell.wrong, "score": 100 * cell.share}
    return {"task": cell.row, "length": cell.length, **scores}


def table(cells: "Sequence[Cell]") -> list[str]:
    """Return a row for each task and the averages, a column for each length and all; and the effective length."""
    from tools.ruler.answers import grid

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


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = parser_for("python -m tools.ruler", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    score = commands.add_parser("score", help="score a run by task and length", allow_abbrev=False)
    make = commands.add_parser("make", help="write examples", allow_abbrev=False)
    model = commands.add_parser("model", help="write a tiny LLaMA of the needles' words", allow_abbrev=False)
    repeat = commands.add_parser("repeat", help="write names and numbers to say again", allow_abbrev=False)
    for command in (make, repeat):
        command.add_argument("output", type=Path, metavar="OUT.jsonl", help="a row for each example")
    make.add_argument("--tokenizer-model", required=True, metavar="FILE", help="tokenizer.json or .model")
    length = "tokens of prompt and answer"
    make.add_argument("--lengths", type=positive, nargs="+", required=True, metavar="N", help=length)
    make.add_argument("--samples", type=positive, default=100, help="of each task and length (default: %(default)s)")
    add_scoring(score, "each task and length")
    for command in (score, make):
        add = command.add_argument
        add("--tasks", nargs="+", metavar="TASK", help="default: all 13, those of questions with their files")
        add("--chat", action="store_true", help="prompts by the chat template; else as of a base model")
        add("--chat-template", metavar="FILE", help="default: that of the run's conversations, or the tokenizer's")
        add_begin(command, "prompts of a base model")
        add("--essays", type=Path, metavar="FILE", help="haystack (default: made sentences)")
        add("--qa-1", type=Path, metavar="FILE", help="SQuAD's JSON, or lines of question, answers, paragraphs")
        add("--qa-2", type=Path, metavar="FILE", help="HotpotQA's JSON, or lines likewise")
    make.add_argument(
        "--messages", action="store_true", help="conversations to train on, for tools.prepare_data --chat"
    )
    repeat.add_argument("--times", type=positive, default=4, metavar="N", help="how often (default: %(default)s)")
    repeat.add_argument("--samples", type=positive, default=100, help="conversations (default: %(default)s)")
    model.add_argument("folder", type=Path, metavar="DIR", help="where to write it; must not exist")
    model.add_argument("--hidden-size", type=positive, default=64, help="a multiple of 8 (default: %(default)s)")
    for command in (score, make, repeat, model):
        command.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
