"""How far a long computation is, said on stderr where it takes more than a few seconds."""

import sys
import time


class Progress:
    """Prints what it is told with the seconds since it was made: nothing in the first ones, and a line every few."""

    def __init__(self, every: float = 5.0) -> None:
        self.every = every
        self.began = self.told = time.monotonic()

    def __call__(self, said: str) -> None:
        """Print a line if it is time."""
        now = time.monotonic()
        if now - self.told > self.every:
            self.told = now
            print(f"{said}, {now - self.began:.0f} s", file=sys.stderr, flush=True)
