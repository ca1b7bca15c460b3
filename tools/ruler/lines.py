"""Line retrieval, after LongEval: a record of named lines, and questions about some of them.

Every random draw is a SHA-256 of its purpose, seed, sample and name, so a seed gives the same bytes
on any machine. The purpose is "train" or "score", so training and scoring never draw the same
conversations, whatever the seeds.

LongEval: Li et al. 2023, "How Long Can Open-Source LLMs Truly Promise on Context Length?". The
filler sentences between needles: Mohtashami & Jaggi 2023, "Landmark Attention".
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Literal

from data.chat.turns import Turn
from data.tokenizer import HuggingFaceTokenizer
from runtime.errors import DataError
from runtime.progress import counted
from tools.ruler.examples import Example, Purpose
from tools.ruler.prompts import Prompts, fill
from tools.ruler.tasks import Question
from tools.ruler.texts import below, different, distinct

NAME = "line_retrieval"
WORDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ADJECTIVES, NOUNS, VALUES = (WORDS[name].split() for name in ("adjectives", "nouns", "values"))
FILLERS: list[str] = WORDS["fillers"]
LARGEST_VALUE = 50_000
SPARE = 8
"""Number of tokens that a model may write beyond the right answer's, for example if it spells the
answer with other tokens."""
EDGE = 16
"""Number of lines that count as an end of the record; most training questions are about one of its
two ends."""
_PROBE = 32
"""Number of lines from which the tokens per line are estimated."""


@dataclass(frozen=True, kw_only=True)
class LineTask:
    """Settings of the conversations of line retrieval."""

    tokens: int
    """Maximum number of tokens of a conversation, including the chat template's; the record gets as
    many lines as fit.
    """
    purpose: Purpose
    seed: int
    form: Literal["lines", "needle", "repeat"] = "lines"
    """Form of the record. "lines": every line has a name and a value. "needle": only the asked
    lines have them, and the others are filler sentences. "repeat": the record has 2 or more names,
    about half of them with a value, so that the position does not tell the next word; the answer
    repeats the record."""
    vocabulary: Literal["small", "full"] = "full"
    questions: int = 1
    """Number of lines to ask about, one after the other; with "repeat", the number of times that
    the answer contains the record."""


class LineMaker:
    """Makes the conversations of a task, with the asked line anywhere or at a fixed depth."""

    def __init__(self, task: LineTask, prompts: Prompts, depth: int = 0, depths: int = 0) -> None:
        """Estimate the number of tokens per line.

        Args:
            depth: index of the asked line's depth, from 0 (the first line) to ``depths - 1`` (the
                last line).
            depths: number of depths; with 0, the asked line is drawn at random. A single depth is
                the middle.

        Raises DataError if not even the asked lines fit, the tokenizer lacks words, or there is no
        chat template.
        """
        self.task = task
        self.length = task.tokens
        self.prompts = prompts
        self._depth_index = depth
        self._num_depths = depths
        self._depth: float | None = None
        self.name = NAME
        if depths:
            self._depth = 0.5
            if depths > 1:
                self._depth = depth / (depths - 1)
            self.name = f"{NAME} {self._depth:.0%}"

        min_lines = 2 if task.form == "repeat" else task.questions
        probe_lines = min_lines + _PROBE
        self._min_lines = min_lines
        self._words = _words_for(probe_lines)
        probe = self._turns(0, probe_lines, None)
        if prompts.tokenizer.unknown in self._prompt(probe):
            raise DataError(
                f"vocabulary is {task.vocabulary}, but the tokenizer does not know all of its "
                "words; give --vocabulary small if the model has the small vocabulary's words"
            )

        smallest = self._tokens(self._turns(0, min_lines, None))
        if smallest > task.tokens:
            raise DataError(
                f"{NAME} takes {smallest} tokens for {counted(min_lines, 'line')} and as many "
                f"questions, but a length is {task.tokens}; give longer --lengths, or ask fewer "
                "questions"
            )

        self._per_line = max(1.0, (self._tokens(probe) - smallest) / _PROBE)
        self._guess = min_lines + int((task.tokens - smallest) / self._per_line)
        self._words = max(self._words, _words_for(self._guess))

    def make(self, number: int) -> Example:
        """Make a conversation of as many lines as fit; it depends only on the number and task."""
        sample = number
        if self._num_depths:
            sample = number * self._num_depths + self._depth_index
        tokens = cache(lambda lines: self._tokens(self._turns(sample, lines, self._depth)))
        lines = fill(self.length, tokens, self._min_lines, self._guess, self._per_line)
        if self.task.form == "repeat":
            num_sizes = lines - self._min_lines + 1
            lines = self._min_lines + below(self._draw(sample), num_sizes, "lines", 0)

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
        """Return the tokens of a conversation up to its last answer."""
        return self._ids(turns[:-1], prompt=True)

    def _tokens(self, turns: list[Turn]) -> int:
        return len(self._ids(turns))

    def _ids(self, turns: list[Turn], *, prompt: bool = False) -> list[int]:
        template = self.prompts.template
        tokenizer = self.prompts.tokenizer
        assert template is not None
        assert isinstance(tokenizer, HuggingFaceTokenizer)  # others have no chat template
        return tokenizer.tokenize_special(template.render(turns, prompt=prompt))[0]

    def _turns(self, sample: int, lines: int, depth: float | None) -> list[Turn]:
        """Make the turns of a conversation; with more lines, the first ones stay the same."""
        draw = self._draw(sample)
        if self.task.form == "repeat":
            record = self._record_to_repeat(draw, lines)
            return [
                {"role": "user", "content": record},
                {"role": "assistant", "content": record * self.task.questions},
            ]

        if depth is None:
            queried = self._queried_lines(draw, lines)
        else:
            queried = [round(depth * (lines - 1))]

        keyed_lines: Sequence[int] = range(lines)
        if self.task.form == "needle":
            keyed_lines = sorted(queried)
        numbers = distinct(draw, len(keyed_lines), _num_names(self._words), "key")
        keys: dict[int, str] = {}
        values: dict[int, str] = {}
        for line, number in zip(keyed_lines, numbers, strict=True):
            keys[line] = self._key(number)
            values[line] = self._value(draw, line)

        wording = WORDS[self.task.vocabulary]
        record_lines = []
        for line in range(lines):
            if line in keys:
                text = wording["line"].format(key=keys[line], value=values[line])
            else:
                text = self._filler(draw, line)
            record_lines.append(text)

        record = wording["intro"] + "".join(record_lines) + wording["outro"]

        turns: list[Turn] = []
        for index, line in enumerate(queried):
            question = wording["question"].format(key=keys[line])
            if index == 0:
                question = record + question
            answer = wording["answer"].format(value=values[line])
            turns.append({"role": "user", "content": question})
            turns.append({"role": "assistant", "content": answer})

        return turns

    def _record_to_repeat(self, draw: str, lines: int) -> str:
        """Return a record of names, about half of them with a value."""
        record = ""
        for line, number in enumerate(distinct(draw, lines, _num_names(self._words), "key")):
            record += f"{self._key(number)}; "
            if below(draw, 2, "valued", line):
                record += f"{self._value(draw, line)}; "
        return record

    def _queried_lines(self, draw: str, lines: int) -> list[int]:
        """Draw the lines to ask about.

        In training, most are near an end of the record, and the first question is about the very
        first line, the very last, or any line. If all lines were equally likely, only one of
        hundreds of questions would be about the first or the last line, and a model would learn
        them late.
        """
        if self.task.purpose == "score":
            return distinct(draw, self.task.questions, lines, "asked")

        def line_of(number: int) -> int:
            num_edge_lines = min(EDGE, lines)
            if number == 0:  # an end is then the first or the last line itself
                num_edge_lines = 1
            depth = below(draw, num_edge_lines, "depth", number)
            anywhere = below(draw, lines, "asked", number)
            choices = (depth, lines - 1 - depth, anywhere)
            return choices[below(draw, 3, "end", number)]

        return different(self.task.questions, map(line_of, count()))

    def _draw(self, sample: int) -> str:
        return f"{self.task.purpose}:{self.task.seed}:{sample}"

    def _key(self, number: int) -> str:
        """Return the line name that belongs to a number below ``_num_names``."""
        reversed_words = []
        for choices in (NOUNS, *[ADJECTIVES] * (self._words - 1)):
            number, index = divmod(number, len(choices))
            reversed_words.append(choices[index])
        return WORDS[self.task.vocabulary]["joint"].join(reversed(reversed_words))

    def _value(self, draw: str, line: int) -> str:
        if self.task.vocabulary == "small":
            return VALUES[below(draw, len(VALUES), "value", line)]
        return str(1 + below(draw, LARGEST_VALUE, "value", line))

    def _filler(self, draw: str, line: int) -> str:
        text = FILLERS[below(draw, len(FILLERS), "filler", line)]
        if self.task.vocabulary == "small":
            return f"{text}\n"
        return f"{text.capitalize()}.\n"


def _num_names(words: int) -> int:
    """Return the number of different line names that consist of ``words`` words."""
    return len(NOUNS) * len(ADJECTIVES) ** (words - 1)


def _words_for(lines: int) -> int:
    """Return the number of words per name, 2 or more, that gives enough names for ``lines``.

    At least a sixth of the names stay unused, so a draw seldom has to be repeated.
    """
    words = 2
    while _num_names(words) <= 1.2 * lines:
        words += 1
    return words
