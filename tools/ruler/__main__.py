"""Score long contexts by task and length: RULER (arXiv:2404.06654) and line retrieval (LongEval).

    python -m tools.ruler score runs/long --lengths 4096 8192 --samples 20
    torchrun --standalone --nproc-per-node 8 -m tools.ruler score runs/long --lengths 131072 --chat
    torchrun --standalone --nproc-per-node 4 -m tools.ruler score runs/long \\
        --tasks line_retrieval --lengths 65536
    python -m tools.ruler make runs/ruler.jsonl --tasks niah_single_1 vt --lengths 4096 \\
        --samples 100 --tokenizer-model tokenizer.json
    python -m tools.ruler make lines.jsonl --messages --tasks line_retrieval --lengths 1024 \\
        --samples 2000 --questions 8 --vocabulary small --tokenizer-model tokenizer.json

An example fills its length, including the tokens reserved for the answer, and depends only on task,
length, seed, number and tokenizer. `make` writes rows in the benchmark's format; with --messages it
writes conversations to train on, which are drawn from other hashes than the questions of `score`,
whatever the seeds. `model` and `repeat` are for a tiny model that learns to retrieve in minutes
(make ruler, make finetune).

line_retrieval is a record of named lines and a question about one of them, which lies at each of
--depths from the first line (0%) to the last (100%). It always uses the chat template, and an
answer counts only if it is exact. --form chooses the record: in `lines`, every line has a value;
`needle` hides one line with a value among filler sentences; `repeat`, only for --messages, has
names, some with a value, and the answer repeats them, which teaches an untrained model to look
back. The small vocabulary has 1,664 names and 64 values, for a model that `model` writes; the full
one is for a real tokenizer.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.common.arguments import one_line_errors, parser_for, positive, run_command
from tools.common.runs import add_begin, add_scoring

if TYPE_CHECKING:
    from tools.ruler.examples import Example

LINE_DEFAULTS = {"depths": 5, "form": "lines", "vocabulary": "full"}
"""Defaults of the flags that only line_retrieval has, keyed by the flag's name."""


@one_line_errors
def main(argv: list[str]) -> None:
    """Run a subcommand: score, make, model or repeat."""
    args = _parse(argv)
    if args.command == "score":
        from tools.ruler.answers import score_run
        from train.run import run_entry

        run_entry(lambda _: score_run(args))
    elif args.command == "make":
        make(args)
    elif args.command == "model":
        from tools.ruler.tiny import write_model

        print(write_model(args.folder, args.hidden_size, args.seed, args.task, args.model_type))
    else:
        from tools.ruler.tiny import repeated

        conversations = (repeated(n, args.seed, args.times) for n in range(args.samples))
        write_rows(args.output, ({"messages": turns} for turns in conversations))
        print(f"wrote {args.output}: {args.samples:,} conversations of names and numbers to repeat")


def make(args: argparse.Namespace) -> None:
    """Write the examples that the command line asks for.

    Raises DataError if a file for --messages is not .jsonl, or as ``makers_of`` does.
    """
    from data.chat.template import load_template
    from data.tokenizer import load_tokenizer
    from runtime.errors import DataError
    from tools.ruler.choices import makers_of

    if args.messages and args.output.suffix != ".jsonl":
        raise DataError(
            f"{args.output} does not end in .jsonl, but tools.prepare_data recognises rows by that "
            "extension; rename the file"
        )

    tokenizer = load_tokenizer(args.tokenizer_model)
    makers = makers_of(
        args,
        args.lengths,
        tokenizer,
        template=lambda: load_template(args.tokenizer_model, args.chat_template),
        begin=tokenizer.begin(args.add_bos_token or "auto"),
        purpose="train" if args.messages else "score",
    )
    prompt_lengths = []

    def rows() -> Iterator[dict[str, Any]]:
        for number in range(args.samples):
            for maker in makers:
                example = maker.make(number)
                prompt_lengths.append(len(example.ids))
                if args.messages:
                    yield {"messages": example.turns}
                else:
                    yield benchmark_row(example)

    write_rows(args.output, rows())
    mean = sum(prompt_lengths) / len(prompt_lengths)
    print(
        f"wrote {args.output}: {len(prompt_lengths):,} examples, prompts of {mean:,.1f} tokens on "
        "average"
    )


