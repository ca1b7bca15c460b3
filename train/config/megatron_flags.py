"""Megatron-LM flags without a field of the same name here, and the answer for each.

A command line of Megatron-LM can then be used as it is: a flag that always holds here is accepted,
and any other is refused with the flag to give instead. Ignoring an unknown flag could train a
different model without a warning.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from runtime.errors import UserError

APEX = Path(__file__).with_name("apex.txt")
"""File with one line per part of NVIDIA's apex: the part, then its replacement here."""
TABLE = Path(__file__).with_suffix(".txt")
"""File with one line per flag: the flag, its values (N: any word; A|B: one of these), a verdict and
a text. The verdict `=` means that the flag always holds here, or holds with the named values of a
field; `>` comes before the replacement, and `!` before the reason that there is none.

A flag with = and a value is one that exists here, but not with this value."""


class MegatronFlag(NamedTuple):
    """Answer for a Megatron-LM flag; with verdict `=`, a `field` must have a value in `fits`."""

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
    """Parse the table of Megatron-LM flags into entries, keyed by flag."""
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
    """Split off Megatron-LM flags that always hold here; return the other words and the entries.

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
        with_value = word if equals or not words else f"{word}={words[0]}"
        entry = table.get(with_value)
        if entry is None and flag not in flags:
            entry = table.get(flag)
        if entry is None:
            remaining.append(word)
            continue

        if entry.verdict != "=":
            raise UserError(f"unknown argument {entry.flag}; {entry.answer}")
        if equals and not entry.values:
            raise UserError(f"{flag} takes no value, but {value!r} is given; {entry.answer}")
        if entry.values:
            if not equals and (not words or words[0].startswith("--")):
                raise UserError(f"{flag} is given without a value; {entry.answer}")
            if not equals:
                value = words.pop(0)
            if entry.values != ("N",) and not any(
                _same(value, allowed) for allowed in entry.values
            ):
                raise UserError(
                    f"{flag} is {value}, but here it can only be {' or '.join(entry.values)}: "
                    f"{entry.text}"
                )
        redundant.append(entry)
    return remaining, redundant


def _same(value: str, word: str) -> bool:
    """Return True if two words are equal, as numbers if both are numbers: 0.00 equals 0."""
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
        "Most flags have Megatron-LM's names (`python pretrain_gpt.py --help` lists them). The",
        "flags of Megatron-LM below do not exist here, or only for some model families, or not",
        "with the value after =.",
        "*Accepted*: a command line of Megatron-LM can keep the flag, since what it asks for holds",
        "here anyway. *Accepted with* a setting: this is so only with that setting. *Another",
        "name*: the flag is refused, and the error says what to give instead. *Refused*: the error",
        "gives the reason. Made by `python -m train.config.pages`.",
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
        "installed, but prefers the corresponding parts of Transformer Engine. Here one part of",
        "apex can be used (`optimizers.FusedAdam`), and none is needed.",
        "",
        "| apex | here |",
        "| --- | --- |",
    ]
    lines += [f"| {line} |" for line in APEX.read_text(encoding="utf-8").splitlines()]
    return "\n".join(lines) + "\n"
