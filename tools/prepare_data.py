"""Turn text or conversations into training data: a tokenizer and Megatron's .bin/.idx.

Without flags it takes the Python sources of this machine's standard library, so that a first run
needs no download. Data that it wrote before with the same flags is kept; if an input file has
changed since, it stops and asks for --overwrite.

    python -m tools.prepare_data                      # runs/data/stdlib.bin, .idx, .model and .json
    python -m tools.prepare_data --input books/ --suffix .txt --output-prefix runs/data/books \\
        --vocab-size 32000
    python -m tools.prepare_data --input a.jsonl b.jsonl --output-prefix runs/data/ab \\
        --tokenizer-model tokenizer.json
    python -m tools.prepare_data --input a.jsonl --json-keys content --output-prefix runs/data/a
    python -m tools.prepare_data --chat --input sharegpt.json --seq-length 4096 \\
        --tokenizer-model tokenizer.json --output-prefix runs/data/chats
    python -m tools.prepare_data --chat --input sharegpt.json --seq-length 4096 \\
        --chat-template chatml --output-prefix runs/data/chats
        # trains runs/data/chats_tokenizer/tokenizer.json for that template
    python -m tools.prepare_data --check runs/data/chats --tokenizer-model tokenizer.json \\
        --inspect 2

Then: pretrain_gpt.py --data-path PREFIX --tokenizer-model PREFIX.model
"""

import argparse
import sys
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:  # run as a script: the packages are one folder up
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.chat.conversations import NAMED
from tools.common.arguments import one_line_errors, parser_for, positive, refuse_folder, run_command

if TYPE_CHECKING:
    from data.text.record import Prepared

DEFAULT_PREFIX = "runs/data/stdlib"
DEFAULT_VOCAB_SIZE = 4096


