"""A process of its own that does jobs while this one goes on, one after another."""

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from runtime.errors import UserError
from runtime.signals import ASKING, end_with_parent

ROOT = str(Path(__file__).resolve().parents[1])


class Beside:
    """Does jobs, sees no GPU, and ends with this process. Signals that ask a run to end do not reach it."""

    def __init__(self, what: str) -> None:
        """Start it; ``what`` it does is told where it ends before its time."""
        self._what = what
        self._waits = False
        self._ours, theirs = Pipe()
        path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
        code = f"from runtime.beside import serve; serve({theirs.fileno()}, {os.getpid()})"
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {*ASKING, signal.SIGINT})  # it begins with them blocked
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()

    def begin(self, job: Callable[[], Any]) -> None:
        """Send a job, which must pickle; the one before must be over."""
        self._waits = True
        with suppress(OSError):  # it is gone, as `result` says
            self._ours.send(job)

    def done(self, seconds: float = 0.0) -> bool:
        """Return whether there is no job, or its end is known at once or within so many seconds."""
        return not self._waits or self._ours.poll(seconds)

    def result(self) -> Any:
        """Wait for the job; return what it does, or None without one. Raises its error, or UserError if it is gone."""
        if not self._waits:
            return None
        self._waits = False
        try:
            answer = self._ours.recv()
        except (EOFError, OSError):
            status = self.process.wait()
            raise UserError(f"the process that {self._what} ended with status {status}; was memory short?") from None
        if isinstance(answer, Exception):
            raise answer
        return answer


def serve(handle: int, parent: int) -> None:
    """Do the jobs that come through a pipe until it closes."""
    end_with_parent(parent)
    pipe = Connection(handle)
    with suppress(EOFError):
        while True:
            job, answer = pipe.recv(), None
            try:
                answer = job()
            except (UserError, OSError) as error:
                answer = error
            except Exception as error:
                answer = RuntimeError("".join(traceback.format_exception(error)))
            pipe.send(answer)
