"""The base of every error that a user can cause, checks that name a field and its value, and names
that were meant.
"""

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence


class UserError(ValueError):
    """An error that the user can fix; its message is one line: what was found, where, and the fix.

    Entries and tools print it and exit with its ``status``. Any other exception is a bug and keeps
    its traceback.
    """

    status = 1
    again = False
    """True if the same command may succeed later: another process, which is ending or lost, is to
    blame.
    """

    def __str__(self) -> str:
        """Return the message as ``printable``: it may quote a file of others, or a flag."""
        return printable(super().__str__())


class LaunchError(UserError):
    """Processes cannot join: the launcher's variables are wrong, or the store cannot be reached."""


class AbsentError(LaunchError):
    """Another process did not come, or is gone."""

    again = True


class DataError(UserError):
    """A file, corpus or setting of data that cannot be used; the message names it and the fix."""


class StoppedError(DataError):
    """The machine, not the input, stopped the work: what is done holds."""


def wrong(of: object, name: str, must: str) -> UserError:
    """Return the error of a field's value; ``must`` says what it must be, and the fix."""
    value = getattr(of, name)
    shown = (
        " ".join(map(str, value))
        if isinstance(value, tuple)
        else "not set"
        if value is None
        else value
    )
    return UserError(f"{name} is {shown}; {must}")


def require(of: object, ok: bool, name: str, must: str) -> None:
    """Raise ``wrong`` unless a field is ``ok``."""
    if not ok:
        raise wrong(of, name, must)


def at_least(of: object, least: float, *names: str) -> None:
    """Raise UserError for the first of these fields that is set and below ``least``."""
    for name in names:
        value = getattr(of, name)
        require(of, value is None or value >= least, name, f"it must be {least} or more")


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, in their order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def nearest(value: int, fits: Iterable[int]) -> str:
    """Name the largest of ``fits`` below a value and the smallest above it, as far as they are
    there.
    """
    others = sorted(fits)
    near = [n for n in others if n < value][-1:] + [n for n in others if n > value][:1]
    return " or ".join(map(str, near))


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
"""Other programs' words for our flags."""


def first_few(names: Sequence[str], most: int = 3) -> str:
    """List the first few names, and say how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def did_you_mean(
    name: str, known: Collection[str], answers: Mapping[str, str] | None = None
) -> str | None:
    """Ask for the nearest of the known names, or of others, to which there are answers; None if
    none is near.
    """
    if (ours := OTHERS_WORDS.get(name)) in known:
        return f"did you mean {ours}?"
    answers = answers or {}
    close = difflib.get_close_matches(name, [*known, *answers], n=1, cutoff=0.7)
    return (
        " ".join([f"did you mean {close[0]}?", *filter(None, [answers.get(close[0])])])
        if close
        else None
    )


def unknown_argument(word: str, hint: Callable[[str], str | None]) -> str:
    """Say that nothing takes a word of a command line; ``hint`` says what a flag may mean."""
    flag = word.partition("=")[0]
    told = hint(flag) if flag.startswith("-") else "a value follows the flag it belongs to"
    return f"unknown argument {word}; {told or '--help lists them all'}"


def with_article(name: str) -> str:
    """Return a name after "a" or "an"."""
    return f"{'an' if name.startswith(('a', 'e', 'i', 'o', 'u')) else 'a'} {name}"


LONGEST = 4000
"""Characters of a message; more than that quotes a file at length."""


def printable(text: str) -> str:
    """Return a line that is safe to print: line breaks and control characters escaped, the middle
    of a long one cut.
    """
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]}[{len(text) - LONGEST:,} more characters]{text[-LONGEST // 2 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
