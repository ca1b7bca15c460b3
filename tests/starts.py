"""Programs that tests start: the signals they inherit, and how long they may take."""

import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE = 600.0
"""Seconds after which a process counts as hung: many times the slowest test on a loaded machine."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Let processes started inside end on Ctrl-C and on SIGTERM.

    A shell's background jobs ignore Ctrl-C, and their children inherit that.
    """
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def wait_until(holds: Callable[[], object]) -> None:
    """Wait until ``holds()``, however long a loaded machine takes."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "hung"
        time.sleep(0.05)


def free_port() -> int:
    """Return a free port below the system's ephemeral ones."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as trial:
            try:
                trial.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
