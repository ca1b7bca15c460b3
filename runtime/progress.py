"""Progress of a long computation, on stderr, a moving line or one a minute; counts, bytes and
durations in words.
"""

import shutil
import sys
import time
from types import TracebackType

MOVES, LOGS, FIRST = 0.2, 60.0, 10.0
"""Seconds between what is told on a terminal, and in a log, whose first line comes sooner."""
CLEAR = "\r\x1b[K"
"""Go to the beginning of a terminal's line, and empty it."""


class Progress:
    """Tells what it is told with the seconds since it was made, until its block ends; in the first
    ones nothing.
    """

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._every = MOVES if self._terminal else FIRST
        self._began = self._told = time.monotonic()
        self.of = ""
        """Begins each line."""

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, where: TracebackType | None
    ) -> None:
        """Leave a terminal's line empty for what follows."""
        if self._terminal and self._told > self._began:
            print(end=CLEAR, file=sys.stderr, flush=True)

    def __call__(self, said: str) -> None:
        """Tell it if it is time."""
        now = time.monotonic()
        if now - self._told <= self._every:
            return
        self._told = now
        line = f"{self.of}{said}, {now - self._began:.0f} s"
        if self._terminal:
            print(
                CLEAR + line[: shutil.get_terminal_size().columns - 1],
                end="",
                file=sys.stderr,
                flush=True,
            )
        else:
            self._every = LOGS
            print(line, file=sys.stderr, flush=True)


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, such as "1 process", "2 processes", "1,024 tokens"."""
    ending = "" if count == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{count:,} {noun}{ending}"


def amount(count: float) -> str:
    """Return bytes in GB or, where they are few, MB, such as "23.4 GB"."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def duration(seconds: float) -> str:
    """Return seconds with four digits in the unit that suits them, such as 610.8 ms, 22.40 s, 35.21
    min or 2.395 h.
    """
    for unit, size in (("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= (1 if unit == "s" else 2) * size:
            return f"{_four_digits(seconds / size)} {unit}"
    return f"{_four_digits(1e3 * seconds)} ms"


def clock_time(seconds: float) -> str:
    """Return what a clock that counts down shows, such as 1:05, 2:01:05 or 3d 2:01."""
    if not seconds < 1e9:
        return "over 30 years"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour}:{minute:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def _four_digits(number: float) -> str:
    return f"{number:#.4g}".rstrip(".") if number < 9999.5 else f"{number:,.0f}"
