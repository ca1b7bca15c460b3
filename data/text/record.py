"""Requests of prepared data, and the record beside the data."""

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
"""Counts of what became of conversations."""
CHAT_ENDS = (f"{LOSS_MASK}.bin", f"{LOSS_MASK}.idx", ".refused.txt")
CHAT = "chat"
"""Key of the template and the ends of turns, in the record of prepared conversations and in a run's
checkpoints.
"""
TOKENIZER = "_tokenizer"
"""Ends the prefix of the folder of a tokenizer that is trained for a chat template."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The settings that determine prepared data."""

    inputs: tuple[str, ...] = ()
    """Files, folders and datasets; empty means the standard library's sources."""
    suffix: str = ".txt"
    """Suffix of the files to read from a folder."""
    tokenizer_model: str | None = None
    """An existing tokenizer; None trains one."""
    vocab_size: int | None = 4096
    """Entries of the tokenizer to train; None with an existing one."""
    max_bytes: int | None = None
    """Bytes of text after which to stop; None reads all."""
    json_key: str = "text"
    """Field of the rows that holds the text."""
    chat: Chat | None = None
    """Settings of conversations; None takes text."""
    add_bos_token: AddBos = "auto"
    """Begin token of each document of text; auto: if the tokenizer adds one by itself."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Facts about the data at a prefix."""

    tokenizer_sha256: str
    """SHA-256 of the tokenizer, which is the request's file or `prefix`.model, even if moved."""
    documents: int
    """Documents, or conversations and pieces of them."""
    tokens: int
    """Tokens, including one end-of-document token per document of text."""
    dtype: str
    """Dtype of a token id."""
    text_bytes: int
    """UTF-8 bytes of the documents of text."""
    skipped_files: int
    """Files skipped because they are not UTF-8."""
    unigram_entropy: float
    """Nats per token: the loss of a model that knows only the token frequencies."""
    unknown_tokens: int = 0
    """Tokens that stand for what the vocabulary lacks, or that text lacks therefore: it is lost."""
    conversations: dict[str, int] | None = None
    """Conversations that were read, kept whole, split, truncated and refused; pieces without loss,
    which were left_out; tokens that carry loss, learned; samples, and the places in them."""
    begin: list[int] | None = None
    """Ids that begin each document of text; None in records of before documents had any, and of
    conversations.
    """
    unread: dict[str, int] | None = None
    """In how many conversations nothing reads a key, or something that a template leaves out by its
    own rule.
    """
    tokenizer_settings: str | None = None
    """Digest of what files beside a tokenizer.json change of its ids; None in older records."""
    turn_ends: list[int] | None = None
    """Ids of the tokens that end the assistant's turns, the most frequent first."""

    def check(self) -> None:
        """Raise TypeError or ValueError for numbers that no preparation notes."""
        counts = [
            self.documents,
            self.tokens,
            self.text_bytes,
            self.skipped_files,
            self.unknown_tokens,
        ]
        if (of := self.conversations) is not None:
            counts += [of[name] for name in (*CONVERSATIONS, "samples", "places")]
        counts += [*(self.unread or {}).values(), *(self.turn_ends or [])]
        if any(type(count) is not int or not 0 <= count < 1 << 63 for count in counts):
            raise ValueError("a count is no count")
        if not self.tokens or (of is not None and not (of["samples"] and of["places"])):
            raise ValueError("it has no tokens")
        if self.begin is not None and not all(type(token) is int for token in self.begin):
            raise ValueError("begin is no list of tokens")
        if type(self.unigram_entropy) is not float or not 0 <= self.unigram_entropy < 64:
            raise ValueError("unigram_entropy is no number of nats")

    @property
    def summary(self) -> str:
        """Say in one line what there is."""
        tokens, of = f"{self.tokens:,} tokens ({self.dtype})", self.conversations
        if of is None:
            sizes = f"{self.text_bytes / self.tokens:.2f} bytes per token, unigram entropy {self.unigram_entropy:.3f}"
            return f"{self.documents:,} documents, {tokens}, {sizes} nats per token"
        return (
            f"{of['read']:,} conversations read: {of['kept']:,} kept whole, {of['split']:,} split, {of['truncated']:,} "
            f"truncated, {of['refused']:,} refused; {of['left_out']:,} pieces of split ones without loss left out; "
            f"{tokens}, of which {of['learned']:,} carry loss, in {of['samples']:,} samples, "
            f"{1 - self.tokens / of['places']:.2%} padding to seq_length {of['places'] // of['samples']:,}"
        )


