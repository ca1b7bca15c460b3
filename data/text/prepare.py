"""Prepare text and conversations as Megatron's indexed token files.

This trains a tokenizer unless one is given, tokenizes in several processes and writes the files, or
keeps the files of an equal earlier request. All files are drafts until the end and are then renamed
together: after a kill no file looks complete, and the same command starts over.
"""

import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np

from data.chat.conversations import NAMED, train_chat_tokenizer
from data.chat.convert import END, TURNS, UNREAD, convert, with_conversation, write_packed
from data.chat.template import load_template
from data.text.corpus import Corpus, Rows, input_files, size_of, stdlib_files, stdlib_folder
from data.text.indexed import (
    LOSS_MASK,
    cannot_write,
    entropy,
    id_type,
    token_counts,
    write_index,
    writing,
)
from data.text.record import (
    CHAT,
    CHAT_ENDS,
    CONVERSATIONS,
    TOKENIZER,
    Prepared,
    Request,
    ends_of,
    existing,
    inputs_of,
    made_with_of,
    with_end,
)
from data.text.workers import DROPPED, Tokens, batched, in_order, tokenized
from data.tokenizer import HuggingFaceTokenizer, Tokenizer, load_tokenizer, train_tokenizer
from runtime.errors import DataError, StoppedError
from runtime.files import InUseError, owned
from runtime.machine import usable_cores
from runtime.signals import signals_later

# Bytes of input per worker: with fewer, starting the process would take longer than its work.
_BYTES_PER_WORKER = 1 << 23


@dataclass
class TokenFiles:
    """Files with the tokens of all documents or conversations, and their lengths and counts."""

    ids: IO[bytes]
    learned: IO[bytes] | None
    """For conversations, a byte per token, 1 if it carries loss; None for text."""
    lengths: list[np.ndarray] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, tokens: Tokens) -> None:
        """Append the tokens of the next documents."""
        self.ids.write(tokens.ids.tobytes())
        if self.learned is not None and tokens.learned is not None:
            self.learned.write(tokens.learned.tobytes())
        self.lengths.append(tokens.lengths)
        self.refused += tokens.refused
        self.counts.update(tokens.counts)

    def flush(self) -> None:
        """Flush the files, so that others can read them."""
        self.ids.flush()
        if self.learned is not None:
            self.learned.flush()


RESUMED = ("bin", "lengths", "learned", "refused", "journal")
"""Extensions of files, now removed, that killed runs of versions before 2026-11-28 left behind."""


def prepare(
    request: Request,
    prefix: Path,
    overwrite: bool = False,
    progress: bool = True,
    workers: int | None = 1,
) -> tuple[Prepared, bool]:
    """Write `prefix`.bin and .idx, the record `prefix`.json, and a tokenizer if one is trained.

    The tokenizer is `prefix`.model, or the folder `prefix`_tokenizer for conversations. Complete
    data of the same request and unchanged input is kept. The files appear together at the end or
    not at all, and are the same for any number of `workers`, the processes that tokenize (None: as
    many as the input keeps busy); a stopped run starts over. Returns facts about the data, and
    whether it was kept.

    Raises DataError if there is nothing to read, a file is unreadable, the tokenizer is bad, the
    prefix has other data, or another process writes there.
    """
    if not prefix.name:
        raise DataError(
            f"the output prefix {prefix} does not end in a file name; give one such as "
            "runs/data/mine"
        )
    chat = request.chat
    if chat is not None and request.tokenizer_model is None and chat.chat_template not in NAMED:
        raise DataError(
            f"chat_template is {chat.chat_template}, but a tokenizer can be trained only for "
            f"{', '.join(NAMED)}; give one of these, or --tokenizer-model"
        )
    try:
        prepared = None if overwrite else existing(request, prefix)
        if prepared is not None:
            return prepared, True
        with ExitStack() as locks:
            _lock(request, prefix, locks)
            # While this process waited for the lock, another may have finished the same data.
            prepared = None if overwrite else existing(request, prefix)
            if prepared is not None:
                return prepared, True
            for name in RESUMED:
                prefix.with_name(f".{prefix.name}.resume.{name}").unlink(missing_ok=True)
            try:
                return _prepare(request, prefix, overwrite, progress, workers), False
            except (KeyboardInterrupt, SystemExit, StoppedError):
                print("nothing was written; the same command starts over", file=sys.stderr)
                raise
    except OSError as error:  # only read errors get here; write errors are DataErrors by now
        raise DataError(
            f"cannot read {error.filename or prefix} ({error.strerror}); check its permissions"
        ) from error


