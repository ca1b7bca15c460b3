"""Megatron-LM's flags that are missing here by name: what to give instead, or that they always
hold.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from runtime.errors import UserError

APEX = Path(__file__).with_name("apex.txt")
"""A line per part of NVIDIA's apex: the part, then what stands here in its place."""
TABLE = Path(__file__).with_suffix(".txt")
"""A line per flag: the flag, its values (N: any word; A|B: one of these), then `=` if it always
holds (or holds with the named values of a field), `>` before what to give instead, or `!` before
why there is none."""


class Entry(NamedTuple):
    """A Megatron flag's meaning here; `field` and `fits`: with which values of which field an =
    holds.
    """

    flag: str
    values: tuple[str, ...]
    verdict: str
    field: str
    fits: tuple[str, ...]
    text: str
    section: str

    @property
    def answer(self) -> str:
        """Say what a user who gives the flag should do."""
        return f"it is Megatron-LM's{'; here give' if self.verdict == '>' else ':'} {self.text}"


def entries() -> dict[str, Entry]:
    """Parse the table into entries by flag."""
    table, section = {}, ""
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = line.strip("[]")
            continue
        flag, *values, verdict, text = (word.strip() for word in line.split("|"))
        mark, _, condition = verdict.partition(" with ")
        field, _, fits = condition.partition(" ")
        words = tuple(word for word in values if word)
        table[flag] = Entry(
            flag, words, mark, field, tuple(fits.split(", ")) if fits else (), text, section
        )
    return table


def drop_redundant_flags(
    argv: Sequence[str], known: Sequence[str]
) -> tuple[list[str], list[Entry]]:
    """Split off Megatron flags that always hold here; return the rest and them. `known` are the
    program's own flags.

    Raises UserError: a flag that does not hold, or has another name here.
    """
    table, left, taken = entries(), [], []
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        entry = None if flag in known else table.get(flag)
        if entry is None:
            left.append(word)
            continue
        if entry.verdict != "=":
            raise UserError(f"unknown argument {flag}; {entry.answer}")
        if equals and not entry.values:
            raise UserError(f"{flag} takes no value, and {value!r} is given; {entry.answer}")
        if entry.values:
            if not equals and (not words or words[0].startswith("--")):
                raise UserError(f"{flag} has no value; {entry.answer}")
            value = value if equals else words.pop(0)
            if entry.values != ("N",) and not any(_same(value, one) for one in entry.values):
                raise UserError(
                    f"{flag} is {value}, and here it can only be {' or '.join(entry.values)}: {entry.text}"
                )
        taken.append(entry)
    return left, taken


def _same(value: str, word: str) -> bool:
    """Return whether two words have the same value: 0.00 is 0."""
    try:
        return float(value) == float(word)
    except ValueError:
        return value == word


def markdown() -> str:
    """Return docs/reference/megatron_flags.md."""
    verdicts = {"=": "accepted", ">": "another name", "!": "refused"}
    lines = [
        "# Megatron-LM's flags here",
        "",
        "Most flags have Megatron-LM's names (`python pretrain_gpt.py --help` lists them). These do not exist here by",
        "their name. A flag that says what is so anyway is accepted, so that a command line can be taken over; any",
        "other one is refused in one line with what this table says. Made by `python -m train.config.pages`.",
    ]
    section = ""
    for entry in entries().values():
        if entry.section != section:
            section = entry.section
            lines += ["", f"## {section}", "", "| Megatron-LM | here |", "| --- | --- |"]
        values = "" if entry.values in ((), ("N",)) else " " + " or ".join(entry.values)
        fits = f" with {entry.field} {', '.join(entry.fits)}" if entry.fits else ""
        lines.append(f"| `{entry.flag}{values}` | {verdicts[entry.verdict]}{fits}: {entry.text} |")
    lines += [
        "",
        "## apex",
        "",
        "Megatron-LM takes parts of [NVIDIA's apex](https://github.com/NVIDIA/apex) where they are installed, and",
        "prefers Transformer Engine's. Here one of them can be taken, and none is needed.",
        "",
        "| apex | here |",
        "| --- | --- |",
        *(f"| {line} |" for line in APEX.read_text(encoding="utf-8").splitlines()),
    ]
    return "\n".join(lines) + "\n"
