"""Report progress on stderr; format counts, bytes and durations."""

import shutil
import sys
import time
from types import TracebackType

TERMINAL_SECONDS = 0.2
"""Time between updates of the line on a terminal."""
LOG_SECONDS = 60.0
"""Time between lines in a log."""
FIRST_LOG_SECONDS = 10.0
"""Time until the first line in a log."""
CLEAR = "\r\x1b[K"
"""Control sequence that moves to the beginning of a terminal's line and clears the line."""


class Progress:
    """Prints progress texts with the elapsed time: one line on a terminal, few in a log."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._interval = TERMINAL_SECONDS if self._terminal else FIRST_LOG_SECONDS
        self._start = time.monotonic()
        self._last_printed = self._start
        self.of = ""
        """Prefix of each line."""

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        """Clear the line on a terminal."""
        if self._terminal and self._last_printed > self._start:
            print(end=CLEAR, file=sys.stderr, flush=True)

    def __call__(self, text: str) -> None:
        """Print the text if the interval since the previous one is over."""
        now = time.monotonic()
        if now - self._last_printed <= self._interval:
            return
        self._last_printed = now
        line = f"{self.of}{text}, {now - self._start:.0f} s"
        if self._terminal:
            columns = shutil.get_terminal_size().columns
            print(CLEAR + line[: columns - 1], end="", file=sys.stderr, flush=True)
        else:
            self._interval = LOG_SECONDS
            print(line, file=sys.stderr, flush=True)


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, such as "1 process", "2 processes", "1,024 tokens"."""
    if count == 1:
        return f"{count:,} {noun}"
    ending = "es" if noun.endswith(("s", "ch")) else "s"
    return f"{count:,} {noun}{ending}"


def amount(count: float) -> str:
    """Return bytes in GB, or in MB below 1 GB, such as "23.4 GB"."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def duration(seconds: float) -> str:
    """Return seconds with four digits and a unit: 610.8 ms, 22.40 s, 35.21 min or 2.395 h."""
    if seconds >= 2 * 3600:
        return f"{_four_digits(seconds / 3600.0)} h"
    if seconds >= 2 * 60:
        return f"{_four_digits(seconds / 60.0)} min"
    if seconds >= 1:
        return f"{_four_digits(seconds)} s"
    return f"{_four_digits(1e3 * seconds)} ms"


def clock_time(seconds: float) -> str:
    """Return seconds as a countdown shows them, such as 1:05, 2:01:05 or 3d 2:01."""
    if not seconds < 1e9:
        return "over 30 years"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour}:{minute:02}"
    if hour:
        return f"{hour}:{minute:02}:{second:02}"
    return f"{minute}:{second:02}"


def _four_digits(number: float) -> str:
    return f"{number:#.4g}".rstrip(".") if number < 9999.5 else f"{number:,.0f}"
