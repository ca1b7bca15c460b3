"""Base classes of errors that a user can fix, checks of fields, suggestions for misspelt names."""

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence


class UserError(ValueError):
    """An error that the user can fix; its one-line message has the value, its source and the fix.

    Entries and tools print it and exit with its ``status``. Any other exception is a bug and keeps
    its traceback.
    """

    status = 1
    again = False
    """True if the same command may succeed later, because another process is ending or was lost."""

    def __str__(self) -> str:
        """Return the message made ``printable``, since it may quote a flag or a file."""
        return printable(super().__str__())


class LaunchError(UserError):
    """Processes cannot join: the launcher's variables are wrong, or its store cannot be reached."""


class AbsentError(LaunchError):
    """Another process did not join, or was lost."""

    again = True


class DataError(UserError):
    """A data file, corpus or setting cannot be used; the message names it and the fix."""


class StoppedError(DataError):
    """The machine, not the input, stopped the work; results so far are valid."""


def wrong(config: object, name: str, must: str) -> UserError:
    """Return an error about a field's value; ``must`` states the requirement and the fix."""
    value = getattr(config, name)
    if value is None:
        value = "not set"
    elif isinstance(value, tuple):
        value = " ".join(map(str, value))
    return UserError(f"{name} is {value}; {must}")


def require(config: object, ok: bool, name: str, must: str) -> None:
    """Raise the error of ``wrong`` for a field unless ``ok``."""
    if not ok:
        raise wrong(config, name, must)


def at_least(config: object, minimum: float, *names: str) -> None:
    """Raise UserError for the first of the named fields that is set and below ``minimum``."""
    for name in names:
        value = getattr(config, name)
        require(config, value is None or value >= minimum, name, f"it must be {minimum} or more")


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def nearest(value: int, valid: Iterable[int]) -> str:
    """Return the nearest valid numbers below and above a value in words, such as "4 or 8"."""
    numbers = sorted(valid)
    below = [n for n in numbers if n < value]
    above = [n for n in numbers if n > value]
    return " or ".join(map(str, below[-1:] + above[:1]))


OTHERS_WORDS = {
    "--gpus": "--world-size",
    "--num-gpus": "--world-size",
    "--tp": "--tensor-model-parallel-size",
    "--cp": "--context-parallel-size",
    "--pp": "--pipeline-model-parallel-size",
    "--learning-rate": "--lr",
    "--context-length": "--seq-length",
    "--max-steps": "--train-iters",
}
"""Maps flags of other programs to Longmesh's flags for the same settings, to suggest the latter."""


def first_few(names: Sequence[str], count: int = 3) -> str:
    """Return the first few names in words, and the number of names left out."""
    text = ", ".join(names[:count])
    if len(names) > count:
        text += f" and {len(names) - count} more"
    return text


def did_you_mean(
    name: str, names: Collection[str], answers: Mapping[str, str] | None = None
) -> str | None:
    """Return a question that suggests the nearest of ``names``; None if none is near.

    ``answers`` maps further names to a text that is added to the question.
    """
    flag = OTHERS_WORDS.get(name)
    if flag in names:
        return f"did you mean {flag}?"
    answers = answers or {}
    matches = difflib.get_close_matches(name, [*names, *answers], n=1, cutoff=0.7)
    if not matches:
        return None
    question = f"did you mean {matches[0]}?"
    answer = answers.get(matches[0])
    return f"{question} {answer}" if answer else question


def unknown_argument(word: str, hint: Callable[[str], str | None]) -> str:
    """Return the error about an unknown word on a command line; ``hint`` explains a flag."""
    flag = word.partition("=")[0]
    advice: str | None = "a value follows the flag it belongs to"
    if flag.startswith("-"):
        advice = hint(flag)
    return f"unknown argument {word}; {advice or '--help lists them all'}"


def with_article(name: str) -> str:
    """Return a name after "a" or "an"."""
    article = "an" if name.startswith(("a", "e", "i", "o", "u")) else "a"
    return f"{article} {name}"


MAX_MESSAGE = 4000
"""Maximum number of characters of a message; a longer one probably quotes a whole file."""


def printable(text: str) -> str:
    """Return one line that is safe to print.

    Line breaks and control characters are escaped, and the middle of a long text is cut.
    """
    if len(text) > MAX_MESSAGE:
        half = MAX_MESSAGE // 2
        text = f"{text[:half]}[{len(text) - MAX_MESSAGE:,} more characters]{text[-half:]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
