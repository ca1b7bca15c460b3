"""Turn text or conversations into what training reads: a tokenizer and Megatron's .bin/.idx.

Without flags it takes the Python sources of this machine's standard library, so that a first run
needs no download. What it wrote before with the same flags is kept, unless an input file has
changed since: then it asks.

    python -m tools.prepare_data                                   # runs/data/stdlib.bin, .idx, .model and .json
    python -m tools.prepare_data --input books/ --suffix .txt --output-prefix runs/data/books --vocab-size 32000
    python -m tools.prepare_data --input a.jsonl b.jsonl --output-prefix runs/data/ab --tokenizer-model tokenizer.json
    python -m tools.prepare_data --input a.jsonl --json-keys content --output-prefix runs/data/a
    python -m tools.prepare_data --chat --input sharegpt.json --seq-length 4096 --tokenizer-model tokenizer.json \\
        --output-prefix runs/data/chats
    python -m tools.prepare_data --chat --input sharegpt.json --seq-length 4096 --chat-template
        chatml \\ --output-prefix runs/data/chats          # trains
        runs/data/chats_tokenizer/tokenizer.json for that template
    python -m tools.prepare_data --check runs/data/chats --tokenizer-model tokenizer.json --inspect
    2

Then: pretrain_gpt.py --data-path PREFIX --tokenizer-model PREFIX.model
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import chain, groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:  # started as a file: the packages lie one folder up
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.chat.conversations import NAMED
from tools.common.arguments import one_line_errors, parser_for, positive, refuse_folder, run_command

if TYPE_CHECKING:
    import numpy as np

    from data.text.indexed import Indexed
    from data.tokenizer import Tokenizer

DEFAULT_PREFIX = "runs/data/stdlib"
DEFAULT_VOCAB_SIZE = 4096
_GREEN, _PLAIN = "\033[32m", "\033[0m"
_SHOWN = 400
"""Characters of a text's beginning, and as many of its end, that are shown of a long one."""
LONGER = (1 << 10, 1 << 12, 1 << 15, 1 << 17)
_BAR = 40


