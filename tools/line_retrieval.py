"""Line retrieval: make conversations that teach it, and score a run by length and depth.

    python -m tools.line_retrieval make lines.jsonl --tokens 1024 --samples 2000 --seed 1 --questions 8 \\
        --vocabulary small --tokenizer-model tokenizer.json
    python -m tools.line_retrieval score runs/long --lengths 1024 2048 4096 --depths 5 --samples 20
    torchrun --standalone --nproc-per-node 4 -m tools.line_retrieval score runs/long --lengths 65536 1048576
    torchrun --standalone --nproc-per-node 4 -m tools.line_retrieval score runs/long --lengths 1024 \\
        --context-parallel-size 1

A conversation is a record of named lines and questions for some of them, as many lines as fit the tokens. What make
draws, score never asks: the two draw from other hashes, whatever their seeds. Of its forms, `lines` asks for a line's
value, `needle` hides one sentence among others that say nothing, and `repeat` is a record of names to say again, some
with a value, which teaches a model from nothing to look back. The small vocabulary has 1,664 names and 64 values, for a
model that `model` writes; the full one is for a real tokenizer. `make finetune` uses all of it
(configs/runs/finetune_tiny.sh).
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.common.arguments import one_line_errors, parser_for, positive, run_command
from tools.common.report import markdown
from tools.common.runs import Run, add_scoring

if TYPE_CHECKING:
    from tools.ruler.answers import Answer, Cell, Place
    from tools.ruler.lines import Maker
    from train.generation import Writer

SPARE = 8
"""Tokens that an answer may take beyond the right one's before it is cut, as by other spelling."""


@one_line_errors
def main(argv: list[str]) -> None:
    """Run the command."""
    if argv[:1] == ["score"]:
        from train.run import run_entry

        run_entry(lambda argv: score_lines(_parse(argv)))
    args = _parse(argv)
    if args.command == "model":
        from tools.ruler.tiny import tokenizer_of_words, write_model

        print(write_model(args.folder, args.hidden_size, args.seed, tokenizer_of_words, args.model_type))
    else:
        make(args)


def make(args: argparse.Namespace) -> None:
    """Write the conversations that the command line asks for. Raises DataError."""
    from data.chat.template import load_template
    from data.tokenizer import HuggingFaceTokenizer, load_tokenizer
    from runtime.errors import DataError
    from tools.ruler.lines import Maker, Task, write_rows

    if args.output.suffix != ".jsonl":
        raise DataError(f"{args.output} does not end in .jsonl, by which tools.prepare_data knows rows; rename it")
    tokenizer = load_tokenizer(args.tokenizer_model)
    template = load_template(args.tokenizer_model, args.chat_template)
    assert isinstance(tokenizer, HuggingFaceTokenizer)  # or load_template would have refused it
    asked = {name: getattr(args, name) for name in ("tokens", "seed", "form", "vocabulary", "questions")}
    maker, lines, tokens = Maker(Task(purpose="train", **asked), template, tokenizer), 0, 0

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal lines, tokens
        for made in map(maker.make, range(args.samples)):
            lines, tokens = lines + made.lines, tokens + made.tokens
            yield {"messages": made.turns}

    write_rows(args.output, rows())
    print(
        f"wrote {args.output}: {args.samples:,} conversations of {lines / args.samples:.1f} lines, "
        f"{args.questions} questions and {tokens / args.samples:.1f} of {args.tokens} tokens in the mean"
    )
    print(
        f"pack them with python -m tools.prepare_data --chat --input {args.output} --seq-length {args.tokens} "
        f"--tokenizer-model {args.tokenizer_model} --output-prefix PREFIX"
    )


def depths_of(number: int) -> list[float]:
    """Return equally spaced depths from 0 to 1; one alone is the middle."""
    return [place / (number - 1) for place in range(number)] if number > 1 else [0.5]


