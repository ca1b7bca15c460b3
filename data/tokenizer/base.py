"""The interface of tokenizers, and the reading of their files."""

import os
import re
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal

from runtime.errors import DataError
from runtime.files import sha256

AddBos = Literal["auto", "always", "never"]
"""Policy for a begin token before each text; "auto" adds one if the tokenizer does so by itself."""


class Tokenizer(ABC):
    """Interface of tokenizers for Longmesh and Megatron's GPTDataset."""

    pad = -1
    """Padding id, which no token has. GPTDataset masks every label equal to it: a real id (many
    tokenizers reuse eod or unk) would silently drop real tokens from the loss."""
    bos: int | None = None
    """Id of the token that begins a text; None without such a token."""
    before: tuple[int, ...] = ()
    """Ids of the tokens that the tokenizer adds before a text by itself."""
    after: tuple[int, ...] = ()
    """Ids of the tokens that the tokenizer adds after a text by itself."""
    settings: str | None = None
    """Digest of the settings in files next to the tokenizer; None if no such file is read."""
    unknown: int | None = None
    """Id for text that the vocabulary has no token for; None if no token is reserved for it."""

    def __init__(self, path: str, content: bytes, vocab_size: int, eod: int) -> None:
        """Set up for a file; every id is in [0, vocab_size), and ``eod`` ends each document."""
        self.path = path
        self.vocab_size = vocab_size
        self.eod = eod
        # By content, not by path: a retrained tokenizer at the same path must not reuse the old
        # caches.
        self.sha256 = sha256(content)
        self.unique_identifiers: OrderedDict[str, object] = OrderedDict(
            {"class": type(self).__name__, "sha256": self.sha256}
        )

    def __reduce__(self) -> tuple[Any, tuple[type["Tokenizer"], str]]:
        # Pickle only the path, so a process that gets a tokenizer with every batch reads the file
        # once.
        return _loaded_once, (type(self), self.path)

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Return the ids of `text`; special tokens spelled out in it are ordinary text."""

    def begin(self, add_bos_token: AddBos = "auto") -> tuple[int, ...]:
        """Return the ids to put before a text.

        Raises DataError if add_bos_token is "always" but the tokenizer has no begin token.
        """
        if add_bos_token == "never":
            return ()
        if add_bos_token == "always" and not self.before:
            if self.bos is None:
                raise DataError(
                    f'add_bos_token is "always", but {self.path} has no bos_token; use a tokenizer '
                    "with one, or leave out --add-bos-token"
                )
            return (self.bos,)
        return self.before

    def document(self, text: str, add_bos_token: AddBos = "auto") -> list[int]:
        """Return the ids of a document, with the tokens around it and exactly one final ``eod``."""
        after = self.after[:-1] if self.after[-1:] == (self.eod,) else self.after
        return [*self.begin(add_bos_token), *self.tokenize(text), *after, self.eod]

    def missing(self, entries: int, token: int) -> str | None:
        """Return an error message if the tokenizer has a token that a model of `entries` lacks."""
        if not entries <= token < self.vocab_size:
            return None
        return (
            f"token {self.name_of(token)} is in the tokenizer's {self.vocab_size} entries, but the "
            f"model's vocab_size is {entries}, so the model has no embedding for it; remove the "
            "token from the data"
        )

    def name_of(self, token: int) -> str:
        """Return an id with its text, for messages."""
        text = self.detokenize([token], special=True) if 0 <= token < self.vocab_size else ""
        return f"{token} ({text!r})" if text else str(token)

    def dropped(self, text: str, special: bool = False) -> int:
        """Return the number of tokens missing from a text because some characters are dropped.

        A character is dropped if the vocabulary has neither a token for it nor an unknown token.

        Args:
            text: the text.
            special: True if special tokens spelled out in the text count as special.
        """
        return 0

    @abstractmethod
    def detokenize(self, ids: Sequence[int], special: bool = False) -> str:
        """Return the text of `ids`; special tokens that have a text appear only with `special`."""


@cache
def _loaded_once(kind: Any, path: str) -> Tokenizer:
    return kind(path)


@contextmanager
def undamaged(path: str | os.PathLike[str], kind: str) -> Iterator[None]:
    """Turn the tokenizer library's exception for a bad file into a DataError that names it."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError, DataError):
        raise
    # The Rust library raises bare Exception, and BaseException for panics.
    except BaseException as error:
        lines = " ".join(str(error).split())
        reason = re.sub(r"^[A-Z_]+: src/.*\] ?", "", lines)[:200]  # without sentencepiece's prefix
        hint = f" ({reason})" if reason else ""
        raise DataError(
            f"{path} is not a {kind} or is damaged{hint}; copy or train it again"
        ) from error


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a tokenizer's file. Raises DataError if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read tokenizer {path} ({error.strerror}); check --tokenizer-model, or write "
            "it (python -m tools.prepare_data)"
        ) from error