@one_line_errors
def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    args = _parse(argv)
    return _check(args) if args.check else _prepare(args)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = parser_for("python -m tools.prepare_data", __doc__)
    add, source = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    stdlib = "the standard library's sources without its tests, about 12 MB (default)"
    source("--stdlib", action="store_true", help=stdlib)
    inputs = (
        "text files; rows of .jsonl, .ndjson, .json, .parquet and datasets' folders (--json-keys); any of them as .gz, "
        ".bz2, .xz or .zst; hf:NAME:SPLIT of the hub; other folders are searched for --suffix"
    )
    source("--input", nargs="+", metavar="PATH", help=inputs)
    source(
        "--check", metavar="PREFIX", help="write nothing, but read all of a prefix that is there"
    )
    inspect = (
        "with --check: show N documents, or samples of conversations, what carries loss marked, and the share of "
        "tokens in documents longer than 1K, 4K, 32K and 128K"
    )
    add("--inspect", type=positive, metavar="N", help=inspect)
    whole = "with --inspect: all of each text, not its beginning and end alone"
    add("--whole", action="store_true", help=whole)
    add(
        "--suffix",
        default=".txt",
        help="ending of the files taken from a folder (default: %(default)s)",
    )
    key = "field of the rows that holds the text (default: text); one, since a prefix holds one corpus"
    add("--json-keys", nargs="+", metavar="KEY", help=key)
    output = f"where to write (default: {DEFAULT_PREFIX}, for --stdlib alone)"
    add("--output-prefix", metavar="PREFIX", help=output)
    tokenizer = parser.add_mutually_exclusive_group().add_argument
    tokenizer("--tokenizer-model", metavar="FILE", help="use this .model or tokenizer.json")
    entries = f"train a tokenizer of N entries beside the output (default: {DEFAULT_VOCAB_SIZE})"
    tokenizer("--vocab-size", type=positive, metavar="N", help=entries)
    begin = "begin each document with the begin token (default: auto, if the tokenizer adds it by itself)"
    add("--add-bos-token", choices=("auto", "always", "never"), default="auto", help=begin)
    add(
        "--max-bytes",
        type=positive,
        metavar="N",
        help="stop after N bytes of text (default: take all)",
    )
    add("--overwrite", action="store_true", help="write anew what is there already")
    workers = "processes that tokenize; the output is the same (default: cores)"
    add("--workers", type=positive, metavar="N", help=workers)
    chat = parser.add_argument_group("conversations").add_argument
    chat(
        "--chat",
        action="store_true",
        help="the input is conversations of ShareGPT or OpenAI messages",
    )
    chat(
        "--seq-length",
        type=positive,
        metavar="N",
        help="tokens of a sample, which holds many of them",
    )
    names = f"use this jinja template (default: the tokenizer's), or one of {', '.join(NAMED)}"
    chat("--chat-template", metavar="FILE|NAME", help=names)
    policies = ["error", "split", "truncate-left", "truncate-right"]
    chat(
        "--too-long",
        choices=policies,
        default="error",
        help="for more than N tokens (default: error)",
    )
    refused = "list what cannot be used in PREFIX.refused.txt, and go on"
    chat("--skip-refused", action="store_true", help=refused)
    strict = "refuse a conversation that has something not read, such as an unknown key, which is otherwise counted and said"
    chat("--strict", action="store_true", help=strict)
    args = parser.parse_args(argv)
    of_chat = (
        args.seq_length
        or args.chat_template
        or args.skip_refused
        or args.strict
        or args.too_long != "error"
    )
    one = "--json-keys names {} fields, and a prefix holds one corpus; prepare each on its own"
    named = f"--chat needs --tokenizer-model FILE, or to train one --chat-template NAME, one of {', '.join(NAMED)}"
    lacking = [
        name
        for name, given in {"--input": args.input, "--seq-length": args.seq_length}.items()
        if not given
    ]
    wrong = {
        "--input needs --output-prefix: where to write": args.input and not args.output_prefix,
        one.format(len(args.json_keys or [])): args.json_keys and len(args.json_keys) > 1,
        "--inspect goes with --check PREFIX: what to show": args.inspect and not args.check,
        "--whole goes with --inspect N": args.whole and not args.inspect,
        f"--chat needs {' and '.join(lacking)}": args.chat and lacking,
        named: args.chat and not args.tokenizer_model and args.chat_template not in NAMED,
        "--seq-length, --chat-template, --too-long, --skip-refused and --strict go with --chat": (
            of_chat and not args.chat
        ),
        "--json-keys goes with --input: whose rows it is for": args.json_keys and not args.input,
        "--add-bos-token is for text; a chat template writes it itself": args.chat
        and args.add_bos_token != "auto",
        "--max-bytes and --json-keys are for text, not for --chat": args.chat
        and (args.max_bytes or args.json_keys),
    }
    for said in (said for said, found in wrong.items() if found):
        parser.error(said)
    return args


def _prepare(args: argparse.Namespace) -> int:
    from data.chat.convert import Chat
    from data.text.prepare import Request, prepare
    from data.text.record import tokenizer_of

    names = ("seq_length", "chat_template", "too_long", "skip_refused", "strict")
    chat = Chat(**{name: getattr(args, name) for name in names}) if args.chat else None
    request = Request(
        inputs=tuple(args.input or ()),
        suffix=args.suffix,
        tokenizer_model=args.tokenizer_model,
        vocab_size=None if args.tokenizer_model else args.vocab_size or DEFAULT_VOCAB_SIZE,
        max_bytes=args.max_bytes,
        json_key=(args.json_keys or ["text"])[0],
        chat=chat,
        add_bos_token=args.add_bos_token,
    )
    if args.json_keys:
        _check_that_rows_are_read(args.input, args.suffix)
    prefix = Path(args.output_prefix or DEFAULT_PREFIX)
    if not (
        prefix / "cache"
    ).is_dir():  # a run on what an earlier call wrote keeps its indices of samples there
        refuse_folder("--output-prefix", prefix, f"give {prefix}/NAME to write into it")
    prepared, kept = prepare(request, prefix, overwrite=args.overwrite, workers=args.workers)
    print(f"{'kept' if kept else 'wrote'} {prefix}.bin and .idx: {prepared.summary}")
    if prepared.unknown_tokens:
        share = prepared.unknown_tokens / prepared.tokens
        print(
            f"warning: the tokenizer does not know {prepared.unknown_tokens:,} pieces of the text, {share:.2%} of "
            f"{prepared.tokens:,} tokens, which are lost; take a tokenizer that fits the text, or look at it with "
            f"--check {prefix} --inspect 2"
        )
    if prepared.skipped_files:
        print(f"skipped {prepared.skipped_files} files that are not UTF-8")
    if prepared.conversations and prepared.conversations["refused"]:
        print(
            f"refused {prepared.conversations['refused']:,} conversations, listed in {prefix}.refused.txt"
        )
    for key, count in (prepared.unread or {}).items():
        print(f"note: {count:,} conversations have {key}; --strict refuses them")
    if args.chat and not prepared.turn_ends:
        print(
            "note: no token of its own ends the assistant's turns, so that generation may not stop after them"
        )
    sft = f" --sft --seq-length {args.seq_length}" if args.chat else ""
    tokenizer = tokenizer_of(request, prefix)
    print(f"train on it with --data-path {prefix} --tokenizer-model {tokenizer}{sft}")
    return 0


