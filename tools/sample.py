"""Print text that a trained model writes: python -m tools.sample --load runs/llama_tiny --prompt "def "."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from checkpoint.api import CheckpointError, find_checkpoint, load_model
from checkpoint.manifest import checkpoint_folder, read_manifest
from data.errors import DataError
from data.fingerprint import digest
from data.tokenizer import load_tokenizer
from model.base import LanguageModel
from model.config import architecture_of
from model.generate import DivergedError, generate
from model.registry import build_model
from planner.complete import with_vocabulary
from runtime.errors import UserError
from tools.arguments import Parser
from train.config.language import Config, ConfigError, load_config


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    args = _parse(argv)
    try:
        sample(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def sample(args: argparse.Namespace) -> None:
    """Print the samples that the command line asks for."""
    config = load_config(args.load / "config.toml")
    if config.data.tokenizer_model is None:
        raise ConfigError(f"{args.load / 'config.toml'}: tokenizer_model is not set; name the tokenizer of the run")
    tokenizer = load_tokenizer(config.data.tokenizer_model)
    folder = find_checkpoint(args.load, args.ckpt_step)
    if folder is None:
        raise CheckpointError(f"{args.load} holds no checkpoint; name the folder that a training run saved to")
    _check_tokenizer(config.data.tokenizer_model, args.load, folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = with_vocabulary(config, tokenizer.vocab_size)
    model, iteration = _load(config, folder, device)

    # Documents follow an end-of-text token: after one, the model takes the prompt for the beginning of a text.
    prompt = [tokenizer.eod, *tokenizer.tokenize(args.prompt)]
    table = config.model.max_position_embeddings
    if table is not None and len(prompt) + args.num_tokens > table + 1:  # the last token drawn is not read again
        raise ConfigError(
            f"num_tokens is {args.num_tokens} after a prompt of {len(prompt)} tokens, and the model's "
            f"max_position_embeddings {table} allows {table + 1} together; lower --num-tokens or shorten --prompt"
        )
    print(f"{args.load}, iteration {iteration}, prompt {args.prompt!r}, {args.num_samples} x {args.num_tokens} tokens")
    if len(prompt) + args.num_tokens > config.train.seq_length:
        print(
            f"note: prompt and tokens are more than the {config.train.seq_length} the model was trained on at a time",
            file=sys.stderr,
        )
    tokens = torch.tensor([prompt] * args.num_samples, device=device)
    generator = torch.Generator(device).manual_seed(args.seed)
    try:
        drawn = generate(model, tokens, args.num_tokens, args.temperature, args.top_k, generator)
    except DivergedError as error:
        raise CheckpointError(
            f"{checkpoint_folder(args.load, iteration)} cannot be drawn from: {error}; its training diverged, so take "
            "an earlier one with --ckpt-step, or train with a lower lr"
        ) from error
    for ids in drawn.tolist():
        written = ids[len(prompt) :]
        if tokenizer.eod in written:
            written = written[: written.index(tokenizer.eod)]
        written = [i for i in written if i < tokenizer.vocab_size]  # entries that pad the vocabulary have no text
        print("-" * 80)
        # One call for both parts: a piece's text can depend on the piece before.
        print(tokenizer.detokenize(prompt[1:] + written))


def _check_tokenizer(path: str, run: Path, folder: Path) -> None:
    """DataError where the file is not the one that the checkpoint was trained with."""
    now = digest(Path(path))
    if (was := read_manifest(folder).extra.get("contents", {}).get("tokenizer_model", now)) != now:
        raise DataError(
            f"{path} is not the tokenizer that {folder} was trained with (digest {was!s:.8}, now {now:.8}); put the "
            f"old file back, or name it as tokenizer_model in {run / 'config.toml'}"
        )


def _load(config: Config, folder: Path, device: torch.device) -> tuple[LanguageModel, int]:
    """The model with the weights of a checkpoint, and its iteration.

    On CUDA in the dtype that the run computed in, on a CPU, where bfloat16 is slow, in float32.
    """
    with torch.device("meta"):
        model = build_model(config.model)
    model.cast(torch.bfloat16 if config.train.bf16 and device.type == "cuda" else torch.float32)
    model.to_empty(device=device)
    return model, load_model(folder, model, architecture_of(config.model)).iteration


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m tools.sample",
        description="Print text that a trained model writes, from the newest whole checkpoint of a run.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--load", type=Path, required=True, metavar="DIR", help="folder of the run")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to load; by default the newest whole one")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="what the text begins with")
    parser.add_argument("--num-samples", type=_at_least(1), default=2, metavar="N", help="texts to write")
    parser.add_argument("--num-tokens", type=_at_least(1), default=160, metavar="N", help="tokens of each, at most")
    parser.add_argument(
        "--temperature", type=_at_least(0.0), default=0.8, metavar="T", help="divides the logits; 0: likeliest token"
    )
    parser.add_argument("--top-k", type=_at_least(1), metavar="K", default=50, help="draw from the K likeliest tokens")
    parser.add_argument("--seed", type=_at_least(0), default=1234, metavar="N", help="seed of the draws")
    return parser.parse_args(argv)


def _at_least(least: int | float) -> Callable[[str], int | float]:
    """A number of `least`'s type that is not below it, for argparse."""

    def number(text: str) -> int | float:
        value = type(least)(text)
        if not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} must be a number of {least} or more")
        return value

    number.__name__ = type(least).__name__  # argparse's "invalid int value"
    return number


if __name__ == "__main__":
    sys.exit(main())
