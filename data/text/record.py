"""Requests for prepared data, and the record that is written next to the data.

Preparing a corpus can take hours, so equal data is kept instead of written again. The record has
everything that the bytes depend on: the request, the digests of the tokenizer and of the files
next to it, the chat template, and size and time of every input file. Data is kept only if all of
these are equal; otherwise the request is refused with the reason. Data is never overwritten without
--overwrite.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from data.chat.conversations import NAMED
from data.chat.convert import Chat
from data.chat.template import load_template
from data.text.corpus import HUB, input_files
from data.text.indexed import LOSS_MASK, open_indexed
from data.tokenizer import AddBos, load_tokenizer
from runtime.errors import DataError
from runtime.files import sha256

CONVERSATIONS = ("read", "kept", "split", "truncated", "refused", "left_out", "learned")
"""Names of counters: conversations by outcome, pieces left out, and tokens that carry loss."""
CHAT_ENDS = (f"{LOSS_MASK}.bin", f"{LOSS_MASK}.idx", ".refused.txt")
CHAT = "chat"
"""Key, in records and checkpoints, of the chat template and the tokens that end turns."""
TOKENIZER = "_tokenizer"
"""Suffix of the folder for a tokenizer that was trained for a chat template."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The settings that determine prepared data."""

    inputs: tuple[str, ...] = ()
    """Input files, folders and datasets; empty means the standard library's sources."""
    suffix: str = ".txt"
    """Suffix of the files to read in a folder."""
    tokenizer_model: str | None = None
    """Path of an existing tokenizer; None trains one."""
    vocab_size: int | None = 4096
    """Number of entries of the tokenizer to train; None with an existing one."""
    max_bytes: int | None = None
    """Number of bytes of text after which to stop; None reads everything."""
    json_key: str = "text"
    """Field of a row that holds the text."""
    chat: Chat | None = None
    """Settings for conversations; None prepares text."""
    add_bos_token: AddBos = "auto"
    """Policy for a begin token before each document of text, as in `AddBos`."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Numbers and digests that describe the data at a prefix."""

    tokenizer_sha256: str
    """SHA-256 of the tokenizer's file, the request's or the one trained next to the data."""
    documents: int
    """Number of documents, or of conversations and pieces of conversations."""
    tokens: int
    """Number of tokens, including one end-of-document token per document of text."""
    dtype: str
    """Dtype of a token id."""
    text_bytes: int
    """Number of UTF-8 bytes of the documents of text."""
    skipped_files: int
    """Number of files skipped because they are not UTF-8."""
    unigram_entropy: float
    """Nats per token: the loss of a model that knows only the token frequencies."""
    unknown_tokens: int = 0
    """Number of tokens whose text is lost: unknown tokens or, if the vocabulary has no unknown
    token, dropped tokens."""
    conversations: dict[str, int] | None = None
    """Counts, keyed by name. read, kept (whole), split, truncated, refused: conversations;
    left_out: pieces of split conversations, left out because they carry no loss; learned: tokens
    that carry loss; samples; places: positions in all samples."""
    begin: list[int] | None = None
    """Token ids that begin each document of text; None in older records and for conversations."""
    unread: dict[str, int] | None = None
    """Number of conversations, keyed by a note on content that was not read or was left out."""
    tokenizer_settings: str | None = None
    """Digest of the settings in files next to a tokenizer.json; None in older records."""
    turn_ends: list[int] | None = None
    """Token ids that end the assistant's turns, the most frequent first."""

    def check(self) -> None:
        """Raise TypeError or ValueError for values that no preparation would have recorded."""
        counts = [
            self.documents,
            self.tokens,
            self.text_bytes,
            self.skipped_files,
            self.unknown_tokens,
            *(self.unread or {}).values(),
            *(self.turn_ends or []),
        ]
        has_tokens = self.tokens != 0
        outcomes = self.conversations
        if outcomes is not None:
            counts += [outcomes[name] for name in (*CONVERSATIONS, "samples", "places")]
            has_tokens = has_tokens and bool(outcomes["samples"] and outcomes["places"])
        for count in counts:
            if type(count) is not int or not 0 <= count < 1 << 63:
                raise ValueError(f"{count!r} is not a count")
        if not has_tokens:
            raise ValueError("it has no tokens")
        if self.begin is not None and not all(type(token) is int for token in self.begin):
            raise ValueError("begin is not a list of tokens")
        if type(self.unigram_entropy) is not float or not 0 <= self.unigram_entropy < 64:
            raise ValueError("unigram_entropy is not a number of nats")

    @property
    def summary(self) -> str:
        """One line about the data, to print."""
        tokens = f"{self.tokens:,} tokens ({self.dtype})"
        counts = self.conversations
        if counts is None:
            return (
                f"{self.documents:,} documents, {tokens}, "
                f"{self.text_bytes / self.tokens:.2f} bytes per token, "
                f"unigram entropy {self.unigram_entropy:.3f} nats per token"
            )
        return (
            f"{counts['read']:,} conversations read: {counts['kept']:,} kept whole, "
            f"{counts['split']:,} split, {counts['truncated']:,} truncated, "
            f"{counts['refused']:,} refused; {counts['left_out']:,} pieces without loss of split "
            f"conversations left out; {tokens}, of which {counts['learned']:,} carry loss, in "
            f"{counts['samples']:,} samples, {1 - self.tokens / counts['places']:.2%} padding to "
            f"seq_length {counts['places'] // counts['samples']:,}"
        )


