"""RULER's 13 tasks (Hsieh et al. 2024): questions of any size, each determined by its draw's name.

The prompts and the parameters are the benchmark's, word for word. A size counts the haystack's
sentences, lines, words or other paragraphs. Needles stay the same as the haystack grows, unless the
task draws them together with the haystack.

Hsieh et al. 2024, "RULER: What's the Real Context Size of Your Long-Context Language Models?",
arXiv:2404.06654.
"""

import math
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import islice, pairwise
from typing import Any, Literal
from uuid import UUID

from tools.ruler.texts import (
    NOISE,
    Essays,
    Questions,
    below,
    bits,
    distinct,
    name,
    names,
    shuffled,
    wordlists,
)

SHORT = 4096
"""Length in tokens below which ``cwe`` lists its words fewer times, as the benchmark does."""
HOPS = 4
"""Number of assignments in a chain of ``vt`` after the first one."""
COMMON = 10
"""Number of most common words that ``cwe`` asks for."""
NUM_DEPTHS = 40
"""Number of depths at which needles may lie between essay sentences, from 0 to 100 %."""
EXAMPLE_LINES = 14
"""Number of noise lines in the solved example of ``vt``, which then has about 500 tokens, as in the
benchmark."""
Haystack = Literal["noise", "essay", "needle"]
Kind = Literal["numbers", "words", "uuids"]


@dataclass(frozen=True)
class Question:
    """A question, the beginning of its answer, and the texts that the answer must contain."""

    text: str
    prefix: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Sources:
    """Texts that tasks take from files."""

    essays: Essays = field(default_factory=Essays)
    questions: dict[str, Questions] = field(default_factory=dict)
    """Questions read from files, keyed by task (qa_1 and qa_2)."""


@dataclass(frozen=True)
class RulerCase:
    """Settings of one example of a task, before the size of its haystack is known."""

    draw: str
    """Name that determines the random draws."""
    number: int
    length: int
    """Maximum number of tokens of the prompt and the answer together."""
    sources: Sources


@dataclass(frozen=True, kw_only=True)
class RulerTask:
    """Functions and settings that make and score the examples of one of the benchmark's tasks."""

    make: Callable[[RulerCase, int], Question]
    """Maps a case and a size to a question."""
    new_tokens: int
    """Number of tokens reserved for the answer; the length includes them."""
    min_size: int = 1
    words: Callable[[RulerCase, int], Mapping[str, int]] | None = None
    """Maps a case and a size to the count of each word, for a haystack with few different words, so
    that its tokens can be counted before its text is made; None for other haystacks."""
    any: bool = False
    """True if one answer is enough for the full score (string_match_part); otherwise the score is
    the share of answers found (string_match_all)."""

    def score(self, written: str, answers: Sequence[str]) -> float:
        """Return the share of answers, 0 to 1, that a text contains; case does not count."""
        matches = [answer.lower() in written.lower() for answer in answers]
        if self.any:
            return float(any(matches))
        return sum(matches) / len(matches)


NEEDLE = "One of the special magic {kind} for {key} is: {value}."
NIAH_TEXT = (
    "{some} special magic {kind} {are} hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\nWhat {all} the special magic {kind} "
    "for {query} mentioned in the provided text?"
)
NIAH_PREFIX = " The special magic {kind} for {query} mentioned in the provided text {are}"


