"""RULER's texts: haystacks, words of needles and lists, questions of files; and the draws by name
that choose them.

A draw is a SHA-256 of what it is for, so that a seed gives the same on any machine and Python. The
paper takes Paul Graham's essays and the wordlists of a package. Neither is here: sentences are made
from some hundred words, and words joined by a hyphen make as many names as are needed.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeVar

from runtime.errors import DataError
from runtime.files import sha256

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
WORDS = Path(__file__).with_name("words.txt")
"""A line each of adjectives, nouns and verbs, no word twice."""
SENTENCES = (
    "The {adjective} {noun} {verb} the {noun}.",
    "In the {noun}, a {adjective} {noun} {verb} the {noun} of the {noun}.",
    "No {noun} {verb} the {adjective} {noun} before the {noun}.",
    "After that, the {noun} {verb} every {adjective} {noun} near the {noun}.",
    "It was a {adjective} {noun}, and the {noun} {verb} it.",
    "Some {noun} {verb} a {noun} because the {noun} was {adjective}.",
)
T = TypeVar("T")


def below(draw: str, bound: int, name: str, number: int) -> int:
    """Return one of [0, bound), which depends on these names alone; ``bound`` is far less than
    2^64.
    """
    return int.from_bytes(next(_digests(draw, name, number))[:8], "big") % bound


def bits(draw: str, name: str, number: int) -> int:
    """Return one of [0, 2^128)."""
    return int.from_bytes(next(_digests(draw, name, number))[:16], "big")


def distinct(draw: str, size: int, bound: int, name: str) -> list[int]:
    """Return ``size`` different ones of [0, bound), which begin alike for any size."""
    return different(
        size, (int.from_bytes(digest[:8], "big") % bound for digest in _digests(draw, name))
    )


def different(size: int, numbers: Iterable[int]) -> list[int]:
    """Return the first ``size`` different numbers."""
    found, left = dict[int, None](), iter(numbers)
    while len(found) < size:
        found[next(left)] = None
    return list(found)


def shuffled(draw: str, items: Sequence[T], name: str) -> list[T]:
    """Return the items in an order that depends on these names and their number alone."""
    digests = list(islice(_digests(draw, name), len(items)))
    return [items[place] for place in sorted(range(len(items)), key=digests.__getitem__)]


def _digests(draw: str, name: str, first: int = 0) -> Iterator[bytes]:
    begin = f"{draw}:{name}:".encode()
    return (hashlib.sha256(begin + b"%d" % number).digest() for number in count(first))


@cache
def wordlists() -> tuple[list[str], list[str], list[str]]:
    """Return adjectives, nouns and verbs."""
    adjectives, nouns, verbs = (
        line.split() for line in WORDS.read_text(encoding="utf-8").splitlines()
    )
    return adjectives, nouns, verbs


def names(words: int) -> int:
    """Return how many names there are of so many words."""
    adjectives, nouns, _ = wordlists()
    return len(nouns) * len(adjectives) ** (words - 1)


def name(number: int, words: int) -> str:
    """Return a name such as torpid-kid, of a number below ``names(words)``."""
    adjectives, nouns, _ = wordlists()
    found = []
    for kind in (nouns, *[adjectives] * (words - 1)):
        number, place = divmod(number, len(kind))
        found.append(kind[place])
    return "-".join(reversed(found))


class Essays:
    """Sentences without an end: those of a file again and again, or made ones, always the same."""

    def __init__(self, file: Path | None = None) -> None:
        """Read a file: RULER's JSON with a ``text``, or plain text. Raises DataError."""
        self.title = "made sentences" if file is None else file.name
        """The name of it in tables."""
        self._sentences = [] if file is None else _read(file)
        self._repeats = file is not None

    @cached_property
    def identity(self) -> str:
        """Digest of a file's sentences; empty for made ones."""
        return sha256("\n".join(self._sentences).encode()) if self._repeats else ""

    def first(self, size: int) -> Sequence[str]:
        """Return the first ``size`` sentences."""
        if self._repeats:
            whole, rest = divmod(size, len(self._sentences))
            return self._sentences * whole + self._sentences[:rest]
        words = dict(zip(("adjective", "noun", "verb"), wordlists(), strict=True))
        while len(self._sentences) < size:
            draw = f"sentence {len(self._sentences)}"
            parts = re.split(r"\{(\w+)\}", SENTENCES[below(draw, len(SENTENCES), "shape", 0)])
            for place, part in enumerate(parts):
                if place % 2:
                    parts[place] = words[part][below(draw, len(words[part]), part, place)]
            self._sentences.append("".join(parts))
        return self._sentences[:size]