def _check_that_rows_are_read(inputs: list[str], suffix: str) -> None:
    """Raise DataError if no input has rows, of which --json-keys names a field."""
    from data.text.corpus import has_rows, input_files
    from data.text.files import ROW_ENDINGS
    from runtime.errors import DataError

    files = input_files(inputs, suffix)
    if files and not any(map(has_rows, files)):
        raise DataError(
            f"--json-keys names a field of rows, and {files[0]} is one text by its ending; rows are in {ROW_ENDINGS} "
            "and datasets: rename it, or leave --json-keys out"
        )


def _check(args: argparse.Namespace) -> int:
    from data.text.indexed import open_indexed
    from data.text.record import TOKENIZER
    from data.tokenizer import load_tokenizer

    indexed = open_indexed(args.check)  # before a tokenizer, which a prefix never written lacks too
    what = "conversation" if indexed.holds_conversations else "document"
    lengths = indexed.lengths if indexed.holds_conversations else indexed.document_lengths
    trained = Path(f"{args.check}{TOKENIZER}/tokenizer.json")
    tokenizer = load_tokenizer(
        args.tokenizer_model or (trained if trained.exists() else f"{args.check}.model")
    )
    print(check_prefix(args.check, tokenizer))
    if args.inspect:
        texts = shown(args.check, tokenizer, args.inspect, args.whole, sys.stdout.isatty())
        for line in chain(texts, share_lines(lengths, what)):
            print(line)
    return 0


def check_prefix(prefix: str, tokenizer: "Tokenizer") -> str:
    """Read a prefix whole, and return what it holds in one line.

    Raises:
        DataError: whatever would stop training, a document of our own text without its end, or a
            loss mask that is not of these tokens.
    """
    import numpy as np

    from data.text.indexed import LOSS_MASK, check_indexed
    from data.text.packing import Conversations

    indexed = check_indexed(prefix, tokenizer.vocab_size, scan_tokens=np.iinfo(np.int64).max)
    indexed.check_tokenizer(tokenizer.path, tokenizer.sha256, tokenizer.settings)
    sizes = f"{indexed.tokens:,} tokens ({indexed.dtype})"
    if not indexed.holds_conversations:
        return f"{prefix}: {len(indexed.document_lengths):,} documents, {sizes}{_ends(indexed, tokenizer.eod)}"
    mask = check_indexed(prefix + LOSS_MASK, 2, scan_tokens=np.iinfo(np.int64).max).token_ids()
    conversations = Conversations(prefix, tokenizer.vocab_size, np.iinfo(np.int64).max, check=True)
    longest, samples = conversations.longest, len(conversations)
    return (
        f"{prefix}: {len(indexed.lengths):,} conversations, {sizes}, packed into {samples:,} samples of up to "
        f"{longest:,} tokens, {1 - indexed.tokens / samples / longest:.2%} padding to the longest; "
        f"{int(mask.sum(dtype=np.int64)):,} tokens carry loss"
    )


