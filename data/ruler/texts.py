"""The texts that RULER hides its needles in, and the words of its needles and lists.

The paper takes Paul Graham's essays and the wordlists of a package. Neither is here: sentences are made from some
hundred words, and words joined by a hyphen make as many names as are needed.
"""

import json
import re
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path

from data.drawn import below
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


@cache
def wordlists() -> tuple[list[str], list[str], list[str]]:
    """Return adjectives, nouns and verbs."""
    adjectives, nouns, verbs = (line.split() for line in WORDS.read_text(encoding="utf-8").splitlines())
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
        while len(self._sentences) < size:
            self._sentences.append(_sentence(len(self._sentences)))
        return self._sentences[:size]


def _sentence(number: int) -> str:
    words = dict(zip(("adjective", "noun", "verb"), wordlists(), strict=True))
    draw = f"sentence {number}"
    parts = re.split(r"\{(\w+)\}", SENTENCES[below(draw, len(SENTENCES), "shape", 0)])
    return "".join(
        part if place % 2 == 0 else words[part][below(draw, len(words[part]), part, place)]
        for place, part in enumerate(parts)
    )


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
