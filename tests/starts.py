"""Programs that tests start: the signals they inherit, and how long they may take."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

PATIENCE = 600.0
"""Seconds after which a process counts as hung: many times the slowest test on a loaded machine."""

ROOT = Path(__file__).resolve().parents[1]


def torchrun(ranks: int) -> list[str]:
    """Return the words that start so many processes of the script that follows."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
    ]


def ended(
    command: Sequence[str | Path],
    cwd: Path = ROOT,
    inherited: Mapping[str, str] = os.environ,
    timeout: float = PATIENCE,
    **more: str,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with the variables ``inherited`` and ``more``."""
    environment = {**inherited, **more}
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@contextmanager
def interruptible() -> Iterator[None]:
    """Let processes started inside end on Ctrl-C and on SIGTERM.

    A shell's background jobs ignore Ctrl-C, and their children inherit that.
    """
    before = {
        number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)
    }
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


def children(pid: int) -> list[int]:
    """Return the processes that a process has started, none if it is gone."""
    with suppress(OSError):
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return []


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