def _ends(indexed: "Indexed", eod: int) -> str:
    """Say which documents of text do not end with the end-of-document token, if there are any.

    Raises DataError: such ones in a pair that tools.prepare_data wrote, which ends all of them.
    """
    import numpy as np

    from runtime.errors import DataError

    lengths = indexed.document_lengths
    last = np.cumsum(lengths, dtype=np.int64)[lengths > 0] - 1
    without = int((indexed.token_ids()[last] != eod).sum())
    if without and os.path.exists(f"{indexed.prefix}.json"):
        raise DataError(
            f"{indexed.prefix}.bin holds {without:,} documents that do not end with the tokenizer's end-of-document "
            f"token, {eod}; prepare the text with this tokenizer"
        )
    lumped = ", which its .idx has as sequences of one document" if indexed.is_lumped else ""
    if not without:
        return lumped
    return (
        f"{lumped}; {without:,} of them do not end with the tokenizer's end-of-document token, {eod}: the .idx tells "
        "them apart in training, but a model does not learn from them to end a text"
    )


def shown(
    prefix: str, tokenizer: "Tokenizer", count: int, whole: bool, colour: bool
) -> Iterator[str]:
    """Yield the first documents of a prefix as text, or samples of conversations, each with its
    boundaries.

    Tokens that carry loss are green, or between ⟦ and ⟧ where there is no `colour`.

    Args:
        whole: show all of each text, not its beginning and end alone.
    """
    import numpy as np

    from data.text.indexed import LOSS_MASK, check_indexed

    indexed = check_indexed(prefix, tokenizer.vocab_size)
    learned = None
    if indexed.holds_conversations:
        learned = check_indexed(prefix + LOSS_MASK, 2).token_ids()
    begin, end = (_GREEN, _PLAIN) if colour else ("⟦", "⟧")
    at, ids = 0, indexed.token_ids()
    if learned is None:
        groups = [[length] for length in indexed.document_lengths[:count].tolist()]
    else:
        groups = [
            indexed.lengths[a:b].tolist() for a, b in pairwise(indexed.bounds[: count + 1].tolist())
        ]
    for number, lengths in enumerate(groups):
        yield f"=== {'document' if learned is None else 'sample'} {number}: {sum(lengths):,} tokens"
        for place, length in enumerate(lengths):
            if learned is not None:
                yield f"--- conversation {place + 1} of {len(lengths)}: {length:,} tokens"
            mask = np.zeros(length, bool) if learned is None else learned[at : at + length] > 0
            cuts = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), length]
            parts = (
                (tokenizer.detokenize(ids[at + a : at + b].tolist(), special=True), a)
                for a, b in pairwise(cuts)
            )
            text = [(character, bool(mask[a])) for part, a in parts for character in part]
            if not whole and len(text) > 2 * _SHOWN + 100:
                left_out = f"{len(text) - 2 * _SHOWN:,} of {len(text):,} characters left out, which --whole shows"
                text[_SHOWN:-_SHOWN] = [
                    (character, False) for character in f"\n... {left_out} ...\n"
                ]
            runs = (
                (marked, "".join(c for c, _ in run))
                for marked, run in groupby(text, key=itemgetter(1))
            )
            yield "".join(f"{begin}{run}{end}" if marked else run for marked, run in runs)
            at += length


def shares(lengths: "np.ndarray", longer: "Sequence[int] | np.ndarray") -> "np.ndarray":
    """Return the share of all tokens that lies in texts longer than each of some lengths, float64."""
    import numpy as np

    ascending = np.sort(lengths)
    before = np.concatenate(([0], np.cumsum(ascending, dtype=np.int64)))
    return 1 - before[np.searchsorted(ascending, longer, side="right")] / before[-1]


def share_lines(lengths: "np.ndarray", what: str) -> Iterator[str]:
    """Yield a line for each of LONGER, with its share as a figure and as a bar."""
    yield f"tokens in {what}s longer than"
    for longer, share in zip(LONGER, shares(lengths, LONGER), strict=True):
        yield f"{longer:>9,} {share:7.2%} {'█' * round(_BAR * share)}".rstrip()


if __name__ == "__main__":
    run_command(main)
