"""End a process early: on signals that request it, or together with its launcher."""

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
from typing import Any

ASKING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
SAME_SECONDS = 2.0
"""Time within which equal signals count as one, since Slurm and torchrun may each pass the same
signal to a rank.
"""
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


class StopRequest:
    """The signal that asked this process to end, if any.

    While ``works`` is False there is nothing to save, and a signal ends the process with status
    128 + its number. Later the first signal is stored in ``signal``, which the training loop reads,
    and a second one ends the process with that status.
    """

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.works = False
        self.signal: signal.Signals | None = None
        self._since = 0.0

    def receive(self, number: signal.Signals) -> None:
        """Store a signal for the training loop, or end the process."""
        now = time.monotonic()
        if not self.works:
            os._exit(128 + number)
        if self.signal is None:
            self.signal = number
            self._since = now
        elif now - self._since >= SAME_SECONDS:
            rank = os.environ.get("RANK", "0")
            line = (
                f"rank {rank} ends at once: {number.name} came after {self.signal.name}; the last "
                "checkpoint is whole"
            )
            os.write(2, f"{line}\n".encode())
            os._exit(128 + number)


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Within the block, treat SIGTERM, SIGUSR1 and SIGHUP as requests to end the process.

    Call in the main thread. Another thread reads them: Python's own handlers would run only after
    the collective in which the main thread waits. Signals that the process ignores (under nohup,
    SIGHUP) stay ignored. Yields the request, which the loop reads between steps.
    """
    request = StopRequest()
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    previous_handlers: dict[signal.Signals, Any] = {}
    for number in ASKING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            handler = signal.signal(number, lambda *_: None)
            previous_handlers[number] = handler or signal.SIG_DFL
    for number in previous_handlers:
        signal.siginterrupt(number, False)  # system calls in libraries are then not interrupted
    previous_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=_watch, args=(reader, request), name="signals", daemon=True)
    thread.start()
    try:
        yield request
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
        writer.send(b"\0")
        thread.join()
        reader.close()
        writer.close()


def _watch(reader: socket.socket, request: StopRequest) -> None:
    """Receive each signal number that the interpreter's C handler writes; 0 ends the thread."""
    while True:
        for number in reader.recv(1024):
            if number == 0:
                return
            if number in ASKING:
                request.receive(signal.Signals(number))


def end_readers_at_exit() -> None:
    """Kill the remaining processes of data loaders when this process exits.

    After an error, the frames of the traceback keep the loaders alive. multiprocessing would then
    send their processes SIGTERM, which they ignore, and wait forever.
    """
    atexit.unregister(_end_readers)
    # This function runs before multiprocessing's exit function, which was registered earlier, on
    # import.
    atexit.register(_end_readers)


def _end_readers() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise an error
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


@contextmanager
def signals_later() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the block ends.

    A signal during the start of a child process would leave a child without a function to call.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals interrupt only the main thread
        return
    received: list[int] = []
    previous_handlers: dict[signal.Signals, Any] = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        previous_handlers[number] = signal.signal(number, lambda n, _: received.append(n))
    # The started processes inherit the signal mask.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
        for number_received in received:
            signal.raise_signal(number_received)


def leave_to_parent(_worker: int) -> None:
    """Ignore signals in a data loader's process, and end it together with its parent.

    The parent, which handles the signals, calls `end_readers_at_exit`.
    """
    signal.set_wakeup_fd(-1)
    for number in ASKING:
        # Without this, SIGTERM would end the loader's process (torch's default) and fail the run.
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(os.getppid())


def end_with_launcher() -> None:
    """Let the kernel kill this process when its torchrun, or its Slurm step, is gone.

    Otherwise the ranks of a killed launcher would train on, and write into the folder that the next
    start resumes from. Entries call this function first, since a launcher that ends before the call
    goes unnoticed.
    """
    parent = os.getppid()
    name = Path(f"/proc/{parent}/comm")
    if "TORCHELASTIC_RUN_ID" in os.environ or (
        name.exists() and name.read_text().strip() == "slurmstepd"
    ):
        end_with_parent(parent)


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, or now if it has ended (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
