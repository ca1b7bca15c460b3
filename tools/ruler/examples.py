"""RULER's examples for a tokenizer: as large as fits a length, a function of task, length, seed and
number alone.

And the settings of a run's small curve of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import ClassVar, Literal

from data.chat.template import ChatTemplate
from data.chat.turns import Turn
from data.tokenizer import HuggingFaceTokenizer, Tokenizer
from runtime.errors import DataError, UserError, at_least, require
from tools.ruler.tasks import TASKS, Case, Question, Sources

Purpose = Literal["train", "score"]

TURN_END = 16
"""Tokens that a template may put after an answer."""
LEAST = 512
"""Tokens of an example that most tasks' answers fit into."""
_TRIES = 1000
"""Draws in a row that do not fit, after which a task without a file ends."""


@dataclass(frozen=True, kw_only=True)
class RulerConfig:
    """The needles that a run looks for as it trains (RULER, Hsieh et al. 2024)."""

    ruler_interval: int | None = None
    """Iterations between points of the curve, such as save_interval: how many needles are found at
    each length; one is made at the end too. By default none, which on the command line leaves out
    the curve of --config's file."""
    ruler_lengths: tuple[int, ...] = ()
    """Tokens of the examples, at most seq_length; by default that, and of its half and quarter
    those of 512 or more."""
    ruler_samples: int = 8
    """Examples of each length, shared out over the tasks; each takes a forward of seq_length
    tokens.
    """
    ruler_tasks: tuple[str, ...] = (
        "niah_single_1",
        "niah_single_2",
        "niah_multikey_1",
        "niah_multikey_2",
    )
    """Tasks of the examples, of those that read no file."""

    PARTS: ClassVar[dict[str, tuple[str, ...]]] = {
        "ruler_interval": ("ruler_lengths", "ruler_samples", "ruler_tasks")
    }
    """The fields of --config's file that go where a flag sets another to none."""

    def __post_init__(self) -> None:
        at_least(self, 1, "ruler_interval", "ruler_samples")
        for length in self.ruler_lengths:
            require(self, length >= 1, "ruler_lengths", "each must be 1 or more")
        there = [task for task in TASKS if not task.startswith("qa")]
        for task in self.ruler_tasks:
            require(
                self,
                task in there,
                "ruler_tasks",
                f"there are {', '.join(there)}; name some of these",
            )
        require(
            self, bool(self.ruler_tasks), "ruler_tasks", "name at least one, such as niah_single_1"
        )
        require(
            self,
            len(set(self.ruler_tasks)) == len(self.ruler_tasks),
            "ruler_tasks",
            "name each task once",
        )
        most = f"it must be at least 1 for each of the {len(self.ruler_tasks)} ruler_tasks; give more, or name fewer"
        require(self, self.ruler_samples >= len(self.ruler_tasks), "ruler_samples", most)
        for name in self.PARTS["ruler_interval"] if self.ruler_interval is None else ():
            default = getattr(self, name) == getattr(RulerConfig, name)
            must = "it is of a curve that ruler_interval asks for; give --ruler-interval N, or leave it out"
            require(self, default, name, must)

    def lengths(self, seq_length: int) -> list[int]:
        """Return the lengths in ascending order. Raises UserError: one is more than the model reads
        at once.
        """
        parts = [part for part in (seq_length // 4, seq_length // 2) if part >= LEAST]
        found = sorted(set(self.ruler_lengths)) or [*parts, seq_length]
        if found[-1] > seq_length:
            raise UserError(
                f"ruler_lengths names {found[-1]} and seq_length is {seq_length}, so that prompts would be cut; give "
                "at most that, and ask for longer ones with python -m tools.ruler"
            )
        return found


@dataclass(frozen=True)
class Prompts:
    """The way from a question to a model's tokens, and back."""

    tokenizer: Tokenizer
    template: ChatTemplate | None = None
    """The template of a model of conversations; None: the question and what the answer begins with
    are one text.
    """
    begin: tuple[int, ...] = ()
    """Tokens before such a text."""

    def ids(self, question: Question, answer: str = "") -> list[int]:
        """Return the tokens of a prompt, and of an answer after it. Raises DataError."""
        if self.template is None:
            return [*self.begin, *self.tokenizer.tokenize(question.text + question.prefix + answer)]
        assert isinstance(
            self.tokenizer, HuggingFaceTokenizer
        )  # or load_template would have refused it
        asked = self.template.render([{"role": "user", "content": question.text}], prompt=True)
        return self.tokenizer.tokenize_special(asked + question.prefix + answer)[0]

    def with_answer(self, question: Question) -> tuple[list[int], int]:
        """Return the tokens of a prompt with all answers, and how many of the first ones are the
        prompt's alone.
        """
        prompt, whole = self.ids(question), self.ids(question, answer_of(question))
        alike = next(
            (n for n, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt)
        )
        return whole, alike

    @property
    def ends(self) -> set[int]:
        """The tokens that end an answer."""
        if self.template is None:
            return {self.tokenizer.eod}
        assert isinstance(self.tokenizer, HuggingFaceTokenizer)
        turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi"}]
        before, whole = self.template.render(turns[:1], prompt=True), self.template.render(turns)
        answer = whole.removeprefix(before)
        # The first token after the text ends it, also one that no file calls special.
        names = (
            self.tokenizer.special.findall(answer)
            + self.tokenizer.added.findall(answer.rpartition("Hi")[2])[:1]
        )
        return {
            self.tokenizer.eod,
            *(self.tokenizer.tokenize_special(name)[0][0] for name in names),
        }

    def text(self, ids: Sequence[int]) -> str:
        """Return what a model wrote, control characters as line breaks, without white space around
        it.
        """
        known = [
            i for i in ids if i < self.tokenizer.vocab_size
        ]  # those that pad the vocabulary have no text
        return "".join(c if c >= " " else "\n" for c in self.tokenizer.detokenize(known)).strip()


def answer_of(question: Question) -> str:
    """Return the text of all answers, as it follows the prefix."""
    return " " * (not question.prefix.endswith(" ")) + " ".join(question.answers)


@dataclass(frozen=True)
class Example:
    """A question that fits its length, and its prompt."""

    task: str
    length: int
    number: int
    question: Question
    ids: list[int]
    new_tokens: int
    """Tokens that the answer may have."""
    score: Callable[[str], float]
    """A written text -> the share of the answers, 0 to 1, in it."""
    turns: list[Turn]
    """The conversation to train on."""
    size: int = 0
    """Sentences, lines or words of the haystack."""


class Maker:
    """Makes the examples of one task and length; to train on, the answer's own tokens are counted,
    not the most.

    A question that does not fit is left out, and the next takes its number.
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
        """Estimate what the haystack's growth costs. Raises DataError: no question fits even the
        smallest example.
        """
        self.task, self.length, self.prompts = TASKS[task], length, prompts
        self.name = task
        self._draw = f"ruler:{purpose}:{task}:{length}:{seed}"
        self._case = Case("", 0, length, sources)
        self._trains = purpose == "train"
        self._answer_room = TURN_END if self._trains else self.task.new_tokens
        self._room = length - self._answer_room
        self._fitting: list[int] = []
        self._tried = 0
        self.left_out: dict[int, Question] = {}
        """Questions that do not fit the length, among those of the examples so far, by their number
        in a file.
        """

        given = sources.questions.get(task)
        self._questions = 0 if given is None else len(given.asked)
        self._tries = self._questions or 1  # a task without a file is refused by its first draw
        first = self._of(0)
        self._tries = self._questions or _TRIES

        if prompts.tokenizer.unknown in prompts.ids(self.task.make(first, self.task.least)):
            raise DataError(
                f"{task} has words that {prompts.tokenizer.path} has no token for; take a run of another tokenizer, "
                "or leave the task out"
            )
        self._each, self._guess, self._beside = self._estimated(first)
        self._first = self._fill(0)
        self._guess = self._first.size

    def _estimated(self, case: Case) -> tuple[float, int, int]:
        """Return the tokens of a piece of the haystack, a size that about fills the room, and the
        other tokens.
        """
        least = self.task.least
        smallest, larger = (
            len(self._ids(self.task.make(case, size))) for size in (least, 2 * least + 30)
        )
        each = max(1e-3, (larger - smallest) / (least + 30))
        guess = max(least, least + int((self._room - smallest) / each))
        # The first pieces may be longer than the later ones: a second look at about the right size.
        filled = len(self._ids(self.task.make(case, guess)))
        if guess > least:
            each = max(1e-3, (filled - smallest) / (guess - least))
        beside = filled - self._counter(case)(guess)
        return each, max(least, guess + int((self._room - filled) / each)), beside

    def make(self, number: int) -> Example:
        """Make an example as large as fits: one of one more sentence, line or word does not. Raises
        DataError.
        """
        return self._fill(number) if number else self._first

    def _fill(self, number: int) -> Example:
        case, task, guess = self._of(number), self.task, self._guess
        made = cache(lambda size: task.make(case, size))
        ids = cache(lambda size: self._ids(made(size)))
        if (
            task.words is not None
        ):  # a guess of this example's own, in the time of a few hundred words
            guess = fill(
                self._room - self._beside, self._counter(case), task.least, guess, self._each
            )
        size = fill(self._room, lambda size: len(ids(size)), task.least, guess, self._each)
        question, score = made(size), partial(task.score, answers=made(size).answers)
        turns = [
            {"role": "user", "content": question.text},
            {"role": "assistant", "content": question.prefix + answer_of(question)},
        ]
        return Example(
            self.name, self.length, number, question, ids(size), task.new_tokens, score, turns, size
        )

    def _counter(self, case: Case) -> Callable[[int], int]:
        """Return what counts the tokens of the haystack's words, each tokenized once and alone; 0
        for other tasks.
        """
        alone, words = (
            cache(lambda word: len(self.prompts.tokenizer.tokenize(f" {word}"))),
            self.task.words,
        )
        return lambda size: (
            0 if words is None else sum(n * alone(word) for word, n in words(case, size).items())
        )

    def _ids(self, question: Question) -> list[int]:
        return self.prompts.ids(question, answer_of(question) if self._trains else "")

    def prepare(self, samples: int) -> None:
        """Look for the questions of so many examples, which fills ``left_out``. Raises DataError:
        none fits.
        """
        self._of(samples - 1)

    def _of(self, number: int) -> Case:
        """Return the case of an example: the number-th whose smallest example fits. Raises
        DataError.
        """
        while len(self._fitting) <= number:
            self._find_next()
        return self._numbered(self._fitting[number])

    def _find_next(self) -> None:
        """Find the next case whose smallest example fits the length."""
        sizes = []
        for candidate in range(self._tried, self._tried + self._tries):
            question = self.task.make(self._numbered(candidate), self.task.least)
            sizes.append(len(self._ids(question)))
            if sizes[-1] <= self._room:
                self._tried = candidate + 1
                self._fitting.append(candidate)
                return
            self.left_out[candidate % self._questions if self._questions else candidate] = question
        few = min(sizes)
        raise DataError(
            f"{self.name} takes {few} tokens and {self._answer_room} for the answer at the least, and a length is "
            f"{self.length}; give {few + self._answer_room} or somewhat more, or leave the task out"
        )

    def _numbered(self, number: int) -> Case:
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
) -> list[Maker]:
    """Return a maker for each length and task, prepared for so many samples.

    Raises DataError: one has no question that fits; it has the flag with the rest.
    """
    found, wrong = list[Maker](), dict[str, DataError]()
    for length in lengths:
        for task in tasks:
            try:
                maker = Maker(task, length, seed, prompts, sources, purpose)
                maker.prepare(samples)
                found.append(maker)
            except DataError as error:
                wrong.setdefault(task, error)
    if wrong:
        fit = [task for task in tasks if task not in wrong]
        raise DataError(f"{next(iter(wrong.values()))}{f': {flag} ' * bool(fit)}{' '.join(fit)}")
    return found


def left_out(makes: Sequence[Maker]) -> list[str]:
    """Say how many questions each maker left out, since they do not fit its length."""
    return [
        f"{maker.name} at {maker.length} tokens leaves out {len(maker.left_out):,} questions that do not fit; the "
        f"first: {next(iter(maker.left_out.values())).text.rpartition('Question: ')[2]!r:.80}"
        for maker in makes
        if maker.left_out
    ]


def fill(room: int, tokens: Callable[[int], int], least: int, guess: int, each: float) -> int:
    """Return a size whose tokens fit the room, while those of the next do not; ``least`` if not
    even that one fits.

    A search by halves whose first steps go to where ``each`` tokens a piece lead.
    """
    low, high, size = least - 1, None, guess
    steps = 0
    while high is None or high - low > 1:
        slack = room - tokens(size)
        low, high = (size, high) if slack >= 0 else (low, size)
        steps += 1
        size += int(slack / each) if slack >= 0 else -int(-slack / each) - 1
        if steps > 6 and high is not None:
            size = (low + high) // 2
        size = max(low + 1, size if high is None else min(high - 1, size))
    return max(low, least)
