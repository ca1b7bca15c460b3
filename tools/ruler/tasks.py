"""RULER's 13 tasks: Hsieh et al. 2024, "RULER: What's the Real Context Size of Your Long-Context
Language Models?".

A task makes a question of any size from a draw alone. The prompts and the parameters are the
benchmark's, word for word; a size counts sentences, lines or words of the haystack. Where a task's
own draws do not depend on the size, needles stay the same as the haystack grows.
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
"""Lengths below it have the smaller lists of ``cwe``."""
HOPS, COMMON = 4, 10
"""Assignments of ``vt`` after the first, and words of ``cwe`` that are asked for."""
Haystack = Literal["noise", "essay", "needle"]
Kind = Literal["numbers", "words", "uuids"]


@dataclass(frozen=True)
class Question:
    """A question, the beginning of its answer, and what is to be in the answer."""

    text: str
    prefix: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Sources:
    """Texts that tasks take from files."""

    essays: Essays = field(default_factory=Essays)
    questions: dict[str, Questions] = field(default_factory=dict)
    """By task, qa_1 and qa_2."""


@dataclass(frozen=True)
class Case:
    """One of a task's examples, before its size is known."""

    draw: str
    """The name of its draws."""
    number: int
    length: int
    """Tokens of the prompt and the answer, at most."""
    sources: Sources


@dataclass(frozen=True, kw_only=True)
class Task:
    """One of the benchmark's rows."""

    make: Callable[[Case, int], Question]
    """A case and a size -> its question."""
    new_tokens: int
    """Tokens of the answer, counted in the length."""
    least: int = 1
    """The smallest size."""
    words: Callable[[Case, int], Mapping[str, int]] | None = None
    """A haystack of few words -> how often each is there: its tokens are known before its text is
    made.
    """
    any: bool = False
    """One of the answers is enough (string_match_part); else each counts (string_match_all)."""

    def score(self, written: str, answers: Sequence[str]) -> float:
        """Return the share of answers, 0 to 1, that a written text has somewhere, in any case."""
        found = [answer.lower() in written.lower() for answer in answers]
        return float(any(found)) if self.any else sum(found) / len(found)


NEEDLE = "One of the special magic {kind} for {key} is: {value}."


