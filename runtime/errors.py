"""The base of every error that a user can cause, and checks that name a field and its value."""

from collections.abc import Iterable


class UserError(ValueError):
    """An error that the user can fix; its message is one line: what was found, where, and the fix.

    Entries and tools print it and exit with its ``status``. Any other exception is a bug and keeps its traceback.
    """

    status = 1
    again = False
    """True if the same command may succeed later: another process, which is ending or lost, is to blame."""

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
    shown = " ".join(map(str, value)) if isinstance(value, tuple) else "not set" if value is None else value
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


def nearest(value: int, fits: Iterable[int]) -> str:
    """Name the largest of ``fits`` below a value and the smallest above it, as far as they are there."""
    others = sorted(fits)
    near = [n for n in others if n < value][-1:] + [n for n in others if n > value][:1]
    return " or ".join(map(str, near))


def with_article(name: str) -> str:
    """Return a name after "a" or "an"."""
    return f"{'an' if name.startswith(('a', 'e', 'i', 'o', 'u')) else 'a'} {name}"


LONGEST = 4000
"""Characters of a message; more than that quotes a file at length."""


def printable(text: str) -> str:
    """Return a line that is safe to print: line breaks and control characters escaped, the middle of a long one cut."""
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]}[{len(text) - LONGEST:,} more characters]{text[-LONGEST // 2 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