def existing(request: Request, prefix: Path) -> Prepared | None:
    """Return the data at the prefix if this request made it, None if there is none. Else raise
    DataError.
    """
    ends = ends_of(request)
    there = [str(path) for end in ends if (path := with_end(prefix, end)).exists()]
    if not there:
        return None
    remedy = "give --overwrite to write it anew, or another --output-prefix"
    if len(there) < len(ends):
        raise DataError(
            f"{', '.join(there)} exists, but is not the whole of what this tool writes; {remedy}"
        )
    record = with_end(prefix, ".json")
    if not (record.is_file() or record.is_dir()):
        raise DataError(f"{record} is no file; {remedy}")
    try:
        content: dict[str, Any] = json.loads(record.read_text())
        made_with, prepared = dict(content["made_with"]), Prepared(**content["prepared"])
        prepared.check()
        was = dict(content.get("inputs", {}))  # older records have none
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{record} is not a record of this tool ({error}); {remedy}") from error
    defaults = {field.name: field.default for field in fields(Request)}  # older records lack some
    for name, value in made_with_of(request).items():
        if made_with.get(name, defaults.get(name)) != value:
            raise DataError(
                f"{prefix}.bin was made with {name} {made_with.get(name)}, not {value}; {remedy}"
            )
    found = open_indexed(prefix)
    if (len(found.lengths), found.tokens) != (prepared.documents, prepared.tokens):
        raise DataError(f"{prefix}.idx and {record} disagree on the number of tokens; {remedy}")
    named = tokenizer_of(request, prefix)
    tokenizer = load_tokenizer(named)
    if tokenizer.sha256 != prepared.tokenizer_sha256:
        raise DataError(f"{named} is not the tokenizer that wrote {prefix}.bin; {remedy}")
    if prepared.tokenizer_settings not in (None, tokenizer.settings):
        raise DataError(
            f"files beside {named}, such as tokenizer_config.json, changed since {prefix}.bin; {remedy}"
        )
    begin = tuple(prepared.begin or ())
    if request.chat is None and begin != tokenizer.begin(request.add_bos_token):
        asked = tokenizer.begin(request.add_bos_token)
        raise DataError(
            f"documents of {prefix}.bin begin with the tokens {list(begin)}, and would now with {list(asked)}; {remedy}"
        )
    now = inputs_of(request)
    if (
        was
        and now
        and (other := sorted(name for name in was | now if was.get(name) != now.get(name)))
    ):
        how = "is gone" if other[0] not in now else "has changed" if other[0] in was else "is new"
        raise DataError(f"{other[0]} {how} since {prefix}.bin was made; {remedy}")
    return prepared


def made_with_of(request: Request) -> dict[str, Any]:
    """Return the request as its record has it: paths absolute, the chat template by its digest."""
    made_with = asdict(request)
    made_with["inputs"] = [
        path if path.startswith(HUB) else os.path.abspath(path) for path in request.inputs
    ]
    if request.tokenizer_model is not None:
        made_with["tokenizer_model"] = os.path.abspath(request.tokenizer_model)
    if request.chat is not None:
        model, name = request.tokenizer_model, request.chat.chat_template
        tool_use = None
        if model is None:
            source = NAMED[str(name)].source
        else:
            template = load_template(model, name)
            source, tool_use = template.source, template.tool_use
        made_with["chat"]["chat_template"] = sha256(
            source if tool_use is None else json.dumps([source, tool_use])
        )
        if not request.chat.strict:
            del made_with["chat"]["strict"]  # as of records before there was such a setting
    return made_with


def chat_record(prefixes: Sequence[str]) -> dict[str, Any] | None:
    """Return the template and the ends of turns of prepared conversations, which a run has in its
    checkpoints.

    The template is None where prefixes have different ones. None if no record beside them has any.
    """
    records = [
        record for prefix in prefixes if (record := _chat_of(Path(f"{prefix}.json"))) is not None
    ]
    if not records:
        return None
    ends = dict.fromkeys(end for record in records for end in record["ends"])
    templates = [[record[name] for name in ("chat_template", "tool_use")] for record in records]
    alike = all(template == templates[0] for template in templates)
    source, tool_use = templates[0] if alike else (None, None)
    return {"chat_template": source, "tool_use": tool_use, "ends": list(ends)}


def _chat_of(path: Path) -> dict[str, Any] | None:
    """Return what a record says of the chat template; None if it says nothing. Raises DataError for
    a broken one.
    """
    if not path.is_file():
        return None
    try:
        chat = json.loads(path.read_text(encoding="utf-8")).get(CHAT)
        if chat is None:
            return None
        record = {
            "chat_template": chat["chat_template"],
            "tool_use": chat.get("tool_use"),
            "ends": chat["ends"],
        }
        texts = isinstance(record["chat_template"], str) and isinstance(
            record["tool_use"], (str, type(None))
        )
        if not texts or not all(type(end) is int and end >= 0 for end in record["ends"]):
            raise ValueError("chat holds no template and ends of turns")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{path} is not a record of tools.prepare_data ({error}); prepare the conversations again"
        ) from error
    return record


def inputs_of(request: Request) -> dict[str, list[int]]:
    """Return size and time of change, in ns, of the input's files that are there; not of the
    standard library's.
    """
    files = input_files([path for path in request.inputs if Path(path).exists()], request.suffix)
    found = ((os.path.abspath(path), path.stat()) for path in files)
    return {path: [stat.st_size, stat.st_mtime_ns] for path, stat in found}


def ends_of(request: Request) -> list[str]:
    """Return the ends of the files' names, and of the tokenizer's folder if one is trained for
    conversations.
    """
    ends = [".bin", ".idx", ".json"]
    if request.tokenizer_model is None:
        ends.append(".model" if request.chat is None else TOKENIZER)
    if request.chat is not None:
        ends += CHAT_ENDS if request.chat.skip_refused else CHAT_ENDS[:2]
    return ends


def tokenizer_of(request: Request, prefix: Path) -> str:
    """Return the path of the request's tokenizer, or of the one trained beside the prefix."""
    trained = ".model" if request.chat is None else f"{TOKENIZER}/tokenizer.json"
    return request.tokenizer_model or f"{prefix}{trained}"


def with_end(prefix: Path, end: str) -> Path:
    """Return the path of a prefix with this end."""
    return prefix.with_name(prefix.name + end)
