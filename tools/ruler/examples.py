"""Make RULER's examples for a tokenizer, as large as a length allows.

An example depends only on its task, length, seed, number, purpose (training or scoring), tokenizer
and files. This file also has the settings of RULER's curve: scores that a run may record while it
trains.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import ClassVar, Literal

from data.chat.turns import Turn
from runtime.errors import DataError, UserError, at_least, require
from tools.ruler.prompts import Prompts, answer_of, fill
from tools.ruler.tasks import TASKS, Question, RulerCase, Sources

Purpose = Literal["train", "score"]

TURN_END = 16
"""Number of tokens reserved in a training example for the chat template's text after the answer."""
MIN_LENGTH = 512
"""Minimum of the curve's default lengths, in tokens; most tasks fit into examples of this length.
"""
_TRIES = 1000
"""Number of draws in a row that may be too long before a task without a file gives up."""


@dataclass(frozen=True, kw_only=True)
class RulerConfig:
    """Settings of RULER's examples that a run is scored on as it trains (Hsieh et al. 2024)."""

    ruler_interval: int | None = None
    """Number of iterations between points of the curve, which shows the share of needles found at
    each length; for example, the value of save_interval. A last point is added at the end. By
    default there is no curve; on the command line, "none" removes the curve of --config's file."""
    ruler_lengths: tuple[int, ...] = ()
    """Lengths of the examples in tokens, each at most seq_length; by default seq_length, and also
    its half and its quarter if they are 512 or more."""
    ruler_samples: int = 8
    """Number of examples of each length, divided among the tasks; each takes a forward pass of
    seq_length tokens.
    """
    ruler_tasks: tuple[str, ...] = (
        "niah_single_1",
        "niah_single_2",
        "niah_multikey_1",
        "niah_multikey_2",
    )
    """Tasks of the examples: any of RULER's except qa_1 and qa_2, which need files."""

    PARTS: ClassVar[dict[str, tuple[str, ...]]] = {
        "ruler_interval": ("ruler_lengths", "ruler_samples", "ruler_tasks")
    }
    """Fields that depend on the field in the key: if a flag sets that field to none, the values
    that --config's file has for these are dropped."""

    def __post_init__(self) -> None:
        at_least(self, 1, "ruler_interval", "ruler_samples")
        for length in self.ruler_lengths:
            require(self, length >= 1, "ruler_lengths", "each must be 1 or more")

        without_file = [task for task in TASKS if not task.startswith("qa")]
        unknown = f"each task must be one of {', '.join(without_file)}"
        for task in self.ruler_tasks:
            require(self, task in without_file, "ruler_tasks", unknown)

        num_tasks = len(self.ruler_tasks)
        none = "name at least one, such as niah_single_1"
        require(self, num_tasks > 0, "ruler_tasks", none)
        is_unique = len(set(self.ruler_tasks)) == num_tasks
        require(self, is_unique, "ruler_tasks", "name each task once")
        few = (
            f"it must be at least 1 for each of the {num_tasks} ruler_tasks; "
            "give more samples, or name fewer tasks"
        )
        require(self, self.ruler_samples >= num_tasks, "ruler_samples", few)

        if self.ruler_interval is None:
            unused = (
                "it has no effect without ruler_interval; give --ruler-interval N, or leave it out"
            )
            for name in self.PARTS["ruler_interval"]:
                is_default = getattr(self, name) == getattr(RulerConfig, name)
                require(self, is_default, name, unused)

    def lengths(self, seq_length: int) -> list[int]:
        """Return the lengths of the curve's examples in tokens, in ascending order.

        Raises UserError if one is longer than ``seq_length``, the sequences that the model reads.
        """
        if self.ruler_lengths:
            lengths = sorted(set(self.ruler_lengths))
        else:
            parts = (seq_length // 4, seq_length // 2)
            lengths = [*(part for part in parts if part >= MIN_LENGTH), seq_length]

        if lengths[-1] > seq_length:
            raise UserError(
                f"ruler_lengths has {lengths[-1]}, but seq_length is {seq_length}, so prompts "
                "would be cut; give smaller ruler_lengths, and score longer prompts with python -m "
                "tools.ruler"
            )

        return lengths


@dataclass(frozen=True)
class Example:
    """A question that fits its length, with the tokens of its prompt and its scoring."""

    task: str
    length: int
    number: int
    question: Question
    ids: list[int]
    new_tokens: int
    """Maximum number of tokens of the answer."""
    score: Callable[[str], float]
    """Maps the text that a model wrote to its score, from 0 to 1."""
    turns: list[Turn]
    """The question and its answer as a conversation to train on."""
    size: int = 0
    """Size of the haystack: its number of sentences, lines, words or other paragraphs."""


class ExampleMaker:
    """Makes the examples of one task and length.

    An example to score reserves the task's maximum number of tokens for the answer; an example to
    train on reserves only those that the right answer takes. A question that does not fit is left
    out, and the next one takes its number.

    Tokenizing a long haystack takes most of the time. So the maker first estimates the tokens per
    piece of haystack (a sentence, a line or a word), and starts its search for the largest size
    that fits from this estimate.
    """

    def __init__(
        self,
        task: str,
        length: int,
        seed: int,
        prompts: Prompts,
        sources: Sources,
        purpose: Purpose = "score",
    ) -> None:
        """Estimate how many tokens a piece of the haystack takes.

        Raises DataError if no question fits even with the smallest haystack, or the tokenizer lacks
        words.
        """
        self.task = TASKS[task]
        self.length = length
        self.prompts = prompts
        self.name = task
        self._draw = f"ruler:{purpose}:{task}:{length}:{seed}"
        self._case = RulerCase("", 0, length, sources)
        self._trains = purpose == "train"
        self._answer_room = self.task.new_tokens
        if self._trains:
            self._answer_room = TURN_END
        self._room = length - self._answer_room
        self._fitting: list[int] = []
        """Numbers of the draws that fit, in order; example n is made from the n-th."""
        self._tried = 0
        """Number of draws tried so far, including those that did not fit."""
        self.left_out: dict[int, Question] = {}
        """Questions tried so far that do not fit the length, keyed by their number in the file;
        without a file, by the number of their draw."""

        file = sources.questions.get(task)
        self._num_questions = 0 if file is None else len(file.questions)
        # A task without a file is refused if its first draw does not fit; later draws are retried.
        self._tries = self._num_questions or 1
        first = self._case_of(0)
        self._tries = self._num_questions or _TRIES

        smallest = self.task.make(first, self.task.min_size)
        if prompts.tokenizer.unknown in prompts.ids(smallest):
            raise DataError(
                f"{task} has words that {prompts.tokenizer.path} has no token for; use another "
                "tokenizer, or a run that has one, or leave out the task"
            )

        self._each, self._guess, self._other_tokens = self._estimated(first)
        self._first = self._fill(0)
        self._guess = self._first.size

    def _estimated(self, case: RulerCase) -> tuple[float, int, int]:
        """Estimate from one case how large a haystack fits.

        Returns:
            The number of tokens per piece of the haystack; the size that about fills the length;
            and the number of tokens outside the haystack's words.
        """
        min_size = self.task.min_size

        def tokens(size: int) -> int:
            return len(self._ids(self.task.make(case, size)))

        smallest = tokens(min_size)
        larger = tokens(2 * min_size + 30)
        each = max(1e-3, (larger - smallest) / (min_size + 30))
        guess = max(min_size, min_size + int((self._room - smallest) / each))
        # The first pieces may be longer than the later ones, so estimate again near the size.
        filled = tokens(guess)
        if guess > min_size:
            each = max(1e-3, (filled - smallest) / (guess - min_size))
        other_tokens = filled - self._word_counter(case)(guess)
        return each, max(min_size, guess + int((self._room - filled) / each)), other_tokens

    def make(self, number: int) -> Example:
        """Make an example as large as fits: one more sentence, line or word would not fit.

        Raises DataError if no further question fits.
        """
        return self._fill(number) if number else self._first

    def _fill(self, number: int) -> Example:
        """Find the largest haystack that fits, and make the example with it."""
        case = self._case_of(number)
        task = self.task
        make = cache(lambda size: task.make(case, size))
        ids = cache(lambda size: self._ids(make(size)))

        guess = self._guess
        if task.words is not None:
            # Improve the guess for this example: only its different words are tokenized, once each.
            words_room = self._room - self._other_tokens
            guess = fill(words_room, self._word_counter(case), task.min_size, guess, self._each)

        size = fill(self._room, lambda size: len(ids(size)), task.min_size, guess, self._each)

        question = make(size)
        answer = question.prefix + answer_of(question)
        return Example(
            task=self.name,
            length=self.length,
            number=number,
            question=question,
            ids=ids(size),
            new_tokens=task.new_tokens,
            score=partial(task.score, answers=question.answers),
            turns=[
                {"role": "user", "content": question.text},
                {"role": "assistant", "content": answer},
            ],
            size=size,
        )

    def _word_counter(self, case: RulerCase) -> Callable[[int], int]:
        """Return a function that maps a size to the number of tokens of the haystack's words.

        Each different word is tokenized once, on its own. The count is 0 for a task that does not
        state its ``words``.
        """
        words = self.task.words
        if words is None:
            return lambda size: 0

        word_tokens = cache(lambda word: len(self.prompts.tokenizer.tokenize(f" {word}")))

        def tokens(size: int) -> int:
            return sum(count * word_tokens(word) for word, count in words(case, size).items())

        return tokens

    def _ids(self, question: Question) -> list[int]:
        return self.prompts.ids(question, answer_of(question) if self._trains else "")

    def prepare(self, samples: int) -> None:
        """Find questions that fit for ``samples`` examples; the others go to ``left_out``.

        Raises DataError if no further question fits.
        """
        self._case_of(samples - 1)

    def _case_of(self, number: int) -> RulerCase:
        """Return the number-th case whose smallest example fits; DataError if there is none."""
        while len(self._fitting) <= number:
            self._find_next()
        return self._numbered(self._fitting[number])

    def _find_next(self) -> None:
        """Find the next case whose smallest example fits. Raises DataError if there is none."""
        sizes = []
        for candidate in range(self._tried, self._tried + self._tries):
            question = self.task.make(self._numbered(candidate), self.task.min_size)
            sizes.append(len(self._ids(question)))
            if sizes[-1] <= self._room:
                self._tried = candidate + 1
                self._fitting.append(candidate)
                return

            number = candidate
            if self._num_questions:
                number = candidate % self._num_questions
            self.left_out[number] = question

        smallest = min(sizes)
        raise DataError(
            f"{self.name} takes at least {smallest} tokens and {self._answer_room} for the answer, "
            f"but a length is {self.length}; give a length of {smallest + self._answer_room} or "
            "somewhat more, or leave out the task"
        )

    def _numbered(self, number: int) -> RulerCase:
        return replace(self._case, draw=f"{self._draw}:{number}", number=number)


def makers(
    tasks: Sequence[str],
    lengths: Sequence[int],
    seed: int,
    prompts: Prompts,
    sources: Sources,
    purpose: Purpose = "score",
    *,
    flag: str = "--tasks",
    samples: int = 1,
) -> list[ExampleMaker]:
    """Return a maker for each length and task, prepared for ``samples`` examples.

    Raises DataError if no question of a task fits; the message ends with ``flag`` and the tasks
    that do fit.
    """
    ready: list[ExampleMaker] = []
    errors: dict[str, DataError] = {}
    for length in lengths:
        for task in tasks:
            try:
                maker = ExampleMaker(task, length, seed, prompts, sources, purpose)
                maker.prepare(samples)
                ready.append(maker)
            except DataError as error:
                errors.setdefault(task, error)

    if errors:
        first_error = str(next(iter(errors.values())))
        fitting = [task for task in tasks if task not in errors]
        if fitting:
            first_error += f": {flag} {' '.join(fitting)}"
        raise DataError(first_error)

    return ready


def left_out(makers: Sequence[ExampleMaker]) -> list[str]:
    """Return a note for each maker that left out questions because they do not fit its length."""
    notes = []
    for maker in makers:
        if not maker.left_out:
            continue
        first = next(iter(maker.left_out.values())).text.rpartition("Question: ")[2]
        notes.append(
            f"{maker.name} at {maker.length} tokens leaves out {len(maker.left_out):,} questions "
            f"that do not fit; the first: {first!r:.80}"
        )

    return notes