@one_line_errors
def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    args = _parse(argv)
    return _check(args) if args.check else _prepare(args)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; exit with an error if flags contradict each other."""
    parser = parser_for("python -m tools.prepare_data", __doc__)
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group().add_argument
    source(
        "--stdlib",
        action="store_true",
        help=(
            "read the sources of Python's standard library without its tests, about 12 MB (default)"
        ),
    )
    source(
        "--input",
        nargs="+",
        metavar="PATH",
        help=(
            "text files; rows of .jsonl, .ndjson, .json, .parquet and folders of the datasets "
            "library (--json-keys); files also as .gz, .bz2, .xz or .zst; hf:NAME:SPLIT from the "
            "hub; "
            "other folders are searched for --suffix"
        ),
    )
    source("--check", metavar="PREFIX", help="write nothing; check all data of an existing prefix")
    add(
        "--inspect",
        type=positive,
        metavar="N",
        help=(
            "with --check: show N documents, or samples of conversations with the tokens that "
            "carry loss marked, and the share of tokens in documents longer than 1K, 4K, 32K "
            "and 128K"
        ),
    )
    add(
        "--whole",
        action="store_true",
        help="with --inspect: show all of each text, not only its beginning and end",
    )
    add(
        "--suffix",
        default=".txt",
        help="extension of the files taken from a folder (default: %(default)s)",
    )
    add(
        "--json-keys",
        nargs="+",
        metavar="KEY",
        help=(
            "field of the rows that has the text (default: text); "
            "only one, since a prefix has one corpus"
        ),
    )
    add(
        "--output-prefix",
        metavar="PREFIX",
        help=f"path prefix of the output (default: {DEFAULT_PREFIX}, only with --stdlib)",
    )

    tokenizer = parser.add_mutually_exclusive_group().add_argument
    tokenizer("--tokenizer-model", metavar="FILE", help="use this .model or tokenizer.json")
    tokenizer(
        "--vocab-size",
        type=positive,
        metavar="N",
        help=f"train a tokenizer of N entries beside the output (default: {DEFAULT_VOCAB_SIZE})",
    )
    add(
        "--add-bos-token",
        choices=("auto", "always", "never"),
        default="auto",
        help=(
            "begin each document with the begin-of-sequence (BOS) token (default: auto, which does "
            "so if the tokenizer adds it by itself)"
        ),
    )
    add(
        "--max-bytes",
        type=positive,
        metavar="N",
        help="stop after N bytes of text (default: take all)",
    )
    add("--overwrite", action="store_true", help="replace output that exists already")
    add(
        "--workers",
        type=positive,
        metavar="N",
        help="number of processes that tokenize; the output is the same (default: all cores)",
    )

    _add_chat(parser)
    args = parser.parse_args(argv)
    _check_flags(parser, args)
    return args


def _add_chat(parser: argparse.ArgumentParser) -> None:
    """Add the flags of conversations."""
    add = parser.add_argument_group("conversations").add_argument
    add(
        "--chat",
        action="store_true",
        help="the input is conversations, in ShareGPT's format or as OpenAI messages",
    )
    add(
        "--seq-length",
        type=positive,
        metavar="N",
        help="number of tokens per sample; many conversations are packed into a sample",
    )
    add(
        "--chat-template",
        metavar="FILE|NAME",
        help=f"use this jinja template (default: the tokenizer's), or one of {', '.join(NAMED)}",
    )
    policies = ["error", "split", "truncate-left", "truncate-right"]
    add(
        "--too-long",
        choices=policies,
        default="error",
        help="policy for a conversation of more than --seq-length tokens (default: error)",
    )
    add(
        "--skip-refused",
        action="store_true",
        help="skip conversations that cannot be used, and list them in PREFIX.refused.txt",
    )
    add(
        "--strict",
        action="store_true",
        help=(
            "refuse a conversation with a part that is not read, such as an unknown key; "
            "by default such parts are counted and reported"
        ),
    )


def _check_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Report the first flags that contradict each other, and end the command."""
    if args.input and not args.output_prefix:
        parser.error(
            "--input needs --output-prefix; give the path to write to, without an extension"
        )
    if args.json_keys and len(args.json_keys) > 1:
        parser.error(
            f"--json-keys names {len(args.json_keys)} fields, but a prefix has one corpus; "
            "prepare each field on its own"
        )

    if args.inspect and not args.check:
        parser.error("--inspect needs --check PREFIX, the data to show")
    if args.whole and not args.inspect:
        parser.error("--whole needs --inspect N")

    if args.chat:
        required = {"--input": args.input, "--seq-length": args.seq_length}
        lacking = [flag for flag, value in required.items() if not value]
        if lacking:
            parser.error(f"--chat needs {' and '.join(lacking)}")
        if not args.tokenizer_model and args.chat_template not in NAMED:
            parser.error(
                "--chat needs --tokenizer-model FILE or, to train a tokenizer, "
                f"--chat-template NAME, one of {', '.join(NAMED)}"
            )
    else:
        uses_chat = args.seq_length or args.chat_template or args.skip_refused or args.strict
        if uses_chat or args.too_long != "error":
            parser.error(
                "--seq-length, --chat-template, --too-long, --skip-refused and --strict need --chat"
            )

    if args.json_keys and not args.input:
        parser.error("--json-keys needs --input, with files whose rows have the keys")
    if args.chat and args.add_bos_token != "auto":
        parser.error(
            "--add-bos-token is for text, but a chat template writes the begin-of-sequence token "
            "itself; leave out --add-bos-token"
        )
    if args.chat and (args.max_bytes or args.json_keys):
        parser.error("--max-bytes and --json-keys are for text, not for --chat; leave them out")