def existing(request: Request, prefix: Path) -> Prepared | None:
    """Return the facts about the data at a prefix, if this request made it; None without data.

    Raises DataError if the data is incomplete or of another request, or if its input has changed.
    """
    remedy = "give --overwrite to write it anew, or another --output-prefix"
    ends = ends_of(request)
    paths = [with_end(prefix, end) for end in ends]
    present_paths = [str(path) for path in paths if path.exists()]
    if not present_paths:
        return None
    if len(present_paths) < len(ends):
        raise DataError(
            f"found {', '.join(present_paths)}, but other files of the same data are missing; "
            f"{remedy}"
        )

    prepared, made_with, old_inputs = _read_record(with_end(prefix, ".json"), remedy)
    defaults = {field.name: field.default for field in fields(Request)}  # for older records
    for name, value in made_with_of(request).items():
        if made_with.get(name, defaults.get(name)) != value:
            raise DataError(
                f"{prefix}.bin was made with {name} {made_with.get(name)}, not {value}; {remedy}"
            )
    indexed = open_indexed(prefix)
    if (len(indexed.lengths), indexed.tokens) != (prepared.documents, prepared.tokens):
        raise DataError(
            f"{prefix}.idx and {with_end(prefix, '.json')} disagree on the number of documents or "
            f"tokens; {remedy}"
        )
    _check_tokenizer(request, prefix, prepared, remedy)

    inputs = inputs_of(request)
    if not old_inputs or not inputs:  # in older records, or for a dataset on the hub
        return prepared
    for name in sorted(old_inputs | inputs):
        if old_inputs.get(name) == inputs.get(name):
            continue
        change = "has changed"
        if name not in inputs:
            change = "is gone"
        elif name not in old_inputs:
            change = "is new"
        raise DataError(f"{name} {change} since {prefix}.bin was made; {remedy}")
    return prepared


def _read_record(
    record: Path, remedy: str
) -> tuple[Prepared, dict[str, Any], dict[str, list[int]]]:
    """Return a record's facts, request and input files. Raises DataError if it is not valid."""
    if not (record.is_file() or record.is_dir()):
        raise DataError(f"{record} is not a file; {remedy}")
    try:
        content: dict[str, Any] = json.loads(record.read_text())
        made_with = dict(content["made_with"])
        prepared = Prepared(**content["prepared"])
        prepared.check()
        inputs = dict(content.get("inputs", {}))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{record} is not a record of this tool ({error}); {remedy}") from error
    return prepared, made_with, inputs


def _check_tokenizer(request: Request, prefix: Path, prepared: Prepared, remedy: str) -> None:
    """Raise DataError if the tokenizer would write other tokens than those at the prefix."""
    path = tokenizer_of(request, prefix)
    tokenizer = load_tokenizer(path)
    if tokenizer.sha256 != prepared.tokenizer_sha256:
        raise DataError(f"{path} is not the tokenizer that wrote {prefix}.bin; {remedy}")
    if prepared.tokenizer_settings not in (None, tokenizer.settings):
        raise DataError(
            f"files beside {path}, such as tokenizer_config.json, changed since {prefix}.bin "
            f"was made; {remedy}"
        )
    if request.chat is not None:
        return
    old_begin = list(prepared.begin or ())
    begin = list(tokenizer.begin(request.add_bos_token))
    if begin != old_begin:
        raise DataError(
            f"documents of {prefix}.bin begin with the tokens {old_begin}, but would now begin "
            f"with {begin}; {remedy}"
        )


