"""Questions with the paragraphs that answer them, from a file: SQuAD's JSON, HotpotQA's, or JSON lines."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.drawn import distinct
from runtime.errors import DataError


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
            text = file.read_text(encoding="utf-8")
            self.asked = [asked for asked in _asked(text) if asked.answers and asked.paragraphs]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{file} has no questions that can be read ({type(error).__name__}: {error}); give SQuAD's JSON, "
                'HotpotQA\'s, or JSON lines {"question": "...", "answers": ["..."], "paragraphs": ["..."]}'
            ) from error
        if not self.asked:
            raise DataError(f"{file} has no question with an answer and a paragraph; give another file")
        texts = (text for asked in self.asked for text in (*asked.paragraphs, *asked.near))
        self.paragraphs = sorted(set(texts))
        """All of the file, each once."""

    def around(self, draw: str, asked: Asked, size: int) -> list[str]:
        """Return ``size`` other paragraphs, those near it first, and all again where they run out."""
        own = {*asked.paragraphs, *asked.near}
        found = [asked.near[n] for n in distinct(draw, min(size, len(asked.near)), len(asked.near), "near")]
        others = [text for text in self.paragraphs if text not in own] if len(found) < size else []
        more = min(size - len(found), len(others))
        found += [others[n] for n in distinct(draw, more, len(others), "paragraph")]
        again = found or list(asked.paragraphs)
        return found + [again[n % len(again)] for n in range(size - len(found))]


def _asked(text: str) -> Iterator[Asked]:
    if text.lstrip().startswith("["):
        yield from map(_of_hotpotqa, json.loads(text))
        return
    try:
        whole = json.loads(text)
    except ValueError:
        whole = None
    if isinstance(whole, dict) and "data" in whole:
        yield from _of_squad(whole)
        return
    for line in text.splitlines():
        if line.strip():
            row = json.loads(line)
            yield Asked(row["question"], _strings(row["answers"]), _strings(row["paragraphs"]))


def _of_squad(whole: dict[str, Any]) -> Iterator[Asked]:
    for article in whole["data"]:
        texts = dict.fromkeys(paragraph["context"] for paragraph in article["paragraphs"])
        for paragraph in article["paragraphs"]:
            own = paragraph["context"]
            near = tuple(text for text in texts if text != own)
            for asked in paragraph["qas"]:
                if not asked.get("is_impossible", False):
                    yield Asked(asked["question"], _strings([a["text"] for a in asked["answers"]]), (own,), near)


def _of_hotpotqa(row: dict[str, Any]) -> Asked:
    texts = _strings([f"{title}\n{''.join(sentences)}" for title, sentences in row["context"]])
    return Asked(row["question"], _strings([row["answer"]]), texts)


def _strings(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError(f"{values!r:.60} is no list of strings")
    return tuple(values)
