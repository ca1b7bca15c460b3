"""Megatron-LM's flags that have no field of the same name here, and the answer for each.

A command line of Megatron-LM can then be used as it is: a flag that always holds here is accepted,
and any other is refused with the flag to give instead. Passing over an unknown flag would train a
different model without a word.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from runtime.errors import UserError

APEX = Path(__file__).with_name("apex.txt")
"""A line per part of NVIDIA's apex: the part, then its replacement here."""
TABLE = Path(__file__).with_suffix(".txt")
"""A line per flag: the flag, its values (N: any word; A|B: one of these), then `=` if it always
holds (or holds with the named values of a field), `>` before what to give instead, or `!` before
why there is none."""


class MegatronFlag(NamedTuple):
    """The answer for a Megatron flag; `=` holds if `field` has one of the values `fits`."""

    flag: str
    values: tuple[str, ...]
    verdict: str
    field: str
    fits: tuple[str, ...]
    text: str
    section: str

    @property
    def answer(self) -> str:
        """The end of an error message about the flag."""
        if self.verdict == ">":
            return f"it is Megatron-LM's; here give {self.text}"
        return f"it is Megatron-LM's: {self.text}"


def entries() -> dict[str, MegatronFlag]:
    """Parse the table into entries by flag."""
    table = {}
    section = ""
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = line.strip("[]")
            continue

        flag, *values, verdict, text = (word.strip() for word in line.split("|"))
        mark, _, condition = verdict.partition(" with ")
        field, _, fits = condition.partition(" ")
        table[flag] = MegatronFlag(
            flag=flag,
            values=tuple(filter(None, values)),
            verdict=mark,
            field=field,
            fits=tuple(fits.split(", ")) if fits else (),
            text=text,
            section=section,
        )
    return table


def drop_redundant_flags(
    argv: Sequence[str], flags: Sequence[str]
) -> tuple[list[str], list[MegatronFlag]]:
    """Split off Megatron flags that always hold here; return the other words and these entries.

    `flags` are the program's own flags.

    Raises UserError for a flag that does not hold, or has another name here.
    """
    table = entries()
    remaining = []
    redundant = []
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        entry = None if flag in flags else table.get(flag)
        if entry is None:
            remaining.append(word)
            continue

        if entry.verdict != "=":
            raise UserError(f"unknown argument {flag}; {entry.answer}")
        if equals and not entry.values:
            raise UserError(f"{flag} takes no value, and {value!r} is given; {entry.answer}")
        if entry.values:
            if not equals and (not words or words[0].startswith("--")):
                raise UserError(f"{flag} has no value; {entry.answer}")
            if not equals:
                value = words.pop(0)
            if entry.values != ("N",) and not any(
                _same(value, allowed) for allowed in entry.values
            ):
                raise UserError(
                    f"{flag} is {value}, and here it can only be {' or '.join(entry.values)}: "
                    f"{entry.text}"
                )
        redundant.append(entry)
    return remaining, redundant


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
        "Most flags have Megatron-LM's names (`python pretrain_gpt.py --help` lists them). Those",
        "below do not exist here by these names. A flag that asks for what always holds here is",
        "accepted, so that a command line of Megatron-LM can be used as it is; any other one is",
        "refused in one line with the answer of this table. Made by `python -m",
        "train.config.pages`.",
    ]
    section = ""
    for entry in entries().values():
        if entry.section != section:
            section = entry.section
            lines += ["", f"## {section}", "", "| Megatron-LM | here |", "| --- | --- |"]

        values = ""
        if entry.values not in ((), ("N",)):
            values = " " + " or ".join(entry.values)
        fits = ""
        if entry.fits:
            fits = f" with {entry.field} {', '.join(entry.fits)}"
        lines.append(f"| `{entry.flag}{values}` | {verdicts[entry.verdict]}{fits}: {entry.text} |")

    lines += [
        "",
        "## apex",
        "",
        "Megatron-LM uses parts of [NVIDIA's apex](https://github.com/NVIDIA/apex) if they are",
        "installed, and prefers Transformer Engine's. Here one of them can be used, and none is",
        "needed.",
        "",
        "| apex | here |",
        "| --- | --- |",
    ]
    lines += [f"| {line} |" for line in APEX.read_text(encoding="utf-8").splitlines()]
    return "\n".join(lines) + "\n"
