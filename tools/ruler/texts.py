"""RULER's texts: haystacks, names and words, questions from files, and the draws that choose them.

A draw is a SHA-256 of its name, so a seed gives the same draws on any machine and Python. The paper
takes sentences from Paul Graham's essays, and names from a package's word lists. Here, sentences
are generated from 872 words, and a name consists of such words joined by hyphens: as many as are
needed for enough different names.
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
"""File of the built-in words: a line of adjectives, one of nouns and one of verbs. No word occurs
twice."""
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
    """Draw a number in [0, bound), determined by the arguments.

    ``bound`` must be far below 2^64, so that all numbers are about equally likely.
    """
    return int.from_bytes(next(_digests(draw, name, number))[:8], "big") % bound


def bits(draw: str, name: str, number: int) -> int:
    """Draw a number in [0, 2^128), determined by the arguments."""
    return int.from_bytes(next(_digests(draw, name, number))[:16], "big")


def distinct(draw: str, size: int, bound: int, name: str) -> list[int]:
    """Draw ``size`` different numbers in [0, bound); a longer list begins with the shorter one."""
    numbers = (int.from_bytes(digest[:8], "big") % bound for digest in _digests(draw, name))
    return different(size, numbers)


def different(size: int, numbers: Iterable[int]) -> list[int]:
    """Return the first ``size`` different values of ``numbers``, in order."""
    chosen: dict[int, None] = {}
    remaining = iter(numbers)
    while len(chosen) < size:
        chosen[next(remaining)] = None
    return list(chosen)


def shuffled(draw: str, items: Sequence[T], name: str) -> list[T]:
    """Return the items in an order that depends only on ``draw``, ``name`` and their count."""
    digests = list(islice(_digests(draw, name), len(items)))
    order = sorted(range(len(items)), key=digests.__getitem__)
    return [items[index] for index in order]


def _digests(draw: str, name: str, first: int = 0) -> Iterator[bytes]:
    prefix = f"{draw}:{name}:".encode()
    return (hashlib.sha256(prefix + b"%d" % number).digest() for number in count(first))


@cache
def wordlists() -> tuple[list[str], list[str], list[str]]:
    """Return the built-in adjectives, nouns and verbs."""
    lines = WORDS.read_text(encoding="utf-8").splitlines()
    adjectives, nouns, verbs = (line.split() for line in lines)
    return adjectives, nouns, verbs


def names(words: int) -> int:
    """Return the number of different names that consist of ``words`` words."""
    adjectives, nouns, _ = wordlists()
    return len(nouns) * len(adjectives) ** (words - 1)


def name(number: int, words: int) -> str:
    """Return the name (such as torpid-kid) that belongs to a number below ``names(words)``."""
    adjectives, nouns, _ = wordlists()
    reversed_words = []
    for choices in (nouns, *[adjectives] * (words - 1)):
        number, index = divmod(number, len(choices))
        reversed_words.append(choices[index])
    return "-".join(reversed(reversed_words))


class Essays:
    """An endless haystack of sentences: those of a file, repeated, or generated ones.

    The generated sentences are always the same.
    """

    def __init__(self, file: Path | None = None) -> None:
        """Read a file: plain text, or RULER's JSON with the key ``text``; None generates sentences.

        Raises DataError if the file cannot be read or has no text.
        """
        self.title = "generated sentences"
        """Name of the haystack in tables."""
        self._sentences: list[str] = []
        self._repeats = file is not None
        if file is not None:
            self.title = file.name
            self._sentences = _read(file)

    @cached_property
    def identity(self) -> str:
        """SHA-256 of the file's sentences; empty for generated ones."""
        if not self._repeats:
            return ""
        return sha256("\n".join(self._sentences).encode())

    def first(self, size: int) -> Sequence[str]:
        """Return the first ``size`` sentences."""
        if self._repeats:
            repeats, rest = divmod(size, len(self._sentences))
            return self._sentences * repeats + self._sentences[:rest]
        while len(self._sentences) < size:
            self._sentences.append(_made_sentence(len(self._sentences)))
        return self._sentences[:size]


def _made_sentence(number: int) -> str:
    """Generate the ``number``-th sentence from the built-in shapes and words."""
    draw = f"sentence {number}"
    words = dict(zip(("adjective", "noun", "verb"), wordlists(), strict=True))
    shape = SENTENCES[below(draw, len(SENTENCES), "shape", 0)]
    parts = re.split(r"\{(\w+)\}", shape)  # a kind of word at each odd index
    for index in range(1, len(parts), 2):
        kind = parts[index]
        parts[index] = words[kind][below(draw, len(words[kind]), kind, index)]

    return "".join(parts)