def _read(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".json":
            text = json.loads(text)["text"]
        found = re.split(r"(?<=[.!?]) ", " ".join(text.split()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"essays is {file}, which cannot be read ({type(error).__name__}: {error}); give plain text in UTF-8, or "
            'JSON {"text": "..."}'
        ) from error
    if found == [""]:
        raise DataError(f"essays is {file}, which has no text; give another file, or leave it out")
    return found


@dataclass(frozen=True)
class Asked:
    """A question, and its answers, of which any one is right."""

    question: str
    answers: tuple[str, ...]
    paragraphs: tuple[str, ...]
    """The texts that answer it."""
    near: tuple[str, ...] = ()
    """Others of the same article, which come before those of other articles."""


class Questions:
    """The questions of a file."""

    def __init__(self, file: Path) -> None:
        """Read a file. Raises DataError: it cannot be read, or has another form, or no question."""
        try:
            text = file.read_text(encoding="utf-8-sig")
            self.asked = []
            for place, asked in _asked(text):
                _check_asked(f"{file}, {place}", asked)
                self.asked.append(asked)
        except DataError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{file} has no questions that can be read ({type(error).__name__}: {error}); give SQuAD's JSON, "
                'HotpotQA\'s, or JSON lines {"question": "...", "answers": ["..."], "paragraphs": ["..."]}'
            ) from error
        if not self.asked:
            raise DataError(f"{file} has no question; give another file")
        texts = (text for asked in self.asked for text in (*asked.paragraphs, *asked.near))
        self.paragraphs = sorted(set(texts))
        """All of the file, each once."""

    def around(self, draw: str, asked: Asked, size: int) -> list[str]:
        """Return ``size`` other paragraphs, those near it first, and all again where they run out."""
        own = {*asked.paragraphs, *asked.near}
        found = [
            asked.near[n]
            for n in distinct(draw, min(size, len(asked.near)), len(asked.near), "near")
        ]
        others = [text for text in self.paragraphs if text not in own] if len(found) < size else []
        more = min(size - len(found), len(others))
        found += [others[n] for n in distinct(draw, more, len(others), "paragraph")]
        again = found or list(asked.paragraphs)
        return found + [again[n % len(again)] for n in range(size - len(found))]


def _check_asked(where: str, asked: Asked) -> None:
    """Raise DataError for a question that any text would answer, or none could."""
    fields = {
        "question": (asked.question,),
        "answers": asked.answers,
        "paragraphs": asked.paragraphs,
    }
    for name, texts in fields.items():
        if not texts:
            raise DataError(f"{where}: {name} is empty; leave the question out, or repair it")
        if not all(isinstance(text, str) and text.strip() for text in texts):
            raise DataError(
                f"{where}: {name} holds an empty text; leave the question out, or repair it"
            )


def _asked(text: str) -> Iterator[tuple[str, Asked]]:
    """Yield the place of each question in a file, and the question."""
    if text.lstrip().startswith("["):  # HotpotQA
        for number, row in enumerate(json.loads(text), start=1):
            paragraphs = _strings(
                [f"{title}\n{''.join(sentences)}" for title, sentences in row["context"]]
            )
            yield (
                f"question {number}",
                Asked(row["question"], _strings([row["answer"]]), paragraphs),
            )
        return
    try:
        whole = json.loads(text)
    except ValueError:
        whole = None
    if not (isinstance(whole, dict) and "data" in whole):
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                yield f"line {number}", _asked_in_line(number, line)
        return
    number = 0
    for article in whole["data"]:  # SQuAD
        contexts = dict.fromkeys(paragraph["context"] for paragraph in article["paragraphs"])
        for paragraph in article["paragraphs"]:
            context = paragraph["context"]
            near = tuple(other for other in contexts if other != context)
            for asked in paragraph["qas"]:
                number += 1
                if not asked.get("is_impossible", False):
                    answers = _strings([answer["text"] for answer in asked["answers"]])
                    yield f"question {number}", Asked(asked["question"], answers, (context,), near)


def _asked_in_line(number: int, line: str) -> Asked:
    try:
        row = json.loads(line)
        return Asked(row["question"], _strings(row["answers"]), _strings(row["paragraphs"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"line {number}: {type(error).__name__}: {error}") from error


def _strings(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError(f"{values!r:.60} is no list of strings")
    return tuple(values)
