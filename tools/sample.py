"""Print text that a trained model writes, from the newest whole checkpoint of a run.

    python -m tools.sample --load runs/llama_tiny --prompt "def "
    torchrun --standalone --nproc-per-node 4 -m tools.sample --load runs/llama_512k \\
        --prompt-file book.txt --num-samples 1 --temperature 0

Processes share the prompts (context parallelism), unless flags let them share the matrices or the layers.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checkpoint.manifest import CheckpointError
from data.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer
from model.generate import DivergedError, Draw
from planner.choice import method_to_read
from runtime.errors import DataError
from runtime.together import is_first
from tools.common.arguments import at_least, parser_for, positive, refuse_folder
from tools.common.runs import Run, add_begin, add_mesh, mesh_of, open_run
from train.config.flags import ConfigError
from train.generation import Writer, opened
from train.run import run_entry


def main(argv: list[str]) -> None:
    """Run the command."""
    parser = parser_for("python -m tools.sample", __doc__)
    add, given = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    add("--load", type=Path, required=True, metavar="DIR", help="folder of the run")
    given("--prompt", default="", metavar="TEXT", help="what the text begins with; by default nothing")
    given("--prompt-file", type=Path, metavar="FILE", help="file with what the text begins with")
    add("--by-line", action="store_true", help="take each line of the file for a prompt")
    add("--num-samples", type=positive, default=2, metavar="N", help="texts of each prompt (2)")
    add("--num-tokens", type=positive, default=160, metavar="N", help="tokens of each (160)")
    temperature = "divides logits; 0: likeliest token (0.8)"
    add("--temperature", type=at_least(0.0), default=0.8, metavar="T", help=temperature)
    add("--top-k", type=positive, metavar="K", default=50, help="of the K likeliest tokens (50)")
    add("--top-p", type=float, metavar="P", help="of the fewest of these with probability P together")
    add("--stop", nargs="+", default=[], metavar="TOKEN", help="texts or numbers of tokens that end a text too")
    add("--seed", type=at_least(0), default=1234, metavar="N", help="seed of the draws (1234)")
    add_begin(parser, "the prompts")
    add_mesh(parser)
    args = parser.parse_args(argv)
    if args.by_line and args.prompt_file is None:
        parser.error("--by-line takes the lines of --prompt-file; give one")
    draw = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    Draw(**draw)
    run = open_run(args.load, args.ckpt_step)
    tokenizer = run.tokenizer
    texts, stop = _prompts(args), [tokenizer.eod, *(_token(tokenizer, text) for text in args.stop)]
    with opened(args.load, args.ckpt_step, choose=method_to_read, **mesh_of(args)) as writer:
        _sample(writer, run, args, texts, stop, draw)


def _sample(
    writer: Writer, run: Run, args: argparse.Namespace, texts: Sequence[str], stop: Sequence[int], draw: dict[str, Any]
) -> None:
    """Write, and print on the first rank; collective."""
    tokenizer = run.tokenizer
    begin = run.begin(args.add_bos_token)
    # An empty prompt needs a token to begin with: the one that documents follow.
    first = list(begin) if begin or all(texts) else [tokenizer.eod]
    prompts = [[*first, *tokenizer.tokenize(text)] for text in texts for _ in range(args.num_samples)]
    longest = max(map(len, prompts))
    if (lacking := tokenizer.missing(run.config.model.vocabulary, max(map(max, prompts)))) is not None:
        raise DataError(f"a prompt has a token that the model lacks: {lacking}")
    writer.check(prompts, args.num_tokens)
    if is_first():
        named = f"prompt {texts[0]!r:.200}" if len(texts) == 1 else f"{len(texts)} prompts"
        print(f"{args.load}, iteration {writer.iteration}, {named}, {args.num_samples} x {args.num_tokens} tokens")
        if run.trained_length is not None and longest + args.num_tokens > run.trained_length:
            note = f"prompt and tokens are more than the {run.trained_length} the model was trained on at a time"
            print(f"note: {note}", file=sys.stderr)
    try:
        written = writer.write(prompts, args.num_tokens, stop=stop, seed=args.seed, **draw)
    except DivergedError as error:
        raise CheckpointError(
            f"{writer.folder} cannot be drawn from: {error}; its training diverged, so take an earlier one with "
            "--ckpt-step, or train with a lower lr"
        ) from error
    for prompt, ids in zip(prompts, written, strict=True):
        if is_first():
            ids = [i for i in ids if i < tokenizer.vocab_size]  # padding of the vocabulary has no text
            # One call for both parts: a piece's text can depend on the piece before.
            shown = prompt[len(first) :]
            text = tokenizer.detokenize([*shown, *ids])
            print("-" * 80)
            print(text if args.prompt_file is None else text[len(tokenizer.detokenize(shown)) :])


def _prompts(args: argparse.Namespace) -> list[str]:
    """Return the texts to continue."""
    if args.prompt_file is None:
        return [args.prompt]
    refuse_folder("--prompt-file", args.prompt_file)
    try:
        text = args.prompt_file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"--prompt-file is {args.prompt_file}, which does not exist; check the path") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{args.prompt_file} is not UTF-8 ({error}); convert it") from error
    found = [line for line in text.split("\n") if line.strip()] if args.by_line else [text]
    if not found:
        raise DataError(f"{args.prompt_file} has no line that is not empty; write a prompt per line")
    return found


def _token(tokenizer: SentencePieceTokenizer | HuggingFaceTokenizer, text: str) -> int:
    """Return the token of a number or a text."""
    if text.isdecimal():
        ids = [int(text)]
    elif isinstance(tokenizer, HuggingFaceTokenizer):
        ids = tokenizer.tokenize_special(text)[0]
    else:
        ids = tokenizer.tokenize(text)
    if len(ids) != 1 or ids[0] >= tokenizer.vocab_size:
        raise ConfigError(
            f"stop names {text!r}, which is not one token of {tokenizer.path} but {ids}; name a token of it by its "
            f"text or number, 0 to {tokenizer.vocab_size - 1}"
        )
    return ids[0]


if __name__ == "__main__":
    run_entry(main)