def niah(
    case: RulerCase,
    size: int,
    *,
    haystack: Haystack,
    key: Kind = "words",
    value: Kind = "numbers",
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
) -> Question:
    """Hide ``values`` needles per key in a haystack; ask for the values of ``queries`` keys."""
    draw = case.draw
    num_keys = max(keys, queries)
    num_needles = num_keys * values
    num_others = size if haystack == "needle" else 0
    all_keys = _drawn(draw, key, num_keys + num_others, "key")
    all_values = _drawn(draw, value, num_needles + num_others, "value")

    def needle(key_index: int, value_index: int) -> str:
        return NEEDLE.format(kind=value, key=all_keys[key_index], value=all_values[value_index])

    needles = [needle(index // values, index) for index in range(num_needles)]
    hidden = shuffled(draw, needles, "order")
    if haystack == "essay":
        sentences = case.sources.essays.first(size)
        context = " ".join(_inserted(sentences, _essay_positions(draw, len(hidden), size), hidden))
    else:
        if haystack == "needle":
            lines = [needle(num_keys + n, num_needles + n) for n in range(num_others)]
        else:
            lines = [NOISE] * size
        context = "\n".join(_inserted(lines, _line_positions(draw, len(hidden), size), hidden))

    queried = distinct(draw, queries, num_keys, "asked")
    *others, last = [all_keys[n] for n in queried]
    query = last
    if others:
        query = f"{', '.join(others)}, and {last}"
    answers: list[str] = []
    for n in queried:
        answers += all_values[n * values : (n + 1) * values]

    if queries * values == 1:
        wording = {"some": "A", "kind": value.removesuffix("s"), "are": "is", "all": "is"}
    else:
        wording = {"some": "Some", "kind": value, "are": "are", "all": "are all"}

    wording["query"] = query
    text = NIAH_TEXT.format(context=context, **wording)
    return Question(text, NIAH_PREFIX.format(**wording), tuple(answers))


def variable_tracking(case: RulerCase, size: int) -> Question:
    """Assign one number along a chain of variables, and ask for all these variables.

    A solved example precedes the question.
    """
    text, prefix, answers = _chain(case.draw, size, letters=5)
    example, example_prefix, example_answers = _chain(
        f"{case.draw}:shown", EXAMPLE_LINES, letters=3
    )
    solved = f"{example}{example_prefix} {' '.join(example_answers)}"
    return Question(f"{solved}\n\n{text}", prefix, answers)


def _chain(draw: str, size: int, letters: int) -> tuple[str, str, tuple[str, ...]]:
    """Return the text, the beginning of the answer and the variables of a chain."""
    numbers = distinct(draw, HOPS + 1, 26**letters, "variable")
    variables = tuple(_letters(number, letters, string.ascii_uppercase) for number in numbers)
    value = 10_000 + below(draw, 90_000, "value", 0)
    links = [f"VAR {variables[0]} = {value}"]
    for previous, variable in pairwise(variables):
        links.append(f"VAR {variable} = VAR {previous} ")

    positions = _line_positions(draw, len(links), size)
    context = "\n".join(_inserted([NOISE] * size, positions, links))
    return (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        f"{context}\nQuestion: Find all variables that are assigned the value {value} in the text "
        "above.",
        " Answer: According to the chain(s) of variable assignment in the text above, "
        f"{HOPS + 1} variables are assigned the value {value}, they are: ",
        variables,
    )


def _letters(number: int, size: int, alphabet: str) -> str:
    """Write a number in base 26 with letters as digits, the lowest digit first."""
    return "".join(alphabet[number // 26**index % 26] for index in range(size))


def common_words(case: RulerCase, size: int) -> Question:
    """List words, ``COMMON`` of them more often than ``size`` others; ask for the common ones.

    A solved example precedes the question.
    """
    if case.length < SHORT:
        example = _listed(f"{case.draw}:shown", 10, 3, 1)
        question = _listed(case.draw, size, 6, 1)
    else:
        example = _listed(f"{case.draw}:shown", 30, 10, 3)
        question = _listed(case.draw, size, 30, 3)

    solved = f"{example.text}{example.prefix} {_numbered(example.answers)}"
    return Question(f"{solved}\n{question.text}", question.prefix, question.answers)


def _listed(draw: str, size: int, often: int, seldom: int) -> Question:
    """Return a question about a list of words, some of them more often than others.

    The list has ``COMMON`` words ``often`` times each, and ``size`` others ``seldom`` times each.
    """
    single_words = [word for words in wordlists() for word in words]
    if COMMON + size <= len(single_words):
        numbers = distinct(draw, COMMON + size, len(single_words), "word")
        words = [single_words[n] for n in numbers]
    else:  # the benchmark takes another, longer list in this case
        words = _drawn(draw, "words", COMMON + size, "word")

    listed = shuffled(draw, words[:COMMON] * often + words[COMMON:] * seldom, "order")
    return Question(
        "Below is a numbered list of words. In these words, some appear more often than others. "
        f"Memorize the ones that appear most often.\n{_numbered(listed)}\nQuestion: What are the "
        f"{COMMON} most common words in the above list?",
        f" Answer: The top {COMMON} words that appear most often in the list are:",
        tuple(words[:COMMON]),
    )


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def frequent_words(case: RulerCase, size: int) -> Question:
    """Return a question of RULER's frequent words extraction.

    Counts of words follow a zeta distribution. The most frequent word is "...", which is noise, and
    the three words after it are the answers.
    """
    counts = coded_words(case, size)
    repeated = []
    for word, count in counts.items():
        repeated += [word] * count

    coded = shuffled(case.draw, repeated, "order")
    return Question(
        "Read the following coded text and track the frequency of each coded word. Find the three "
        f"most frequently appeared coded words. {' '.join(coded)}\nQuestion: Do not provide any "
        "explanation. Please ignore the dots '....'. What are the three most frequently appeared "
        "words in the above coded text?",
        " Answer: According to the coded text above, the three most frequently appeared words are:",
        tuple(islice(counts, 1, 4)),
    )


def coded_words(case: RulerCase, size: int) -> dict[str, int]:
    """Return the count of each word in ``frequent_words``, the most frequent word first.

    Of n words, the one of rank k occurs n / (k^2 zeta(2)) times, rounded down.
    """
    num_words = max(8, (case.length - TASKS["fwe"].new_tokens) // 50)
    words = ["...", *_codes(case.draw, num_words)[1:]]
    counts = {}
    for rank, word in enumerate(words, 1):
        counts[word] = int(size / (rank**2.0 * math.pi**2 / 6))

    return counts


@lru_cache(maxsize=1)
def _codes(draw: str, size: int) -> list[str]:
    numbers = distinct(draw, size, 26**6, "word")
    return [_letters(number, 6, string.ascii_lowercase) for number in numbers]


def questions(case: RulerCase, size: int, *, task: str) -> Question:
    """Ask a file's question about its paragraphs, among ``size`` other paragraphs of the file."""
    file = case.sources.questions[task]
    question = file.questions[case.number % len(file.questions)]
    paragraphs = [*question.paragraphs, *file.around(case.draw, question, size)]
    texts = shuffled(case.draw, paragraphs, "order")
    context = "\n\n".join(f"Document {n}:\n{text}" for n, text in enumerate(texts, 1))
    rule = (
        "Answer the question based on the given documents. Only give me the answer and do not "
        "output any other words."
    )
    return Question(
        f"{rule}\n\nThe following are given documents.\n\n{context}\n\n{rule}\n\n"
        f"Question: {question.question}",
        " Answer:",
        question.answers,
    )


def _drawn(draw: str, kind: Kind, size: int, purpose: str) -> list[str]:
    """Draw ``size`` different keys or values: numbers of 7 digits, names or UUIDs."""
    if kind == "numbers":
        return [str(10**6 + n) for n in distinct(draw, size, 9 * 10**6, purpose)]
    if kind == "uuids":
        return [str(UUID(int=bits(draw, purpose, n), version=4)) for n in range(size)]

    num_words = 2
    while names(num_words) <= 4 * size:  # most stay unused, so a draw seldom has to be repeated
        num_words += 1

    return [name(n, num_words) for n in distinct(draw, size, names(num_words), purpose)]


def _essay_positions(draw: str, count: int, size: int) -> list[int]:
    """Draw ``count`` different depths in whole percent; return their ascending positions."""
    depths = sorted(distinct(draw, count, NUM_DEPTHS, "depth"))
    return [int(size * round(100 * depth / (NUM_DEPTHS - 1)) / 100) for depth in depths]


def _line_positions(draw: str, count: int, size: int) -> list[int]:
    """Draw ``count`` ascending positions in ``size`` lines; they scale with the size."""
    return sorted(below(draw, 1 << 32, "place", n) * (size + 1) >> 32 for n in range(count))


def _inserted(lines: Sequence[str], positions: Sequence[int], hidden: Sequence[str]) -> list[str]:
    """Insert each hidden line before the line at its position; ``positions`` ascend."""
    result: list[str] = []
    done = 0
    for position, line in zip(positions, hidden, strict=True):
        result += lines[done:position]
        result.append(line)
        done = position
    return [*result, *lines[done:]]


def _needles(**settings: Any) -> RulerTask:
    return RulerTask(make=partial(niah, **settings), new_tokens=128)


TASKS = {
    "niah_single_1": _needles(haystack="noise"),
    "niah_single_2": _needles(haystack="essay"),
    "niah_single_3": _needles(haystack="essay", value="uuids"),
    "niah_multikey_1": _needles(haystack="essay", keys=4),
    "niah_multikey_2": _needles(haystack="needle"),
    "niah_multikey_3": _needles(haystack="needle", key="uuids", value="uuids"),
    "niah_multivalue": _needles(haystack="essay", values=4),
    "niah_multiquery": _needles(haystack="essay", queries=4),
    "vt": RulerTask(make=variable_tracking, new_tokens=30),
    "cwe": RulerTask(make=common_words, new_tokens=120, min_size=10),
    "fwe": RulerTask(make=frequent_words, words=coded_words, new_tokens=50, min_size=120),
    "qa_1": RulerTask(make=partial(questions, task="qa_1"), new_tokens=32, min_size=0, any=True),
    "qa_2": RulerTask(make=partial(questions, task="qa_2"), new_tokens=32, min_size=0, any=True),
}
