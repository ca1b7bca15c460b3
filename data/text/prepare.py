"""Prepare text and conversations as Megatron's indexed token files: train a tokenizer, tokenize,
write, or keep.
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

# Input that takes a process longer than its start.
_BYTES_PER_WORKER = 1 << 23


@dataclass
class Written:
    """Tokens of all documents or conversations, in files, and the counts of them."""

    ids: IO[bytes]
    learned: IO[bytes] | None
    """Which tokens of conversations carry loss; None for text."""
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
        """Let others read the files."""
        self.ids.flush()
        if self.learned is not None:
            self.learned.flush()


RESUMED = ("bin", "lengths", "learned", "refused", "journal")
"""Endings of the drafts of a killed preparation, which versions before 2026-11-28 would have
resumed.
"""


def prepare(
    request: Request,
    prefix: Path,
    overwrite: bool = False,
    progress: bool = True,
    workers: int | None = 1,
) -> tuple[Prepared, bool]:
    """Write `prefix`.bin and .idx, .model or _tokenizer/ if one is trained, and .json, the record
    of the request.

    Complete data of the same request and unchanged input is kept. The files appear together at the
    end or not at all, the same for any number of `workers`, the processes that tokenize (None: as
    many as the input keeps busy); a run that was stopped is begun again. Returns facts about the
    data, and whether it was kept.

    Raises DataError: nothing to read, an unreadable file, a bad tokenizer, other data at the
    prefix, or another process writing there.
    """
    if not prefix.name:
        raise DataError(
            f"the output prefix {prefix} ends in no file name; give one such as runs/data/mine"
        )
    if (
        request.chat is not None
        and request.tokenizer_model is None
        and request.chat.chat_template not in NAMED
    ):
        raise DataError(
            f"chat_template is {request.chat.chat_template}, and a tokenizer is trained for one of {', '.join(NAMED)}; "
            "name one, or give --tokenizer-model"
        )
    try:
        if not overwrite and (kept := existing(request, prefix)):
            return kept, True
        with ExitStack() as held:
            try:
                paths = {end: with_end(prefix, end) for end in ends_of(request)}
                for stem in dict.fromkeys(
                    path.name if end == TOKENIZER else path.stem for end, path in paths.items()
                ):
                    held.enter_context(owned(prefix.parent, stem))
            except InUseError as error:
                raise DataError(f"cannot write {prefix}: {error}") from error
            except OSError as error:
                raise cannot_write(prefix, error) from error
            if not overwrite and (
                kept := existing(request, prefix)
            ):  # another process finished it meanwhile
                return kept, True
            for name in RESUMED:
                prefix.with_name(f".{prefix.name}.resume.{name}").unlink(missing_ok=True)
            try:
                return _prepare(request, prefix, overwrite, progress, workers), False
            except (KeyboardInterrupt, SystemExit, StoppedError):
                print("nothing was written; the same command begins again", file=sys.stderr)
                raise
    except OSError as error:  # write errors are DataErrors by now
        raise DataError(
            f"cannot read {error.filename or prefix} ({error.strerror}); check that you may"
        ) from error


def _prepare(
    request: Request, prefix: Path, overwrite: bool, progress: bool, workers: int | None
) -> Prepared:
    files = input_files(request.inputs, request.suffix) if request.inputs else stdlib_files()
    source: Corpus | Rows = Rows(files)
    if request.chat is None:
        source = Corpus(files, request.max_bytes, not request.inputs, request.json_key)
    inputs = inputs_of(request)
    size = _checked(request, source, progress)
    ends = ends_of(request)
    with writing(*(with_end(prefix, end) for end in ends)) as drafts, ExitStack() as stack:
        draft = dict(zip(ends, drafts, strict=True))
        tokenizer = load_tokenizer(
            request.tokenizer_model or _train(request, source, draft, progress)
        )
        if request.chat is None:
            written = Written(stack.enter_context(draft[".bin"].open("wb")), None)
        # in files without a name, which a killed process does not leave, until they are packed
        else:
            ids, learned = (stack.enter_context(TemporaryFile(dir=prefix.parent)) for _ in range(2))
            written = Written(ids, learned)
        unit = "text_bytes" if request.chat is None else "read"
        with (
            _bar("tokenized", size, progress, request) as bar,
            closing(_tokens(request, source, tokenizer, workers)) as results,
        ):
            for tokens in results:
                written.add(tokens)
                bar.update(tokens.counts[unit])
        written.flush()
        prepared = _finish(request, tokenizer, written, draft, skipped=len(source.skipped))
        record: dict[str, Any] = {
            "made_with": made_with_of(request),
            "prepared": asdict(prepared),
            "inputs": inputs,
        }
        record["python"] = sys.version
        if request.chat is not None:
            template = load_template(tokenizer.path, request.chat.chat_template)
            record[CHAT] = {"chat_template": template.source, "tool_use": template.tool_use}
            record[CHAT]["ends"] = prepared.turn_ends
        draft[".json"].write_text(json.dumps(record, indent=1) + "\n")
        if overwrite:
            # The new .bin must never stand beside the old record, nor text beside a loss mask.
            for end in (".json", *CHAT_ENDS):
                with_end(prefix, end).unlink(missing_ok=True)
            if TOKENIZER in ends:
                shutil.rmtree(with_end(prefix, TOKENIZER), ignore_errors=True)
    return prepared


def _train(request: Request, source: Corpus | Rows, draft: dict[str, Path], progress: bool) -> Path:
    """Train a tokenizer as one of the drafts; return its path."""
    size = request.vocab_size or 4096
    if progress:
        print(f"training a tokenizer of {size} entries", file=sys.stderr)
    if isinstance(source, Corpus):
        return train_tokenizer(source, draft[".model"].with_suffix(""), size)
    assert request.chat is not None
    return train_chat_tokenizer(
        source, request.chat.skip_refused, draft[TOKENIZER], size, str(request.chat.chat_template)
    )


def _checked(request: Request, source: Corpus | Rows, progress: bool) -> int | None:
    """Read everything; return its bytes of text, or conversations. None if that takes a download.

    An unreadable file must fail now, not after hours of training a tokenizer.
    """
    if not all(path.exists() for path in source.files):
        return None
    size = 0
    with _bar("checked", None, progress, request) as bar:
        for item in source:
            size += (step := len(item.encode()) if isinstance(item, str) else 1)
            bar.update(step)
    if not size and request.inputs:
        what = "text" if request.chat is None else "conversation"
        folders = any(Path(name).is_dir() for name in request.inputs)
        suffix = f" and --suffix {request.suffix}" if folders else ""
        raise DataError(
            f"there is no {what} in {', '.join(request.inputs)}; check the paths{suffix}"
        )
    if not size:
        raise DataError(
            f"{stdlib_folder()} holds no Python sources on this machine; give other text by --input"
        )
    return size


def _bar(done: str, total: int | None, progress: bool, request: Request) -> Any:
    """Return a progress bar on stderr with rate and time left, shown from the third second on."""
    from tqdm import tqdm

    with signals_later():  # half of a bar ends in a traceback
        return tqdm(
            desc=done, total=total, disable=not progress, delay=2, unit_scale=True,
            unit="B" if request.chat is None else " conversations", mininterval=0.5 if sys.stderr.isatty() else 30,
        )  # fmt: skip


def _tokens(
    request: Request, source: Corpus | Rows, tokenizer: Tokenizer, workers: int | None
) -> Generator[Tokens, None, None]:
    """Yield the tokens of documents or rows, in order."""
    work: Callable[[list[Any]], Tokens] = partial(
        tokenized, tokenizer, add_bos_token=request.add_bos_token
    )
    items: Iterator[Any] = iter(source)
    if request.chat is not None:
        assert isinstance(tokenizer, HuggingFaceTokenizer)  # or it had no template
        template = load_template(tokenizer.path, request.chat.chat_template)
        work, items = (
            partial(convert, request.chat, template, tokenizer),
            map(partial(with_conversation, template.reads), items),
        )
    busy = min(len(usable_cores()), 1 + sum(map(size_of, source.files)) // _BYTES_PER_WORKER)
    return in_order(work, batched(items), workers or busy)


def _finish(
    request: Request, tokenizer: Tokenizer, written: Written, draft: dict[str, Path], skipped: int
) -> Prepared:
    """Write the drafts of the output that are not there yet."""
    lengths = np.concatenate([np.zeros(0, np.int32), *written.lengths])
    dtype, refused, conversations = id_type(tokenizer.vocab_size), written.refused, None
    if not len(lengths):
        why = (
            f"all {len(refused)} conversations were refused, the first: {refused[0]}"
            if refused
            else "check the input"
        )
        raise DataError(f"there is nothing to write; {why}")
    if request.chat is None:
        write_index(draft[".idx"], dtype, lengths)
    else:
        assert written.learned is not None
        pairs = [(draft[f"{end}.bin"], draft[f"{end}.idx"]) for end in ("", LOSS_MASK)]
        sources = [(written.ids, dtype), (written.learned, np.dtype(np.uint8))]
        samples = write_packed(sources, pairs, lengths, request.chat.seq_length)
        conversations = {name: written.counts[name] for name in CONVERSATIONS}
        conversations |= {"samples": samples, "places": samples * request.chat.seq_length}
        if request.chat.skip_refused:
            draft[".refused.txt"].write_text(
                "".join(f"{line}\n" for line in refused), encoding="utf-8"
            )
    lost = tokenizer.unknown
    counts = token_counts(draft[".bin"].with_suffix(""), sys.maxsize)
    return Prepared(
        tokenizer_sha256=tokenizer.sha256,
        tokenizer_settings=tokenizer.settings,
        documents=len(lengths),
        tokens=int(lengths.sum(dtype=np.int64)),
        dtype=dtype.name,
        text_bytes=written.counts["text_bytes"],
        skipped_files=skipped,
        unigram_entropy=entropy(counts),
        unknown_tokens=int(counts[lost : lost + 1].sum())
        if lost is not None
        else written.counts[DROPPED],
        conversations=conversations,
        begin=None if request.chat else list(tokenizer.begin(request.add_bos_token)),
        unread=_counted(written.counts, UNREAD) or None,
        turn_ends=None if request.chat is None else _turn_ends(tokenizer, written.counts),
    )


def _counted(counts: Counter[str], begin: str) -> dict[str, int]:
    """Return the counts whose names begin so, the largest first."""
    named = {
        name.removeprefix(begin): count for name, count in counts.items() if name.startswith(begin)
    }
    return dict(sorted(named.items(), key=lambda pair: (-pair[1], pair[0])))


def _turn_ends(tokenizer: Tokenizer, counts: Counter[str]) -> list[int]:
    """Return the tokens at which generation is to stop.

    Special tokens, of any turn, and an added one that ends at least half of the turns: that of few
    may be their text's.
    """
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    ends = []
    for name, count in _counted(counts, END).items():
        text = tokenizer.detokenize([int(name)], special=True)
        if (
            tokenizer.special.fullmatch(text)
            or int(name) == tokenizer.eod
            or 2 * count >= counts[TURNS]
        ):
            ends.append(int(name))
    return ends
