"""Early ends of a process: by signals that ask for it, and with the launcher that started it."""

import atexit
import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ASKING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
SAME = 2.0
"""Seconds within which signals count as one: Slurm and torchrun may each pass the same one on to a
rank.
"""
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


class StopRequest:
    """The signal that asked this process to end, if one did.

    As long as ``works`` is False there is nothing to save, and a signal ends the process with
    status 128 + its number. Later the first is kept in ``signal``, for the training loop to see,
    and a second ends the process so.
    """

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.works = False
        self.signal: signal.Signals | None = None
        self._since = 0.0

    def receive(self, number: signal.Signals) -> None:
        """Take note of a signal, or end the process."""
        now = time.monotonic()
        if not self.works:
            os._exit(128 + number)
        if self.signal is None:
            self.signal, self._since = number, now
        elif now - self._since >= SAME:
            rank = os.environ.get("RANK", "0")
            line = f"rank {rank} ends at once: {number.name} came after {self.signal.name}; the last checkpoint is whole"
            os.write(2, f"{line}\n".encode())
            os._exit(128 + number)


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Take SIGTERM, SIGUSR1 and SIGHUP as requests to end until the block does; for the main
    thread.

    A thread reads them, so that they count while the main thread waits in a collective too. Those
    that the process ignores (under nohup, SIGHUP) stay ignored. Yields what the loop asks between
    steps.
    """
    request = StopRequest()
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    heeded = [number for number in ASKING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda *_: None) or signal.SIG_DFL for number in heeded}
    for number in heeded:
        signal.siginterrupt(number, False)  # system calls of libraries go on
    woken = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    watching = threading.Thread(target=_watch, args=(reader, request), name="signals", daemon=True)
    watching.start()
    try:
        yield request
    finally:
        signal.set_wakeup_fd(woken)
        for number, handler in before.items():
            signal.signal(number, handler)
        writer.send(b"\0")
        watching.join()
        reader.close()
        writer.close()


def _watch(reader: socket.socket, request: StopRequest) -> None:
    """Heed each signal whose number the interpreter's C handler writes; 0 ends the thread."""
    while True:
        for number in reader.recv(1024):
            if number == 0:
                return
            if number in ASKING:
                request.receive(signal.Signals(number))


def end_readers_at_exit() -> None:
    """Kill the data loaders' processes that are left when this process exits: an error's frames
    keep them.

    multiprocessing would send them SIGTERM, which they ignore, and wait for ever.
    """
    atexit.unregister(_end_readers)
    atexit.register(
        _end_readers
    )  # called before multiprocessing's, which is registered by its import


def _end_readers() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


@contextmanager
def signals_later() -> Iterator[None]:
    """Take Ctrl-C and SIGTERM after the block: amid the start of a process, they would leave it
    without its orders.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals never interrupt this one
        return
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda n, _: came.append(n))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    mask = signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGINT}
    )  # the started processes inherit this
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)
        for sent in came:
            signal.raise_signal(sent)


def leave_to_parent(_worker: int) -> None:
    """In a data loader's process: leave signals to the process that started it, and end with that
    one.

    That one calls `end_readers_at_exit`.
    """
    signal.set_wakeup_fd(-1)
    for number in ASKING:
        signal.signal(
            number, signal.SIG_IGN
        )  # torch has SIGTERM end it, which would be an error of the run's
    end_with_parent(os.getppid())


def end_with_launcher() -> None:
    """Let the kernel kill this process when the torchrun, or the Slurm step, that started it is
    gone.

    Without it ranks of a killed launcher train on, and write into the folder that the next start
    resumes from. Entries call it first of all: one that is gone by then is not known.
    """
    parent = os.getppid()
    name = Path(f"/proc/{parent}/comm")
    if "TORCHELASTIC_RUN_ID" in os.environ or (
        name.exists() and name.read_text().strip() == "slurmstepd"
    ):
        end_with_parent(parent)


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent is gone, and end it where that is so already
    (Linux).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
