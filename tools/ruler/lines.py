"""Conversations that ask for lines of a long record, after LongEval, or for needles: made from a seed alone.

Every draw is a SHA-256 of its purpose, seed, sample and name, so that a seed gives the same bytes on any machine. The
purpose, train or score, is part of it: what is trained on is never what is asked, whatever the seeds.

LongEval: Li et al. 2023, "How Long Can Open-Source LLMs Truly Promise on Context Length?"; the sentences between
needles: Mohtashami & Jaggi 2023, "Landmark Attention".
"""

import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, Literal

from data.chat.rows import Turn
from data.chat.template import ChatTemplate
from data.text.indexed import writing
from data.tokenizer import HuggingFaceTokenizer
from runtime.errors import DataError
from runtime.progress import counted
from tools.ruler.examples import fill
from tools.ruler.texts import below, different, distinct

WORDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ADJECTIVES, NOUNS, VALUES = (WORDS[name].split() for name in ("adjectives", "nouns", "values"))
FILLERS: list[str] = WORDS["fillers"]
LARGEST_VALUE = 50_000
EDGE = 16
"""Lines at each end of a record that most questions of the training samples are about."""
_PROBE = 32
"""Lines from which a line's tokens are estimated."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Conversations to make."""

    tokens: int
    """Most tokens of a conversation, those of the chat template included; as many lines as fit are made."""
    purpose: Literal["train", "score"]
    seed: int
    form: Literal["lines", "needle", "repeat"] = "lines"
    """lines: every line is like the asked one; needle: the others say nothing; repeat: the answer is the record again,
    of 2 names to as many as fit, every other one with a value, so that no place tells what follows."""
    vocabulary: Literal["small", "full"] = "full"
    questions: int = 1
    """Lines that are asked for, one after the other; of repeat, how often the answer has the record."""


@dataclass(frozen=True)
class Made:
    """A conversation, and what it was made of."""

    turns: list[Turn]
    lines: int
    tokens: int


