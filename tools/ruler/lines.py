"""Line retrieval, after LongEval: a record of named lines or needles, and questions for some of
them.

Every draw is a SHA-256 of its purpose, seed, sample and name, so that a seed gives the same bytes
on any machine. The purpose, train or score, is part of it: what is trained on is never what is
asked, whatever the seeds.

LongEval: Li et al. 2023, "How Long Can Open-Source LLMs Truly Promise on Context Length?"; the
sentences between
needles: Mohtashami & Jaggi 2023, "Landmark Attention".
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Literal

from data.chat.turns import Turn
from data.tokenizer import HuggingFaceTokenizer
from runtime.errors import DataError
from runtime.progress import counted
from tools.ruler.examples import Example, Prompts, Purpose, fill
from tools.ruler.tasks import Question
from tools.ruler.texts import below, different, distinct

NAME = "line_retrieval"
WORDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ADJECTIVES, NOUNS, VALUES = (WORDS[name].split() for name in ("adjectives", "nouns", "values"))
FILLERS: list[str] = WORDS["fillers"]
LARGEST_VALUE = 50_000
SPARE = 8
"""Tokens that an answer may take beyond the right one's before it is cut, as by other spelling."""
EDGE = 16
"""Lines at each end of a record that most questions of the training samples are about."""
_PROBE = 32
"""Lines from which a line's tokens are estimated."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Conversations to make."""

    tokens: int
    """Most tokens of a conversation, those of the chat template included; as many lines as fit are
    made.
    """
    purpose: Purpose
    seed: int
    form: Literal["lines", "needle", "repeat"] = "lines"
    """lines: every line is like the asked one; needle: the others say nothing; repeat: the answer
    is the record again, of 2 names to as many as fit, every other one with a value, so that no
    place tells what follows."""
    vocabulary: Literal["small", "full"] = "full"
    questions: int = 1
    """Lines that are asked for, one after the other; of repeat, how often the answer has the
    record.
    """


class Maker:
    """Makes the conversations of a task; the asked line stands anywhere, or at one of several
    depths.
    """

    def __init__(self, task: Task, prompts: Prompts, depth: int = 0, depths: int = 0) -> None:
        """Estimate a line's tokens.

        Args:
            depth: number of the asked line's depth, from 0, the first line, to ``depths - 1``, the
                last one.
            depths: number of all depths; 0 for any place. One depth alone is the middle.

        Raises DataError: not even the asked lines fit, the tokenizer lacks words, or there is no
        chat template.
        """
        self.task, self.length, self.prompts = task, task.tokens, prompts
        self._place, self._places = depth, depths
        self._depth = (depth / (depths - 1) if depths > 1 else 0.5) if depths else None
        self.name = NAME if self._depth is None else f"{NAME} {self._depth:.0%}"
        self._least = least = 2 if task.form == "repeat" else task.questions
        self._words = _words_for(least + _PROBE)
        if prompts.tokenizer.unknown in self._prompt(self._turns(0, least + _PROBE, None)):
            raise DataError(
                f"vocabulary is {task.vocabulary}, and the tokenizer does not know all of its words; a model of the "
                "small vocabulary's words takes --vocabulary small"
            )
        few, more = (self._tokens(self._turns(0, lines, None)) for lines in (least, least + _PROBE))
        if few > task.tokens:
            raise DataError(
                f"{NAME} takes {few} tokens for {counted(least, 'line')} and as many questions, and a length is "
                f"{task.tokens}; give longer --lengths, or ask fewer questions"
            )
        self._per_line = max(1.0, (more - few) / _PROBE)
        self._guess = least + int((task.tokens - few) / self._per_line)
        self._words = max(self._words, _words_for(self._guess))

    def make(self, number: int) -> Example:
        """Make a conversation of as many lines as fit; the number and the task decide all of it."""
        sample = number * self._places + self._place if self._places else number
        tokens = cache(lambda lines: self._tokens(self._turns(sample, lines, self._depth)))
        lines = fill(self.length, tokens, self._least, self._guess, self._per_line)
        if self.task.form == "repeat":
            lines = self._least + below(self._draw(sample), lines - self._least + 1, "lines", 0)
        turns = self._turns(sample, lines, self._depth)
        answer: str = turns[-1]["content"]
        return Example(
            task=self.name,
            length=self.length,
            number=number,
            question=Question(turns[-2]["content"], "", (answer,)),
            ids=self._prompt(turns),
            new_tokens=len(self.prompts.tokenizer.tokenize(answer)) + SPARE,
            score=lambda written: float(written == answer),
            turns=turns,
            size=lines,
        )

    def _prompt(self, turns: list[Turn]) -> list[int]:
        """Return the ids of a conversation up to its last answer."""
        return self._ids(turns[:-1], prompt=True)

    def _tokens(self, turns: list[Turn]) -> int:
        return len(self._ids(turns))

    def _ids(self, turns: list[Turn], *, prompt: bool = False) -> list[int]:
        template, tokenizer = self.prompts.template, self.prompts.tokenizer
        assert template is not None
        assert isinstance(tokenizer, HuggingFaceTokenizer)  # or it had no template
        return tokenizer.tokenize_special(template.render(turns, prompt=prompt))[0]

    def _turns(self, sample: int, lines: int, depth: float | None) -> list[Turn]:
        """Make the turns of a conversation of so many lines, of which the first ones stay as there
        are more.
        """
        task, wording = self.task, WORDS[self.task.vocabulary]
        draw = self._draw(sample)
        if task.form == "repeat":
            record = self._record_to_repeat(draw, lines)
            return [
                {"role": "user", "content": record},
                {"role": "assistant", "content": record * task.questions},
            ]

        asked = self._asked(draw, lines) if depth is None else [round(depth * (lines - 1))]
        named = range(lines) if task.form == "lines" else sorted(asked)
        keys = dict(
            zip(
                named,
                map(self._key, distinct(draw, len(named), _names(self._words), "key")),
                strict=True,
            )
        )
        values = {line: self._value(draw, line) for line in named}
        record = "".join(
            wording["line"].format(key=keys[line], value=values[line])
            if line in keys
            else self._filler(draw, line)
            for line in range(lines)
        )
        turns: list[Turn] = []
        for number, line in enumerate(asked):
            question = wording["question"].format(key=keys[line])
            before = wording["intro"] + record + wording["outro"] if number == 0 else ""
            turns.append({"role": "user", "content": before + question})
            turns.append(
                {"role": "assistant", "content": wording["answer"].format(value=values[line])}
            )
        return turns

    def _record_to_repeat(self, draw: str, lines: int) -> str:
        record = ""
        for line, name in enumerate(distinct(draw, lines, _names(self._words), "key")):
            words = [self._key(name), self._value(draw, line)][: 1 + below(draw, 2, "valued", line)]
            record += "".join(f"{word}; " for word in words)
        return record

    def _asked(self, draw: str, lines: int) -> list[int]:
        """Draw the asked lines; to train on, most are near an end of the record, and the first one
        at it.

        By chance alone what is farthest and what is nearest would be asked for in one of hundreds
        of questions.
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
    """Return the words of a name, 2 or more: a sixth of the names is left, so that drawing one is
    quick.
    """
    return next(words for words in count(2) if _names(words) > 1.2 * lines)
