"""Tokenizers behind one small interface: sentencepiece models trained here, and Hugging Face's
tokenizer.json.
"""

import io
import json
import os
import re
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal

from data.hugging_face import (
    backend_with_unknown,
    json_beside,
    load_folder,
    make_special,
    unknown_id,
)
from data.text.indexed import writing
from runtime.errors import DataError
from runtime.files import sha256

END_OF_TEXT = "<|endoftext|>"
# End-of-text tokens of well-known tokenizers, tried if no tokenizer_config.json names one.
_KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[EOS]")
# sentencepiece writes a space as this character, so a literal one must be spelled as its UTF-8
# bytes.
_SPACE_MARK = "▁"


AddBos = Literal["auto", "always", "never"]
"""Choice of the begin token before a text: auto puts what the tokenizer adds by itself."""


class Tokenizer(ABC):
    """Interface of tokenizers for Longmesh and Megatron's GPTDataset."""

    pad = -1
    """GPTDataset masks every label equal to it: a real id here (many tokenizers reuse eod or unk)
    would silently drop real tokens from the loss. No token has id -1."""
    bos: int | None = None
    """Id that begins a text, where there is one."""
    before: tuple[int, ...] = ()
    """Ids that the tokenizer puts before a text by itself."""
    after: tuple[int, ...] = ()
    """Ids that it puts after one by itself."""
    settings: str | None = None
    """Digest of what files beside the tokenizer's change of its ids; None where none are read."""
    unknown: int | None = None
    """Id of what the vocabulary has no token for, where there is one of its own."""

    def __init__(self, path: str, content: bytes, vocab_size: int, eod: int) -> None:
        """Set up for a file; every id is in [0, vocab_size), and ``eod`` ends each document."""
        self.path = path
        self.vocab_size = vocab_size
        self.eod = eod
        # By content, not path: a retrained tokenizer at the same path must not reuse the old
        # caches.
        self.sha256 = sha256(content)
        self.unique_identifiers: OrderedDict[str, object] = OrderedDict(
            {"class": type(self).__name__, "sha256": self.sha256}
        )

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return _loaded_once, (
            self.path,
        )  # a process that is sent one again and again reads its file once

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Return the ids of `text`; special tokens spelled out in it are ordinary text."""

    def begin(self, add_bos_token: "AddBos" = "auto") -> tuple[int, ...]:
        """Return the ids to put before a text. Raises DataError: always, and the tokenizer has no
        begin token.
        """
        if add_bos_token == "never":
            return ()
        if add_bos_token == "always" and not self.before:
            if self.bos is None:
                raise DataError(
                    f"add_bos_token is always, and {self.path} names no bos_token; name one, or leave it out"
                )
            return (self.bos,)
        return self.before

    def document(self, text: str, add_bos_token: "AddBos" = "auto") -> list[int]:
        """Return the ids of a document: between what the tokenizer adds, and ended by ``eod`` once."""
        after = self.after[:-1] if self.after[-1:] == (self.eod,) else self.after
        return [*self.begin(add_bos_token), *self.tokenize(text), *after, self.eod]

    def missing(self, entries: int, token: int) -> str | None:
        """Say that a model of this many entries lacks a token; None if it has it, or the tokenizer
        does not.
        """
        if not entries <= token < self.vocab_size:
            return None
        return (
            f"token {self.name_of(token)} is in the tokenizer's {self.vocab_size} entries, and the model's vocab_size "
            f"is {entries}, so that it has no embedding for it; take it out of the data"
        )

    def name_of(self, token: int) -> str:
        """Return an id with its text, for messages."""
        text = self.detokenize([token], special=True) if 0 <= token < self.vocab_size else ""
        return f"{token} ({text!r})" if text else str(token)

    def dropped(self, text: str, special: bool = False) -> int:
        """Return how many tokens a text lacks, since the vocabulary has none for it, and none for
        the unknown.

        Args:
            special: special tokens spelled out in it count as such.
        """
        return 0

    @abstractmethod
    def detokenize(self, ids: Sequence[int], special: bool = False) -> str:
        """Return the text of `ids`, without special tokens unless `special` and they have one."""


def _without_white_space(text: str, place: tuple[int, int]) -> tuple[int, int]:
    """Return a place of a text without the white space at its ends."""
    begin, end = place
    token = text[begin:end]
    return begin + len(token) - len(token.lstrip()), end - len(token) + len(token.rstrip())


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of any of these texts, of which a longer one counts more."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


@contextmanager
def _undamaged(path: str | os.PathLike[str], kind: str) -> Iterator[None]:
    """Turn the tokenizer library's exception for a bad file into a DataError that names it."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError, DataError):
        raise
    except (
        BaseException
    ) as error:  # the Rust library raises bare Exception, and BaseException for panics
        reason = re.sub(r"^[A-Z_]+: src/.*\] ?", "", " ".join(str(error).split()))[
            :200
        ]  # sentencepiece's own lines
        found = f" ({reason})" if reason else ""
        raise DataError(
            f"{path} is no {kind} or is damaged{found}; copy or train it again"
        ) from error


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece `.model`. Those of `train_tokenizer` round-trip every text exactly."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        import sentencepiece

        content = _read(path)
        with _undamaged(path, "sentencepiece model"):
            self._model = sentencepiece.SentencePieceProcessor(model_proto=content)
            self._model.id_to_piece(
                list(range(self._model.vocab_size()))
            )  # raises for pieces that are not UTF-8
        if self._model.eos_id() < 0:
            raise DataError(
                f"{path} has no end-of-text token (eos_id is -1); use a tokenizer that has one"
            )
        super().__init__(os.fspath(path), content, self._model.vocab_size(), self._model.eos_id())
        self.bos = self._model.bos_id() if self._model.bos_id() >= 0 else None
        self._set_added(json_beside(path, "tokenizer_config.json"))
        self.unknown = self._model.unk_id()
        pieces = [f"<0x{byte:02X}>" for byte in _SPACE_MARK.encode()]
        mark = [self._model.piece_to_id(piece) for piece in pieces]
        self._mark = mark if all(self._model.is_byte(i) for i in mark) else None

    def _set_added(self, config: dict[str, Any]) -> None:
        """Set what is added to a text: the file does not say, and a tokenizer_config.json beside it
        may.
        """
        if config.get("add_bos_token") and self.bos is not None:
            self.before = (self.bos,)
        if config.get("add_eos_token"):
            self.after = (self.eod,)

    def tokenize(self, text: str) -> list[int]:
        if self._mark is None or _SPACE_MARK not in text:
            return self._model.encode(text)
        first, *rest = (self._model.encode(part) for part in text.split(_SPACE_MARK))
        return [*first, *(i for part in rest for i in (*self._mark, *part))]

    def detokenize(self, ids: Sequence[int], special: bool = False) -> str:
        with _undamaged(self.path, "sentencepiece model"):
            return self._model.decode(list(ids))  # control pieces have no text


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json` and the files beside it, which give the ids of `transformers` for the
    folder.

    The end-of-text token is the `eos_token` of a `tokenizer_config.json` in the same folder, else
    the first well-known one in the vocabulary.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        from tokenizers.processors import ByteLevel

        # Work is shared out to processes here, and threads of its own would warn at each fork.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        content = _read(path)
        with _undamaged(path, "Hugging Face tokenizer.json"):
            folder = load_folder(Path(path), content)
            self._backend = folder.backend
            self._backend.no_truncation()
            self._backend.no_padding()
            ids = self._backend.get_vocab(with_added_tokens=True).values()
        # Added tokens may leave gaps, so the highest id can exceed the number of entries.
        vocab_size = max(ids, default=-1) + 1
        if vocab_size > 10 * len(ids) + 1000:
            raise DataError(
                f"{path} names id {vocab_size - 1} among {len(ids)} entries; it is damaged: copy it again"
            )
        ends = [
            token for token in (folder.named.get("eos_token"), *_KNOWN_ENDS) if token is not None
        ]
        eod = next((i for i in map(self._backend.token_to_id, ends) if i is not None), None)
        if eod is None:
            raise DataError(
                f"{path} has no end-of-text token (none of {', '.join(ends)}); name it as eos_token in a "
                "tokenizer_config.json beside it"
            )
        super().__init__(os.fspath(path), content, vocab_size, eod)
        self.settings = sha256(json.dumps(folder.settings))

        self.before, self.after = self._added_around()
        self._backend.post_processor = ByteLevel(
            trim_offsets=False
        )  # a token's place includes its leading space
        self._guard(folder.control)
        self.bos = (
            self._backend.token_to_id(folder.named["bos_token"])
            if "bos_token" in folder.named
            else None
        )
        unknown = unknown_id(self._backend, content)
        self.unknown = None if unknown == self.eod else unknown
        self._with_unknown = backend_with_unknown(self._backend)

    def _added_around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids that the post-processor puts before and after a text, here one of the end
        token alone.
        """
        end = self._backend.id_to_token(self.eod)
        encoding = self._backend.encode(end, add_special_tokens=True)
        of_text = [place for place, added in enumerate(encoding.special_tokens_mask) if not added]
        if not of_text:
            return (), ()
        return tuple(encoding.ids[: of_text[0]]), tuple(encoding.ids[of_text[-1] + 1 :])

    def _guard(self, control: frozenset[str]) -> None:
        """Let no text of a document become a control token, whatever flag its entry has."""
        added = self._backend.get_added_tokens_decoder()
        control |= {token.content for number, token in added.items() if number == self.eod}
        guarded = [token for token in added.values() if token.content in control]
        # The library reads special tokens as ordinary text while encode_special_tokens is set;
        # nothing else of the encoding hangs on the flag.
        make_special(self._backend, guarded)
        self._backend.encode_special_tokens = True
        self._control = frozenset(token.content for token in guarded)
        self.special = _any_of(self._control)
        """Matches the text of every control token."""
        self.added = _any_of(token.content for token in added.values())
        """Matches the text of every added token."""
        self._stripping = {
            number for number, token in added.items() if token.lstrip or token.rstrip
        }
        self._by_encoding = {
            token.content for token in added.values() if token.normalized or token.single_word
        }
        self.added_ids = frozenset(added)
        """Ids of the tokens that no text is merged into."""
        self.spelled = self.search_for(())
        """Returns the text of a control token that a text would become a part of, None if there is
        none.
        """

    def tokenize(self, text: str) -> list[int]:
        with _undamaged(self.path, "Hugging Face tokenizer.json"):
            (encoding,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=False
            )  # without places in it
        ids: list[int] = encoding.ids
        if self.eod in ids:
            raise DataError(
                f"a text spells {self._backend.id_to_token(self.eod)!r}, which {self.path} has as a word too, "
                "so that it would end the document; remove it from the text"
            )
        return ids

    def tokenize_special(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text in which special tokens count as such, and the characters
        [begin, end) of each.

        A token that takes white space beside it (lstrip, rstrip) has the characters of its own text
        alone.
        """
        with _undamaged(self.path, "Hugging Face tokenizer.json"):
            self._backend.encode_special_tokens = False
            try:
                encoding = self._backend.encode(text, add_special_tokens=False)
            finally:
                self._backend.encode_special_tokens = True
        offsets: list[tuple[int, int]] = encoding.offsets
        if self._stripping:
            offsets = [
                _without_white_space(text, place) if number in self._stripping else place
                for number, place in zip(encoding.ids, offsets, strict=True)
            ]
        return encoding.ids, offsets

    def dropped(self, text: str, special: bool = False) -> int:
        if self._with_unknown is None:
            return 0
        self._with_unknown.encode_special_tokens = not special
        with _undamaged(self.path, "Hugging Face tokenizer.json"):
            whole = self._with_unknown.encode(text, add_special_tokens=False).ids
        return len(whole) - len(self.tokenize_special(text)[0] if special else self.tokenize(text))

    def is_paired(self, text: str) -> bool:
        """Return whether an added token is one of a pair such as <think> and </think>, around a
        part of a text.
        """
        opening = text.replace("</", "<", 1).replace("[/", "[", 1)
        closing = (
            opening.replace("<", "</", 1)
            if opening.startswith("<")
            else opening.replace("[", "[/", 1)
        )
        pair = (opening, closing)
        return text not in self._control and all(self.added.fullmatch(part) for part in pair)

    def search_for(self, more: Iterable[str]) -> Callable[[str], str | None]:
        """Return a function that names the control token, or one of ``more``, that a text would
        hold; else None.

        A token that is found in normalized text, or as a whole word alone, is looked for by
        encoding the text.
        """
        texts = self._control.union(more)
        pattern = _any_of(texts)

        def by_pattern(text: str) -> str | None:
            match = pattern.search(text)
            return None if match is None else match[0]

        def by_encoding(text: str) -> str | None:
            tokens = map(self._backend.id_to_token, self.tokenize_special(text)[0])
            return next((token for token in tokens if token in texts), None)

        return by_pattern if texts.isdisjoint(self._by_encoding) else by_encoding

    def detokenize(self, ids: Sequence[int], special: bool = False) -> str:
        with _undamaged(self.path, "Hugging Face tokenizer.json"):
            return self._backend.decode(list(ids), skip_special_tokens=not special)


def load_tokenizer(path: str | os.PathLike[str]) -> SentencePieceTokenizer | HuggingFaceTokenizer:
    """Load a tokenizer: `.model` is sentencepiece, `.json` Hugging Face.

    Raises DataError: the file is missing, damaged, of another kind, or has no end-of-text token.
    """
    suffix = Path(path).suffix
    if suffix == ".model":
        return SentencePieceTokenizer(path)
    if suffix == ".json":
        return HuggingFaceTokenizer(path)
    raise DataError(
        f"tokenizer {path} must be a sentencepiece .model or a Hugging Face tokenizer.json"
    )


@cache
def _loaded_once(path: str) -> Tokenizer:
    return load_tokenizer(path)


def train_tokenizer(
    texts: Iterable[str], model_prefix: str | os.PathLike[str], vocab_size: int
) -> Path:
    """Train a byte-fallback BPE on the first 8 million characters of `texts` and write
    `model_prefix`.model.

    Every text, Python sources included, round-trips exactly: nothing is normalised, no space is
    added or removed, and bytes spell what no piece covers. The same texts give the same file, byte
    for byte; it is written atomically.

    Raises DataError: no text, or a `vocab_size` that the texts cannot fill or that is too small for
    the 256 bytes.
    """
    import sentencepiece

    # A list: where an iterator raises, sentencepiece would print a traceback and continue.
    model, lines = (
        io.BytesIO(),
        [line for text in to_train_on(texts) for line in text.split("\n") if line],
    )
    if not lines:
        raise DataError(
            "there is no text to train a tokenizer on; check the corpus's path and suffix"
        )
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=min(
                max(vocab_size, 2), 1 << 24
            ),  # beyond: no bound is named, or gigabytes are taken
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            character_coverage=0.9995,
            max_sentence_length=1 << 16,
            unk_id=0,
            eos_id=1,
            eos_piece=END_OF_TEXT,
            bos_id=-1,
            pad_id=-1,
            # The model file records the number, so it must not depend on the machine.
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        bound = re.search(r"(vs|<=) (\d+)\.", str(error))
        fix = (
            f"give --vocab-size {bound[2]} or {'more' if bound[1] == 'vs' else 'less'}"
            if bound
            else str(error)
        )
        raise DataError(
            f"vocab_size {vocab_size} does not suit the text to train on; {fix}"
        ) from error
    path = Path(f"{os.fspath(model_prefix)}.model")
    with writing(path) as (temporary,):
        temporary.write_bytes(model.getvalue())
    return path


def _read(path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read tokenizer {path} ({error.strerror}); check --tokenizer-model, or write "
            "it (python -m tools.prepare_data)"
        ) from error


def to_train_on(texts: Iterable[str]) -> Iterator[str]:
    """Yield the first 8 million characters of texts: a few thousand merges settle on them, within
    about a second.
    """
    characters = 8_000_000
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return