def _prepare(args: argparse.Namespace) -> int:
    from data.chat.convert import Chat
    from data.text.prepare import Request, prepare
    from data.text.record import tokenizer_of

    chat = None
    if args.chat:
        chat = Chat(
            seq_length=args.seq_length,
            chat_template=args.chat_template,
            too_long=args.too_long,
            skip_refused=args.skip_refused,
            strict=args.strict,
        )

    vocab_size = None
    if not args.tokenizer_model:
        vocab_size = args.vocab_size or DEFAULT_VOCAB_SIZE
    request = Request(
        inputs=tuple(args.input or ()),
        suffix=args.suffix,
        tokenizer_model=args.tokenizer_model,
        vocab_size=vocab_size,
        max_bytes=args.max_bytes,
        json_key=(args.json_keys or ["text"])[0],
        chat=chat,
        add_bos_token=args.add_bos_token,
    )
    if args.json_keys:
        _check_that_rows_are_read(args.input, args.suffix)
    prefix = Path(args.output_prefix or DEFAULT_PREFIX)
    # A folder of the prefix's name may hold the sample indices of a run on earlier output.
    if not (prefix / "cache").is_dir():
        refuse_folder("--output-prefix", prefix, f"give {prefix}/NAME to write into it")

    prepared, unchanged = prepare(request, prefix, overwrite=args.overwrite, workers=args.workers)
    verb = "kept" if unchanged else "wrote"
    print(f"{verb} {prefix}.bin and .idx: {prepared.summary}")
    _print_notes(prepared, prefix, args.chat)
    tokenizer = tokenizer_of(request, prefix)
    sft = f" --sft --seq-length {args.seq_length}" if args.chat else ""
    print(f"train on it with --data-path {prefix} --tokenizer-model {tokenizer}{sft}")
    return 0


def _print_notes(prepared: "Prepared", prefix: Path, is_chat: bool) -> None:
    """Print notes on data that was lost: unknown text, skipped files, refused conversations."""
    if prepared.unknown_tokens:
        share = prepared.unknown_tokens / prepared.tokens
        print(
            f"warning: the tokenizer does not know {prepared.unknown_tokens:,} pieces of the text "
            f"({share:.2%} of {prepared.tokens:,} tokens), so they are lost; use a tokenizer that "
            f"fits the text, or look at the text with --check {prefix} --inspect 2"
        )

    if prepared.skipped_files:
        print(f"skipped {prepared.skipped_files} files that are not UTF-8")
    if prepared.conversations and prepared.conversations["refused"]:
        refused = prepared.conversations["refused"]
        print(f"refused {refused:,} conversations, listed in {prefix}.refused.txt")

    for key, count in (prepared.unread or {}).items():
        print(f"note: {count:,} conversations have {key}; --strict refuses them")

    if is_chat and not prepared.turn_ends:
        print(
            "note: the assistant's turns do not end with a token of their own, so generation may "
            "not stop after them"
        )


def _check_that_rows_are_read(inputs: list[str], suffix: str) -> None:
    """Raise DataError if no input has rows, since --json-keys names a field of rows."""
    from data.text.corpus import has_rows, input_files
    from data.text.files import ROW_ENDINGS
    from runtime.errors import DataError

    files = input_files(inputs, suffix)
    if files and not any(map(has_rows, files)):
        raise DataError(
            f"--json-keys names a field of rows, but the extension of {files[0]} means plain text; "
            f"use {ROW_ENDINGS} or a folder of the datasets library, or leave out --json-keys"
        )


def _check(args: argparse.Namespace) -> int:
    from data.text.indexed import open_indexed
    from data.text.record import TOKENIZER
    from data.tokenizer import load_tokenizer
    from tools.common.inspect_data import check_prefix, share_lines, shown

    # Before the tokenizer: a prefix that was never written has no tokenizer either.
    indexed = open_indexed(args.check)
    if indexed.holds_conversations:
        lengths = indexed.lengths
        kind = "conversation"
    else:
        lengths = indexed.document_lengths
        kind = "document"

    file = args.tokenizer_model
    if not file:
        trained = Path(f"{args.check}{TOKENIZER}/tokenizer.json")
        file = trained if trained.exists() else f"{args.check}.model"

    tokenizer = load_tokenizer(file)

    print(check_prefix(args.check, tokenizer))
    if args.inspect:
        texts = shown(args.check, tokenizer, args.inspect, args.whole, sys.stdout.isatty())
        for line in chain(texts, share_lines(lengths, kind)):
            print(line)

    return 0


if __name__ == "__main__":
    run_command(main)