def _read(file: Path) -> list[str]:
    """Return the sentences of a file."""
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".json":
            text = json.loads(text)["text"]
        sentences = re.split(r"(?<=[.!?]) ", " ".join(text.split()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"essays is {file}, but it cannot be read ({type(error).__name__}: {error}); give "
            'plain text in UTF-8, or JSON {"text": "..."}'
        ) from error

    if sentences == [""]:
        raise DataError(f"essays is {file}, but it has no text; give another file, or no --essays")

    return sentences


@dataclass(frozen=True)
class FileQuestion:
    """A question from a file; any one of its answers counts as right."""

    question: str
    answers: tuple[str, ...]
    paragraphs: tuple[str, ...]
    """Paragraphs that the file gives for the question; the prompt always contains them."""
    near: tuple[str, ...] = ()
    """Other paragraphs of the same article; a prompt takes these before it takes paragraphs of
    other articles."""


class Questions:
    """The questions of a file, and all paragraphs among which to hide the answers."""

    def __init__(self, file: Path) -> None:
        """Read a file of questions.

        Raises DataError if it cannot be read, has an unknown form, or has no question.
        """
        try:
            text = file.read_text(encoding="utf-8-sig")
            self.questions = []
            for position, question in _questions_of(text):
                _check_question(f"{file}, {position}", question)
                self.questions.append(question)
        except DataError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{file} has no questions that can be read ({type(error).__name__}: {error}); give "
                "SQuAD's JSON, HotpotQA's, or JSON lines "
                '{"question": "...", "answers": ["..."], "paragraphs": ["..."]}'
            ) from error

        if not self.questions:
            raise DataError(f"{file} has no question; give another file")

        paragraphs: set[str] = set()
        for question in self.questions:
            paragraphs.update(question.paragraphs, question.near)

        self.paragraphs = sorted(paragraphs)
        """All different paragraphs of the file, sorted; distractors are drawn from them."""

    def around(self, draw: str, question: FileQuestion, size: int) -> list[str]:
        """Return ``size`` distractors: other paragraphs, among which to hide those of a question.

        Paragraphs of the same article come first, then those of other articles. If the file has too
        few, they are repeated.
        """
        near = question.near
        chosen = [near[n] for n in distinct(draw, min(size, len(near)), len(near), "near")]
        others = []
        if len(chosen) < size:
            article = {*question.paragraphs, *near}
            others = [text for text in self.paragraphs if text not in article]

        num_others = min(size - len(chosen), len(others))
        for n in distinct(draw, num_others, len(others), "paragraph"):
            chosen.append(others[n])

        repeated = list(chosen) or list(question.paragraphs)
        for n in range(size - len(chosen)):
            chosen.append(repeated[n % len(repeated)])

        return chosen


def _check_question(position: str, question: FileQuestion) -> None:
    """Raise DataError if a field of a question is empty, so any text or none would answer it."""
    fields = {
        "question": (question.question,),
        "answers": question.answers,
        "paragraphs": question.paragraphs,
    }
    for name, texts in fields.items():
        if not texts:
            raise DataError(f"{position}: {name} is empty; repair or remove the question")
        if not all(isinstance(text, str) and text.strip() for text in texts):
            raise DataError(f"{position}: {name} has an empty text; repair or remove the question")


def _questions_of(text: str) -> Iterator[tuple[str, FileQuestion]]:
    """Yield each question in a file's text, after its position for messages, such as "line 3"."""
    if text.lstrip().startswith("["):
        yield from _hotpot_questions(json.loads(text))
        return

    try:
        content = json.loads(text)
    except ValueError:
        content = None

    if isinstance(content, dict) and "data" in content:
        yield from _squad_questions(content["data"])
        return

    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"line {number}", _question_of_line(number, line)


def _hotpot_questions(rows: Any) -> Iterator[tuple[str, FileQuestion]]:
    """Yield the questions of HotpotQA's JSON, each after its position."""
    for number, row in enumerate(rows, start=1):
        paragraphs = []
        for title, sentences in row["context"]:
            paragraphs.append(f"{title}\n{''.join(sentences)}")

        question = FileQuestion(
            paragraphs=_strings(paragraphs),
            question=row["question"],
            answers=_strings([row["answer"]]),
        )
        yield f"question {number}", question


def _squad_questions(articles: Any) -> Iterator[tuple[str, FileQuestion]]:
    """Yield the answerable questions of SQuAD's articles, each after its position.

    Unanswerable questions are counted too, so a question's number is its position in the file.
    """
    number = 0
    for article in articles:
        contexts = dict.fromkeys(paragraph["context"] for paragraph in article["paragraphs"])
        for paragraph in article["paragraphs"]:
            context = paragraph["context"]
            near = tuple(other for other in contexts if other != context)
            for entry in paragraph["qas"]:
                number += 1
                if entry.get("is_impossible", False):
                    continue

                texts = [answer["text"] for answer in entry["answers"]]
                question = FileQuestion(
                    answers=_strings(texts),
                    question=entry["question"],
                    paragraphs=(context,),
                    near=near,
                )
                yield f"question {number}", question


def _question_of_line(number: int, line: str) -> FileQuestion:
    """Parse the question in a JSON line. Raises ValueError with the line's number."""
    try:
        row = json.loads(line)
        return FileQuestion(
            question=row["question"],
            answers=_strings(row["answers"]),
            paragraphs=_strings(row["paragraphs"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"line {number}: {type(error).__name__}: {error}") from error


def _strings(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError(f"{values!r:.60} is not a list of strings")
    return tuple(values)
