"""Turn text into what pretraining reads: a tokenizer and Megatron's .bin/.idx.

Without flags it takes the Python sources of this machine's standard library, so that a first run needs no download.
What it wrote before with the same flags is kept.

    python -m tools.prepare_data                                   # runs/data/stdlib.bin, .idx, .model and .json
    python -m tools.prepare_data --input books/ --suffix .txt --output-prefix runs/data/books --vocab-size 32000
    python -m tools.prepare_data --input a.jsonl b.jsonl --output-prefix runs/data/ab --tokenizer-model tokenizer.json
    python -m tools.prepare_data --input a.jsonl --json-keys content --output-prefix runs/data/a

Then: pretrain_gpt.py --data-path PREFIX --tokenizer-model PREFIX.model
"""

import argparse
import sys
from pathlib import Path

if not __package__:  # started as a file: the packages lie one folder up
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.arguments import parser_for, run_command

DEFAULT_PREFIX = "runs/data/stdlib"
DEFAULT_VOCAB_SIZE = 4096


def build_parser() -> argparse.ArgumentParser:
    """Build the command line's parser."""
    parser = parser_for("python -m tools.prepare_data", __doc__)
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--stdlib", action="store_true", help="the standard library's sources without its tests, about 12 MB (default)"
    )
    source.add_argument(
        "--input",
        nargs="+",
        metavar="PATH",
        help="text files, .jsonl files (--json-keys), and folders, which are searched for --suffix",
    )
    parser.add_argument(
        "--suffix", default=".txt", help="ending of the files taken from a folder (default: %(default)s)"
    )
    parser.add_argument(
        "--json-keys",
        nargs="+",
        metavar="KEY",
        help="field of the .jsonl files that holds the text (default: text); one, since a prefix holds one corpus",
    )
    parser.add_argument(
        "--output-prefix", metavar="PREFIX", help=f"where to write (default: {DEFAULT_PREFIX}, for --stdlib alone)"
    )
    tokenizer = parser.add_mutually_exclusive_group()
    tokenizer.add_argument("--tokenizer-model", metavar="FILE", help="use this .model or tokenizer.json")
    tokenizer.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help=f"train a tokenizer of N entries beside the output (default: {DEFAULT_VOCAB_SIZE})",
    )
    parser.add_argument("--max-bytes", type=int, metavar="N", help="stop after N bytes of text (default: take all)")
    parser.add_argument("--overwrite", action="store_true", help="write anew what is there already")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.input and not args.output_prefix:
        parser.error("--input needs --output-prefix: where to write")
    keys = args.json_keys or ["text"]
    if len(keys) > 1:
        parser.error(f"--json-keys names {len(keys)} fields, and a prefix holds one corpus; prepare each on its own")
    for name in ("vocab_size", "max_bytes"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be 1 or more")

    from data.errors import DataError
    from data.text.prepare import Request, prepare

    request = Request(
        inputs=tuple(args.input or ()),
        suffix=args.suffix,
        tokenizer_model=args.tokenizer_model,
        vocab_size=None if args.tokenizer_model else args.vocab_size or DEFAULT_VOCAB_SIZE,
        max_bytes=args.max_bytes,
        json_key=keys[0],
    )
    prefix = Path(args.output_prefix or DEFAULT_PREFIX)
    try:
        prepared, kept = prepare(request, prefix, overwrite=args.overwrite)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(
        f"{'kept' if kept else 'wrote'} {prefix}.bin and .idx: {prepared.documents:,} documents, "
        f"{prepared.tokens:,} tokens ({prepared.dtype}), {prepared.text_bytes / prepared.tokens:.2f} bytes per token, "
        f"unigram entropy {prepared.unigram_entropy:.3f} nats per token"
    )
    if prepared.skipped_files:
        print(f"skipped {prepared.skipped_files} files that are not UTF-8")
    print(f"train on it with --data-path {prefix} --tokenizer-model {args.tokenizer_model or f'{prefix}.model'}")
    return 0


if __name__ == "__main__":
    run_command(main)
