"""How far a long computation is, on stderr: on a terminal one line that moves, in a log a line a minute."""

import shutil
import sys
import time
from types import TracebackType

MOVES, LOGS = 0.2, 60.0
"""Seconds between what is told on a terminal, and in a log."""
CLEAR = "\r\x1b[K"
"""Go to the beginning of a terminal's line, and empty it."""


class Progress:
    """Tells what it is told with the seconds since it was made, until its block ends; in the first ones nothing."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._every = MOVES if self._terminal else LOGS
        self._began = self._told = time.monotonic()
        self.of = ""
        """Begins each line."""

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, where: TracebackType | None) -> None:
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
            print(CLEAR + line[: shutil.get_terminal_size().columns - 1], end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)