def _lock(request: Request, prefix: Path, locks: ExitStack) -> None:
    """Lock every name that the request writes.

    Raises DataError if another process writes there, and StoppedError if the folder is not
    writable.
    """
    stems: dict[str, None] = {}
    for end in ends_of(request):
        path = with_end(prefix, end)
        stems[path.name if end == TOKENIZER else path.stem] = None
    try:
        for stem in stems:
            locks.enter_context(owned(prefix.parent, stem))
    except InUseError as error:
        raise DataError(f"cannot write {prefix}: {error}") from error
    except OSError as error:
        raise cannot_write(prefix, error) from error


def _prepare(
    request: Request, prefix: Path, overwrite: bool, progress: bool, workers: int | None
) -> Prepared:
    files = input_files(request.inputs, request.suffix) if request.inputs else stdlib_files()
    source: Corpus | Rows = Rows(files)
    if request.chat is None:
        source = Corpus(files, request.max_bytes, not request.inputs, request.json_key)
    inputs = inputs_of(request)  # before reading, so that a change meanwhile is noticed later
    size = _check_input(request, source, progress)
    ends = ends_of(request)

    with writing(*(with_end(prefix, end) for end in ends)) as paths, ExitStack() as stack:
        drafts = dict(zip(ends, paths, strict=True))
        model = request.tokenizer_model or _train(request, source, drafts, progress)
        tokenizer = load_tokenizer(model)
        if request.chat is None:
            token_files = TokenFiles(stack.enter_context(drafts[".bin"].open("wb")), None)
        else:
            # Conversations are packed at the end. Until then they are in files without a name,
            # which a killed process does not leave behind.
            ids = stack.enter_context(TemporaryFile(dir=prefix.parent))
            learned = stack.enter_context(TemporaryFile(dir=prefix.parent))
            token_files = TokenFiles(ids, learned)

        unit = "text_bytes" if request.chat is None else "read"
        with (
            _bar("tokenized", size, progress, request) as bar,
            closing(_tokens(request, source, tokenizer, workers)) as results,
        ):
            for tokens in results:
                token_files.add(tokens)
                bar.update(tokens.counts[unit])
        token_files.flush()

        prepared = _finish(request, tokenizer, token_files, drafts, skipped=len(source.skipped))
        record: dict[str, Any] = {
            "made_with": made_with_of(request),
            "prepared": asdict(prepared),
            "inputs": inputs,
            "python": sys.version,
        }
        if request.chat is not None:
            template = load_template(tokenizer.path, request.chat.chat_template)
            record[CHAT] = {
                "chat_template": template.source,
                "tool_use": template.tool_use,
                "ends": prepared.turn_ends,
            }
        drafts[".json"].write_text(json.dumps(record, indent=1) + "\n")
        if overwrite:
            # At no time may a new .bin exist with an old record, or text with an old loss mask.
            for end in (".json", *CHAT_ENDS):
                with_end(prefix, end).unlink(missing_ok=True)
            if TOKENIZER in ends:
                shutil.rmtree(with_end(prefix, TOKENIZER), ignore_errors=True)
    return prepared


def _train(
    request: Request, source: Corpus | Rows, drafts: dict[str, Path], progress: bool
) -> Path:
    """Train a tokenizer as one of the drafts; return its path."""
    size = request.vocab_size or 4096
    if progress:
        print(f"training a tokenizer of {size} entries", file=sys.stderr)
    if isinstance(source, Corpus):
        return train_tokenizer(source, drafts[".model"].with_suffix(""), size)
    assert request.chat is not None
    return train_chat_tokenizer(
        source, request.chat.skip_refused, drafts[TOKENIZER], size, str(request.chat.chat_template)
    )


def _check_input(request: Request, source: Corpus | Rows, progress: bool) -> int | None:
    """Read all input once; return its number of bytes of text or of conversations.

    Returns None if the input is on the hub. An unreadable file must fail now, not after hours of
    training a tokenizer.
    """
    if not all(path.exists() for path in source.files):
        return None
    size = 0
    with _bar("checked", None, progress, request) as bar:
        for item in source:
            step = len(item.encode()) if isinstance(item, str) else 1
            size += step
            bar.update(step)
    if size:
        return size

    if not request.inputs:
        raise DataError(
            f"{stdlib_folder()} has no Python sources on this machine; give other text with --input"
        )
    kind = "text" if request.chat is None else "conversation"
    suffix = ""
    if any(Path(name).is_dir() for name in request.inputs):
        suffix = f" and --suffix {request.suffix}"
    raise DataError(f"there is no {kind} in {', '.join(request.inputs)}; check the paths{suffix}")