def places(makers: "Sequence[Maker]", depths: Sequence[float], table: int | None = None) -> "Iterator[Place]":
    """Yield each maker's length at each depth, with questions of its own.

    ``table`` has the model's learned positions, beyond which no answer goes.
    """
    from runtime.together import raise_together
    from tools.ruler.answers import Place
    from tools.ruler.examples import Prompts

    def ask(maker: "Maker", place: int, writer: "Writer", numbers: Sequence[int]) -> "list[Answer]":
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
    from data.tokenizer import HuggingFaceTokenizer
    from runtime.together import is_first
    from tools.ruler.answers import heat_map, score_run, write_scores
    from tools.ruler.lines import Maker, Task

    def asked(run: Run, lengths: Sequence[int]) -> "Iterator[Place]":
        template = run.template(args.chat_template)
        assert isinstance(run.tokenizer, HuggingFaceTokenizer)  # or load_template would have refused it
        same: Any = {"purpose": "score", "seed": args.seed, "form": args.form, "vocabulary": args.vocabulary}
        makers = [Maker(Task(tokens=length, **same), template, run.tokenizer) for length in lengths]
        return places(makers, depths_of(args.depths), run.config.model.position_table)

    def said(cell: "Cell") -> str:
        return f"depth {cell.row:.0%}: {round(cell.share * args.samples)} of {args.samples} right"

    run, cells = score_run(args, asked, said)
    if is_first():
        title = f"exact answers of {args.samples} at each place, {args.form}, {args.vocabulary} vocabulary"
        about: dict[str, Any] = {"form": args.form, "vocabulary": args.vocabulary, "seed": args.seed}
        label = "depth of the asked line" if args.form == "lines" else "depth of the needle"
        figure = heat_map(cells, "{:.0%}".format, label, "exact answers")
        write_scores(args, run, "line_retrieval", title, about, list(map(entry, cells)), table(cells), figure)


def entry(cell: "Cell") -> dict[str, Any]:
    """Return a cell as its file has it."""
    samples, right = len(cell.answers), sum(share == 1 for share, _ in cell.answers)
    place = {"length": cell.length, "depth": cell.row}
    return {**place, "samples": samples, "right": right, "wrong": cell.wrong, "accuracy": cell.share}


def table(cells: "Sequence[Cell]") -> list[str]:
    """Return the lines of a Markdown table: a row for each length, a column for each depth, and all of a length."""
    from tools.ruler.answers import grid

    depths, lengths, found = grid(cells)
    rows = []
    for length in lengths:
        row = [found[depth, length].share for depth in depths]
        rows.append([str(length), *(f"{share:.0%}" for share in row), f"{sum(row) / len(row):.1%}"])
    return markdown(["tokens", *(f"{depth:.0%}" for depth in depths), "all"], rows, "---:")


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = parser_for("python -m tools.line_retrieval", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make", help="write conversations to train on", allow_abbrev=False)
    model = commands.add_parser("model", help="write a tiny model of the small vocabulary", allow_abbrev=False)
    score = commands.add_parser("score", help="count right answers by length and depth", allow_abbrev=False)
    add = make.add_argument
    add("output", type=Path, metavar="OUT.jsonl", help="OpenAI messages, for tools.prepare_data --chat")
    add("--tokens", type=positive, default=1024, help="most tokens of each (default: %(default)s)")
    add("--samples", type=positive, default=2000, help="conversations (default: %(default)s)")
    add("--questions", type=positive, default=1, help="asked of each (default: %(default)s)")
    add("--tokenizer-model", required=True, metavar="FILE", help="a tokenizer.json")
    add = model.add_argument
    add("folder", type=Path, metavar="DIR", help="where to write it; must not exist")
    add("--hidden-size", type=positive, default=64, help="a multiple of 8 (default: %(default)s)")
    add("--model-type", choices=("llama", "qwen3_5"), default="llama", help="its family (default: %(default)s)")
    add_scoring(score, "each place")
    score.add_argument("--depths", type=positive, default=5, help="places of the asked line (default: %(default)s)")
    see = "see above (default: %(default)s)"
    for command, forms in ((make, ["lines", "needle", "repeat"]), (score, ["lines", "needle"])):
        command.add_argument("--form", choices=forms, default="lines", help=see)
        command.add_argument("--vocabulary", choices=["small", "full"], default="full", help=see)
        command.add_argument("--chat-template", metavar="FILE", help="default: the tokenizer's")
    for command in (make, model, score):
        command.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