def benchmark_row(example: "Example") -> dict[str, Any]:
    """Return an example as a row with the benchmark's own fields."""
    return {
        "index": example.number,
        "task": example.task,
        "max_length": example.length,
        "input": example.question.text,
        "answer_prefix": example.question.prefix,
        "outputs": example.question.answers,
        "length": len(example.ids) + example.new_tokens,
    }


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as JSON lines; after an error the file is as it was.

    Raises UserError if the file cannot be written, and any error of ``rows``.
    """
    from data.text.indexed import writing

    with writing(path) as (draft,), draft.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line; exit with an error if flags do not go together."""
    parser = parser_for("python -m tools.ruler", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    score_help = "score a run by task and length"
    score = commands.add_parser("score", help=score_help, allow_abbrev=False)
    make = commands.add_parser("make", help="write examples", allow_abbrev=False)
    model_help = "write a tiny model with random weights"
    model = commands.add_parser("model", help=model_help, allow_abbrev=False)
    repeat_help = "write names and numbers to repeat"
    repeat = commands.add_parser("repeat", help=repeat_help, allow_abbrev=False)

    add_scoring(score, "each task and length")
    _add_tasks(score, ["lines", "needle"])
    _add_make(make)
    _add_tasks(make, ["lines", "needle", "repeat"])
    _add_repeat(repeat)
    _add_model(model)
    for command in (score, make, repeat, model):
        command.add_argument("--seed", type=int, default=1, help="default: %(default)s")

    args = parser.parse_args(argv)
    if args.command in ("score", "make") and "line_retrieval" not in (args.tasks or ()):
        for name, default in LINE_DEFAULTS.items():
            if getattr(args, name) != default:
                parser.error(f"--{name} needs --tasks line_retrieval")
    if args.command == "score":
        args.questions = 1
    if args.command == "make":
        if not args.messages and (args.questions > 1 or args.form == "repeat"):
            parser.error("--questions and --form repeat need --messages: conversations to train on")
        args.chat |= args.messages

    return args


def _add_repeat(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("output", type=Path, metavar="OUT.jsonl", help="file with a row for each conversation")
    add(
        "--times",
        type=positive,
        default=4,
        metavar="N",
        help="number of times that the answer repeats the text (default: %(default)s)",
    )
    add("--samples", type=positive, default=100, help="number of rows (default: %(default)s)")


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="folder to create; must not exist")
    add(
        "--task",
        choices=("niah", "line_retrieval"),
        default="niah",
        help=(
            "task whose words the tokenizer has: RULER's needles, or line_retrieval in the small "
            "vocabulary (default: %(default)s)"
        ),
    )
    add("--hidden-size", type=positive, default=64, help="a multiple of 8 (default: %(default)s)")
    add(
        "--model-type",
        metavar="NAME",
        help="model family, one of those in tools/ruler/tiny.toml (default: the first)",
    )


def _add_make(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("output", type=Path, metavar="OUT.jsonl", help="file with a row for each example")
    add("--tokenizer-model", required=True, metavar="FILE", help="tokenizer.json or .model")
    add(
        "--lengths",
        type=positive,
        nargs="+",
        required=True,
        metavar="N",
        help="lengths of prompt and answer together, in tokens",
    )
    add(
        "--samples",
        type=positive,
        default=100,
        help="number of examples of each task and length (default: %(default)s)",
    )
    add(
        "--messages",
        action="store_true",
        help="write conversations to train on, for tools.prepare_data --chat",
    )
    add(
        "--questions",
        type=positive,
        default=1,
        help="number of questions about each record of line_retrieval (default: %(default)s)",
    )


def _add_tasks(parser: argparse.ArgumentParser, forms: list[str]) -> None:
    add = parser.add_argument
    add(
        "--tasks",
        nargs="+",
        metavar="TASK",
        help=(
            "line_retrieval, or tasks of RULER (default: all 13 of RULER; "
            "qa_1 and qa_2 only if their files are given)"
        ),
    )
    add("--chat", action="store_true", help="use the chat template (default: base-model prompts)")
    add(
        "--chat-template",
        metavar="FILE",
        help="chat template (default: that of the run's conversations, or the tokenizer's)",
    )
    add_begin(parser, "prompts of a base model")
    add(
        "--essays",
        type=Path,
        metavar="FILE",
        help="text of the haystack (default: generated sentences)",
    )
    add(
        "--qa-1",
        type=Path,
        metavar="FILE",
        help="SQuAD's JSON, or JSON lines with question, answers and paragraphs",
    )
    add("--qa-2", type=Path, metavar="FILE", help="HotpotQA's JSON, or JSON lines as for --qa-1")

    add = parser.add_argument_group("line_retrieval").add_argument
    add(
        "--depths",
        type=positive,
        default=LINE_DEFAULTS["depths"],
        help="number of depths at which the line asked about may lie (default: %(default)s)",
    )
    see = "see the description above (default: %(default)s)"
    add("--form", choices=forms, default=LINE_DEFAULTS["form"], help=see)
    add("--vocabulary", choices=["small", "full"], default=LINE_DEFAULTS["vocabulary"], help=see)


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
