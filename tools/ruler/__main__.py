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
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.common.arguments import one_line_errors, parser_for, positive, run_command

if TYPE_CHECKING:
    from data.ruler.tasks import Sources


@one_line_errors
def main(argv: list[str]) -> None:
    """Run the command."""
    args = _parse(argv)
    if args.command == "score":
        from tools.ruler.score import score_tasks
        from train.run import run_entry

        run_entry(lambda _: score_tasks(args, tasks_of(args), sources_of(args)))
    elif args.command == "model":
        from tools.line_retrieval.tiny import write_model
        from tools.ruler.tiny import tokenizer_of_needles

        print(write_model(args.folder, args.hidden_size, args.seed, tokenizer_of_needles, tie_word_embeddings=True))
    elif args.command == "repeat":
        from data.text.indexed import writing
        from tools.ruler.tiny import repeated

        with writing(args.output) as (draft,), draft.open("w", encoding="utf-8") as file:
            for sample in range(args.samples):
                file.write(json.dumps({"messages": repeated(sample, args.seed, args.times)}) + "\n")
        print(f"wrote {args.output}: {args.samples:,} conversations of names and numbers to say again")
    else:
        make(args)


def make(args: argparse.Namespace) -> None:
    """Write the examples that the command line asks for. Raises DataError."""
    from data.chat.template import load_template
    from data.ruler.examples import Prompts, Purpose, answer_of, makers
    from data.text.indexed import writing
    from data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(args.tokenizer_model)
    chat = args.chat or args.messages
    template = load_template(args.tokenizer_model, args.chat_template) if chat else None
    begin = tokenizer.eod if tokenizer.bos is None else tokenizer.bos
    prompts = Prompts(tokenizer, template, (begin,))
    purpose: Purpose = "train" if args.messages else "score"
    makes, tokens = makers(tasks_of(args), args.lengths, args.seed, prompts, sources_of(args), purpose), 0
    with writing(args.output) as (draft,), draft.open("w", encoding="utf-8") as file:
        for number in range(args.samples):
            for maker in makes:
                made = maker.make(number)
                asked, tokens = made.question, tokens + len(made.ids)
                row: dict[str, Any]
                if args.messages:
                    turns = ("user", asked.text), ("assistant", asked.prefix + answer_of(asked))
                    row = {"messages": [{"role": role, "content": text} for role, text in turns]}
                else:
                    row = {"index": number, "task": made.task, "max_length": made.length, "input": asked.text}
                    row |= {"answer_prefix": asked.prefix, "outputs": asked.answers}
                    row |= {"length": len(made.ids) + made.new_tokens}
                file.write(json.dumps(row) + "\n")
    count = args.samples * len(makes)
    print(f"wrote {args.output}: {count:,} examples, prompts of {tokens / count:,.1f} tokens in the mean")


def sources_of(args: argparse.Namespace) -> "Sources":
    """Read the files that the command line names. Raises DataError."""
    from data.ruler.documents import Questions
    from data.ruler.tasks import Sources
    from data.ruler.texts import Essays

    files = {"qa_1": args.qa_1, "qa_2": args.qa_2}
    return Sources(Essays(args.essays), {task: Questions(file) for task, file in files.items() if file is not None})


def tasks_of(args: argparse.Namespace) -> list[str]:
    """Return the tasks that are asked for, by default all whose files are given; say which others there are.

    Raises DataError: a task that there is not, or whose file is not given.
    """
    from data.ruler.tasks import TASKS
    from runtime.errors import DataError

    given = {"qa_1": args.qa_1, "qa_2": args.qa_2}
    there = [task for task in TASKS if given.get(task, True) is not None]
    if not args.tasks and len(there) < len(TASKS) and os.environ.get("RANK", "0") == "0":
        without = ", ".join(task for task in TASKS if task not in there)
        fix = "their questions come from files, which --qa-1 and --qa-2 name"
        print(f"note: {without} left out: {fix}", file=sys.stderr)
    for task in args.tasks or ():
        if task not in TASKS:
            raise DataError(f"tasks names {task}, and there are {', '.join(TASKS)}; name some of these")
        if task not in there:
            flag, kind = task.replace("_", "-"), "SQuAD's" if task == "qa_1" else "HotpotQA's"
            raise DataError(f"tasks names {task}, whose questions come from a file; give --{flag} FILE, {kind} JSON")
    return list(dict.fromkeys(args.tasks or there))


def _parse(argv: list[str]) -> argparse.Namespace:
    from tools.common.runs import add_scoring

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
        add("--chat-template", metavar="FILE", help="default: the tokenizer's")
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