def made_with_of(request: Request) -> dict[str, Any]:
    """Return the request as recorded: with absolute paths and the chat template's digest."""
    made_with = asdict(request)
    made_with["inputs"] = [
        path if path.startswith(HUB) else os.path.abspath(path) for path in request.inputs
    ]
    if request.tokenizer_model is not None:
        made_with["tokenizer_model"] = os.path.abspath(request.tokenizer_model)
    if request.chat is None:
        return made_with

    name = request.chat.chat_template
    tool_use = None
    if request.tokenizer_model is None:
        source = NAMED[str(name)].source
    else:
        template = load_template(request.tokenizer_model, name)
        source = template.source
        tool_use = template.tool_use
    content = source if tool_use is None else json.dumps([source, tool_use])
    made_with["chat"]["chat_template"] = sha256(content)
    if not request.chat.strict:
        del made_with["chat"]["strict"]  # as in records that are older than the setting
    return made_with


def chat_record(prefixes: Sequence[str]) -> dict[str, Any] | None:
    """Return the template and turn ends of prepared conversations, to save in checkpoints.

    The template is None if the prefixes have different ones. Returns None if no record is of
    conversations.
    """
    records = []
    for prefix in prefixes:
        record = _chat_of(Path(f"{prefix}.json"))
        if record is not None:
            records.append(record)
    if not records:
        return None

    ends: dict[int, None] = {}
    for record in records:
        ends |= dict.fromkeys(record["ends"])
    templates = [(record["chat_template"], record["tool_use"]) for record in records]
    source, tool_use = templates[0]
    if any(template != templates[0] for template in templates):
        source = tool_use = None
    return {"chat_template": source, "tool_use": tool_use, "ends": list(ends)}


def _chat_of(path: Path) -> dict[str, Any] | None:
    """Return the chat template and turn ends of a record; None if it has no template.

    Raises DataError for a broken record.
    """
    if not path.is_file():
        return None
    try:
        chat = json.loads(path.read_text(encoding="utf-8")).get(CHAT)
        if chat is None:
            return None
        template = chat["chat_template"]
        tool_use = chat.get("tool_use")
        ends = chat["ends"]
        texts = isinstance(template, str) and isinstance(tool_use, (str, type(None)))
        if not texts or not all(type(end) is int and end >= 0 for end in ends):
            raise ValueError("chat lacks a template or the ends of turns")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{path} is not a record of tools.prepare_data ({error}); prepare the conversations "
            "again"
        ) from error
    return {"chat_template": template, "tool_use": tool_use, "ends": ends}


def inputs_of(request: Request) -> dict[str, list[int]]:
    """Return the size and the change time, in ns, of each existing input file.

    The standard library's files are not included.
    """
    existing_inputs = [path for path in request.inputs if Path(path).exists()]
    stats = {}
    for path in input_files(existing_inputs, request.suffix):
        stat = path.stat()
        stats[os.path.abspath(path)] = [stat.st_size, stat.st_mtime_ns]
    return stats


def ends_of(request: Request) -> list[str]:
    """Return the suffixes, after the prefix, of all files and folders that a request writes."""
    ends = [".bin", ".idx", ".json"]
    if request.tokenizer_model is None:
        ends.append(".model" if request.chat is None else TOKENIZER)
    if request.chat is not None:
        ends += CHAT_ENDS if request.chat.skip_refused else CHAT_ENDS[:2]
    return ends


def tokenizer_of(request: Request, prefix: Path) -> str:
    """Return the path of the request's tokenizer, or of the one trained next to the prefix."""
    trained = ".model" if request.chat is None else f"{TOKENIZER}/tokenizer.json"
    return request.tokenizer_model or f"{prefix}{trained}"


def with_end(prefix: Path, end: str) -> Path:
    """Return the path that consists of a prefix and a suffix."""
    return prefix.with_name(prefix.name + end)