def niah(
    case: Case, size: int, *, haystack: Haystack, key: Kind = "words",
    value: Kind = "numbers", keys: int = 1, values: int = 1, queries: int = 1,
) -> Question:  # fmt: skip
    """Hide ``values`` needles of each of the keys in a haystack; ask for those of ``queries`` keys."""
    draw = case.draw
    keys = max(keys, queries)
    others = size if haystack == "needle" else 0
    named = _drawn(draw, key, keys + others, "key")
    drawn = _drawn(draw, value, keys * values + others, "value")
    needles = [
        NEEDLE.format(kind=value, key=named[n // values], value=drawn[n])
        for n in range(keys * values)
    ]
    hidden = shuffled(draw, needles, "order")
    if haystack == "essay":
        sentences = case.sources.essays.first(size)
        depths = sorted(
            distinct(draw, len(hidden), 40, "depth")
        )  # 40 depths from 0 to 100 %, in whole percents
        places = [int(len(sentences) * round(100 * depth / 39) / 100) for depth in depths]
        context = " ".join(_inserted(sentences, places, hidden))
    else:
        beside = zip(named[keys:], drawn[keys * values :], strict=True)
        lines = [NEEDLE.format(kind=value, key=k, value=v) for k, v in beside] or [NOISE] * size
        context = "\n".join(_inserted(lines, _places(draw, len(hidden), size), hidden))
    asked = distinct(draw, queries, keys, "asked")
    *most, last = [named[n] for n in asked]
    query = f"{', '.join(most)}, and {last}" if most else last
    answers = tuple(drawn[n * values + v] for n in asked for v in range(values))
    one = queries * values == 1
    words = {
        "kind": value.removesuffix("s") if one else value,
        "are": "is" if one else "are",
        "query": query,
    }
    text = (
        "{some} special magic {kind} {are} hidden within the following text. Make sure to memorize it. I will quiz you "
        "about the {kind} afterwards.\n{context}\nWhat {all} the special magic {kind} for {query} mentioned in the "
        "provided text?"
    )
    text = text.format(
        some="A" if one else "Some", all="is" if one else "are all", context=context, **words
    )
    prefix = " The special magic {kind} for {query} mentioned in the provided text {are}"
    return Question(text, prefix.format(**words), answers)


def variable_tracking(case: Case, size: int) -> Question:
    """Assign one number to a chain of variables; ask for all of them. One example goes before."""
    text, prefix, answers = _chain(case.draw, size, letters=5)
    # Of 14 lines of noise, which with the usual tokenizers are the 500 tokens that the benchmark's
    # own example fills.
    shown, begun, known = _chain(f"{case.draw}:shown", 14, letters=3)
    return Question(f"{shown}{begun} {' '.join(known)}\n\n{text}", prefix, answers)


def _chain(draw: str, size: int, letters: int) -> tuple[str, str, tuple[str, ...]]:
    numbers = distinct(draw, HOPS + 1, 26**letters, "variable")
    variables = [
        "".join(string.ascii_uppercase[n // 26**k % 26] for k in range(letters)) for n in numbers
    ]
    value = 10_000 + below(draw, 90_000, "value", 0)
    links = [f"VAR {variables[0]} = {value}"]
    links += [f"VAR {then} = VAR {first} " for first, then in pairwise(variables)]
    context = "\n".join(_inserted([NOISE] * size, _places(draw, len(links), size), links))
    return (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        f"{context}\nQuestion: Find all variables that are assigned the value {value} in the text above.",
        " Answer: According to the chain(s) of variable assignment in the text above, "
        f"{HOPS + 1} variables are assigned the value {value}, they are: ",
        tuple(variables),
    )


def common_words(case: Case, size: int) -> Question:
    """List words, ``COMMON`` of them more often than the ``size`` others; ask for these. One
    example goes before.
    """
    short = case.length < SHORT
    shown = _listed(f"{case.draw}:shown", 10 if short else 30, *((3, 1) if short else (10, 3)))
    asked = _listed(case.draw, size, *((6, 1) if short else (30, 3)))
    known = " ".join(f"{n}. {word}" for n, word in enumerate(shown.answers, 1))
    return Question(
        f"{shown.text}{shown.prefix} {known}\n{asked.text}", asked.prefix, asked.answers
    )


def _listed(draw: str, size: int, often: int, seldom: int) -> Question:
    single = [word for words in wordlists() for word in words]
    if COMMON + size <= len(single):
        words = [single[n] for n in distinct(draw, COMMON + size, len(single), "word")]
    else:  # the benchmark takes another, longer list there
        words = _drawn(draw, "words", COMMON + size, "word")
    listed = shuffled(draw, words[:COMMON] * often + words[COMMON:] * seldom, "order")
    context = " ".join(f"{n}. {word}" for n, word in enumerate(listed, 1))
    return Question(
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
        f"appear most often.\n{context}\nQuestion: What are the {COMMON} most common words in the above list?",
        f" Answer: The top {COMMON} words that appear most often in the list are:",
        tuple(words[:COMMON]),
    )


def frequent_words(case: Case, size: int) -> Question:
    """Write coded words by a zeta distribution, dots the most often; ask for the next three."""
    times = coded_words(case, size)
    coded = shuffled(
        case.draw, [word for word, often in times.items() for _ in range(often)], "order"
    )
    return Question(
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        f"appeared coded words. {' '.join(coded)}\nQuestion: Do not provide any explanation. "
        "Please ignore the dots '....'. What are the three most frequently appeared words in the above coded text?",
        " Answer: According to the coded text above, the three most frequently appeared words are:",
        tuple(islice(times, 1, 4)),
    )


def coded_words(case: Case, size: int) -> dict[str, int]:
    """Return how often each word of ``frequent_words`` is there, in the order of their ranks.

    Of n words, the one of rank k is there n / (k^2 zeta(2)) times, rounded down.
    """
    words = ["...", *_codes(case.draw, max(8, (case.length - TASKS["fwe"].new_tokens) // 50))[1:]]
    return {word: int(size / (rank**2.0 * math.pi**2 / 6)) for rank, word in enumerate(words, 1)}


@lru_cache(maxsize=1)
def _codes(draw: str, size: int) -> list[str]:
    return [
        "".join(string.ascii_lowercase[n // 26**k % 26] for k in range(6))
        for n in distinct(draw, size, 26**6, "word")
    ]


def questions(case: Case, size: int, *, task: str) -> Question:
    """Ask what a file's paragraphs answer, among ``size`` other paragraphs of it."""
    given = case.sources.questions[task]
    asked = given.asked[case.number % len(given.asked)]
    texts = shuffled(case.draw, [*asked.paragraphs, *given.around(case.draw, asked, size)], "order")
    context = "\n\n".join(f"Document {n}:\n{text}" for n, text in enumerate(texts, 1))
    rule = "Answer the question based on the given documents. Only give me the answer and do not output any other words."
    return Question(
        f"{rule}\n\nThe following are given documents.\n\n{context}\n\n{rule}\n\nQuestion: {asked.question}",
        " Answer:",
        asked.answers,
    )


def _drawn(draw: str, kind: Kind, size: int, purpose: str) -> list[str]:
    """Return ``size`` different numbers of 7 digits, names or UUIDs."""
    if kind == "numbers":
        return [str(10**6 + n) for n in distinct(draw, size, 9 * 10**6, purpose)]
    if kind == "uuids":
        return [str(UUID(int=bits(draw, purpose, n), version=4)) for n in range(size)]
    words = next(
        words for words in (2, 3, 4) if names(words) > 4 * size
    )  # so that drawing others is quick
    return [name(n, words) for n in distinct(draw, size, names(words), purpose)]


def _places(draw: str, count: int, size: int) -> list[int]:
    """Draw ``count`` places in ``size`` lines, in order; they move with the size."""
    return sorted(below(draw, 1 << 32, "place", n) * (size + 1) >> 32 for n in range(count))


def _inserted(lines: Sequence[str], places: Sequence[int], hidden: Sequence[str]) -> list[str]:
    """Return the lines with hidden ones before those of ascending ``places``."""
    found, done = list[str](), 0
    for place, line in zip(places, hidden, strict=True):
        found += [*lines[done:place], line]
        done = place
    return [*found, *lines[done:]]


def _needles(**given: Any) -> Task:
    return Task(make=partial(niah, **given), new_tokens=128)


TASKS = {
    "niah_single_1": _needles(haystack="noise"),
    "niah_single_2": _needles(haystack="essay"),
    "niah_single_3": _needles(haystack="essay", value="uuids"),
    "niah_multikey_1": _needles(haystack="essay", keys=4),
    "niah_multikey_2": _needles(haystack="needle"),
    "niah_multikey_3": _needles(haystack="needle", key="uuids", value="uuids"),
    "niah_multivalue": _needles(haystack="essay", values=4),
    "niah_multiquery": _needles(haystack="essay", queries=4),
    "vt": Task(make=variable_tracking, new_tokens=30),
    "cwe": Task(make=common_words, new_tokens=120, least=10),
    "fwe": Task(make=frequent_words, words=coded_words, new_tokens=50, least=120),
    "qa_1": Task(make=partial(questions, task="qa_1"), new_tokens=32, least=0, any=True),
    "qa_2": Task(make=partial(questions, task="qa_2"), new_tokens=32, least=0, any=True),
}
