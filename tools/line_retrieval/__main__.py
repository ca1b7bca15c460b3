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
with a value, which teaches a model from nothing to look back. The small vocabulary has 1,732 words, for a model that
`model` writes; the full one is for a real tokenizer. `make finetune` uses all of it (configs/runs/finetune_tiny.sh).
"""

import argparse
import json
import sys
from pathlib import Path

from tools.common.arguments import one_line_errors, parser_for, positive, run_command


@one_line_errors
def main(argv: list[str]) -> None:
    """Run the command."""
    if argv[:1] == ["score"]:
        from tools.line_retrieval.score import score_lines
        from train.run import run_entry

        run_entry(lambda argv: score_lines(_parse(argv)))
    args = _parse(argv)
    if args.command == "model":
        from tools.line_retrieval.tiny import write_model

        print(write_model(args.folder, args.hidden_size, args.seed, model_type=args.model_type))
    else:
        make(args)


def make(args: argparse.Namespace) -> None:
    """Write the conversations that the command line asks for. Raises DataError."""
    from data.chat.template import load_template
    from data.text.indexed import writing
    from data.tokenizer import HuggingFaceTokenizer, load_tokenizer
    from runtime.errors import DataError
    from tools.line_retrieval.lines import Maker, Task

    if args.output.suffix != ".jsonl":
        raise DataError(f"{args.output} does not end in .jsonl, by which tools.prepare_data knows rows; rename it")
    tokenizer = load_tokenizer(args.tokenizer_model)
    template = load_template(args.tokenizer_model, args.chat_template)
    assert isinstance(tokenizer, HuggingFaceTokenizer)  # or load_template would have refused it
    asked = {name: getattr(args, name) for name in ("tokens", "seed", "form", "vocabulary", "questions")}
    maker = Maker(Task(purpose="train", **asked), template, tokenizer)
    lines, tokens = 0, 0
    with writing(args.output) as (draft,), draft.open("w", encoding="utf-8") as file:
        for sample in range(args.samples):
            made = maker.make(sample)
            lines, tokens = lines + made.lines, tokens + made.tokens
            file.write(json.dumps({"messages": made.turns}) + "\n")
    print(
        f"wrote {args.output}: {args.samples:,} conversations of {lines / args.samples:.1f} lines, "
        f"{args.questions} questions and {tokens / args.samples:.1f} of {args.tokens} tokens in the mean"
    )
    print(
        f"pack them with python -m tools.prepare_data --chat --input {args.output} --seq-length {args.tokens} "
        f"--tokenizer-model {args.tokenizer_model} --output-prefix PREFIX"
    )


def _parse(argv: list[str]) -> argparse.Namespace:
    from tools.common.runs import add_scoring

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