def _bar(title: str, total: int | None, progress: bool, request: Request) -> Any:
    """Return a progress bar on stderr that appears after two seconds at the earliest."""
    from tqdm import tqdm

    with signals_later():  # an interrupt inside tqdm's constructor ends in a traceback
        return tqdm(
            desc=title,
            total=total,
            unit="B" if request.chat is None else " conversations",
            unit_scale=True,
            disable=not progress,
            delay=2,
            mininterval=0.5 if sys.stderr.isatty() else 30,
        )


def _tokens(
    request: Request, source: Corpus | Rows, tokenizer: Tokenizer, workers: int | None
) -> Generator[Tokens, None, None]:
    """Yield the tokens of documents or rows, in order."""
    work: Callable[[list[Any]], Tokens]
    items: Iterator[Any] = iter(source)
    if request.chat is None:
        work = partial(tokenized, tokenizer, add_bos_token=request.add_bos_token)
    else:
        assert isinstance(tokenizer, HuggingFaceTokenizer)  # others have no chat template
        template = load_template(tokenizer.path, request.chat.chat_template)
        work = partial(convert, request.chat, template, tokenizer)
        items = map(partial(with_conversation, template.reads), items)
    if not workers:
        size = sum(map(size_of, source.files))
        workers = min(len(usable_cores()), 1 + size // _BYTES_PER_WORKER)
    return in_order(work, batched(items), workers)


def _finish(
    request: Request,
    tokenizer: Tokenizer,
    files: TokenFiles,
    drafts: dict[str, Path],
    skipped: int,
) -> Prepared:
    """Write the index, and for conversations the packed pairs; return facts about the data."""
    lengths = np.concatenate([np.zeros(0, np.int32), *files.lengths])
    dtype = id_type(tokenizer.vocab_size)
    refused = files.refused
    if not len(lengths):
        hint = "check the input"
        if refused:
            hint = f"all {len(refused)} conversations were refused, the first: {refused[0]}"
        raise DataError(f"there is nothing to write; {hint}")

    conversations = None
    if request.chat is None:
        write_index(drafts[".idx"], dtype, lengths)
    else:
        assert files.learned is not None
        pairs = [(drafts[f"{end}.bin"], drafts[f"{end}.idx"]) for end in ("", LOSS_MASK)]
        sources = [(files.ids, dtype), (files.learned, np.dtype(np.uint8))]
        samples = write_packed(sources, pairs, lengths, request.chat.seq_length)
        conversations = {name: files.counts[name] for name in CONVERSATIONS}
        conversations["samples"] = samples
        conversations["places"] = samples * request.chat.seq_length
        if request.chat.skip_refused:
            lines = "".join(f"{line}\n" for line in refused)
            drafts[".refused.txt"].write_text(lines, encoding="utf-8")

    counts = token_counts(drafts[".bin"].with_suffix(""), sys.maxsize)
    unknown_tokens = files.counts[DROPPED]
    if tokenizer.unknown is not None:
        unknown_tokens = int(counts[tokenizer.unknown : tokenizer.unknown + 1].sum())
    return Prepared(
        tokenizer_sha256=tokenizer.sha256,
        tokenizer_settings=tokenizer.settings,
        documents=len(lengths),
        tokens=int(lengths.sum(dtype=np.int64)),
        dtype=dtype.name,
        text_bytes=files.counts["text_bytes"],
        skipped_files=skipped,
        unigram_entropy=entropy(counts),
        unknown_tokens=unknown_tokens,
        conversations=conversations,
        begin=None if request.chat else list(tokenizer.begin(request.add_bos_token)),
        unread=_counts_after(files.counts, UNREAD) or None,
        turn_ends=None if request.chat is None else _turn_ends(tokenizer, files.counts),
    )


def _counts_after(counts: Counter[str], start: str) -> dict[str, int]:
    """Return the counts with this prefix, keyed by the rest of the name, largest first."""
    matches = []
    for name, count in counts.items():
        if name.startswith(start):
            matches.append((-count, name.removeprefix(start)))
    return {name: -negative for negative, name in sorted(matches)}


def _turn_ends(tokenizer: Tokenizer, counts: Counter[str]) -> list[int]:
    """Return the ids of the tokens at which generation should stop, the most frequent first.

    A special token counts if it ends any turn. An ordinary added token counts only if it ends at
    least half of the turns, because at the end of a few turns it may be part of their text.
    """
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    ends = []
    for name, count in _counts_after(counts, END).items():
        token = int(name)
        text = tokenizer.detokenize([token], special=True)
        is_special = token == tokenizer.eod or tokenizer.special.fullmatch(text)
        if is_special or 2 * count >= counts[TURNS]:
            ends.append(token)
    return ends