class Maker:
    """Make the conversations of a task for a tokenizer and its chat template."""

    def __init__(self, task: Task, template: ChatTemplate, tokenizer: HuggingFaceTokenizer) -> None:
        """Estimate a line's tokens. Raises DataError if not even the asked lines fit, or the tokenizer lacks words."""
        self.task, self.template, self.tokenizer = task, template, tokenizer
        self._least = least = 2 if task.form == "repeat" else task.questions
        self._words = _words_for(least + _PROBE)
        if tokenizer.unknown in self.prompt(self._turns(0, least + _PROBE, None)):
            raise DataError(
                f"vocabulary is {task.vocabulary}, and the tokenizer does not know all of its words; a model of the "
                "small vocabulary's words takes --vocabulary small"
            )
        few, more = (self._tokens(self._turns(0, lines, None)) for lines in (least, least + _PROBE))
        if few > task.tokens:
            raise DataError(
                f"tokens is {task.tokens}, and a conversation of {counted(least, 'line')} and as many questions takes "
                f"{few}; raise --tokens or, of score, --lengths, or ask fewer questions"
            )
        self._per_line = max(1.0, (more - few) / _PROBE)
        self._guess = least + int((task.tokens - few) / self._per_line)
        self._words = max(self._words, _words_for(self._guess))

    def make(self, sample: int, depth: float | None = None) -> Made:
        """Make one conversation of as many lines as fit.

        Args:
            sample: its number; with the task it decides all of it.
            depth: where the asked line stands, 0 for the first and 1 for the last; by default anywhere.
        """
        tokens = cache(lambda lines: self._tokens(self._turns(sample, lines, depth)))
        lines = fill(self.task.tokens, tokens, self._least, self._guess, self._per_line)
        if self.task.form == "repeat":
            lines = self._least + below(self._draw(sample), lines - self._least + 1, "lines", 0)
        return Made(self._turns(sample, lines, depth), lines, tokens(lines))

    def prompt(self, turns: list[Turn]) -> list[int]:
        """Return the ids of a conversation up to its last answer."""
        return self.tokenizer.tokenize_special(self.template.render(turns[:-1], prompt=True))[0]

    def _tokens(self, turns: list[Turn]) -> int:
        return len(self.tokenizer.tokenize_special(self.template.render(turns))[0])

    def _turns(self, sample: int, lines: int, depth: float | None) -> list[Turn]:
        """Make the turns of a conversation of so many lines, of which the first ones stay as there are more."""
        task, wording = self.task, WORDS[self.task.vocabulary]
        draw = self._draw(sample)
        if task.form == "repeat":
            record = ""
            for line, name in enumerate(distinct(draw, lines, _names(self._words), "key")):
                words = [self._key(name), self._value(draw, line)][: 1 + below(draw, 2, "valued", line)]
                record += "".join(f"{word}; " for word in words)
            return [{"role": "user", "content": record}, {"role": "assistant", "content": record * task.questions}]
        asked = self._asked(draw, lines) if depth is None else [round(depth * (lines - 1))]
        named = range(lines) if task.form == "lines" else sorted(asked)
        keys = dict(zip(named, map(self._key, distinct(draw, len(named), _names(self._words), "key")), strict=True))
        values = {line: self._value(draw, line) for line in named}
        record = "".join(
            wording["line"].format(key=keys[line], value=values[line]) if line in keys else self._filler(draw, line)
            for line in range(lines)
        )
        turns: list[Turn] = []
        for number, line in enumerate(asked):
            question = wording["question"].format(key=keys[line])
            before = wording["intro"] + record + wording["outro"] if number == 0 else ""
            turns.append({"role": "user", "content": before + question})
            turns.append({"role": "assistant", "content": wording["answer"].format(value=values[line])})
        return turns

    def _asked(self, draw: str, lines: int) -> list[int]:
        """Draw the asked lines; to train on, most are near an end of the record, and the first one at it.

        By chance alone what is farthest and what is nearest would be asked for in one of hundreds of questions.
        """
        if self.task.purpose == "score":
            return distinct(draw, self.task.questions, lines, "asked")

        def place(number: int) -> int:
            depth = below(draw, 1 if number == 0 else min(EDGE, lines), "depth", number)
            anywhere = below(draw, lines, "asked", number)
            return (depth, lines - 1 - depth, anywhere)[below(draw, 3, "end", number)]

        return different(self.task.questions, map(place, count()))

    def _draw(self, sample: int) -> str:
        return f"{self.task.purpose}:{self.task.seed}:{sample}"

    def _key(self, number: int) -> str:
        words = []
        for kind in (NOUNS, *[ADJECTIVES] * (self._words - 1)):
            number, word = divmod(number, len(kind))
            words.append(kind[word])
        return WORDS[self.task.vocabulary]["joint"].join(reversed(words))

    def _value(self, draw: str, line: int) -> str:
        if self.task.vocabulary == "small":
            return VALUES[below(draw, len(VALUES), "value", line)]
        return str(1 + below(draw, LARGEST_VALUE, "value", line))

    def _filler(self, draw: str, line: int) -> str:
        text = FILLERS[below(draw, len(FILLERS), "filler", line)]
        return f"{text}\n" if self.task.vocabulary == "small" else f"{text.capitalize()}.\n"


def _names(words: int) -> int:
    """Return how many names of lines there are of so many words."""
    return len(NOUNS) * len(ADJECTIVES) ** (words - 1)


def _words_for(lines: int) -> int:
    """Return the words of a name, 2 or more: a sixth of the names is left, so that drawing one is quick."""
    return next(words for words in count(2) if _names(words) > 1.2 * lines)


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as JSON lines, whole or not at all. Raises UserError: the file cannot be written, or as ``rows``."""
    with writing(path) as (draft,), draft.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
