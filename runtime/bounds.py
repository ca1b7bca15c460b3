"""Bounds of processor time and memory on what other people wrote: a template, a pattern."""

import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from runtime.errors import DataError

MOST_SECONDS = 10.0
"""Processor time of one call, which no other process's load makes longer."""
MOST_BYTES = 1 << 30
"""Memory of one call, beside what the process has (Linux)."""
Result = TypeVar("Result")


class UnboundedError(DataError):
    """A program does not end, or outgrows the memory: it fails for all of its input."""


class _Expired(BaseException):
    """Time is over; no `except Exception` on the way takes it for an error of its own."""


def bounded(name: str, work: Callable[[], Result]) -> Result:
    """Return ``work()``, called in the main thread; ``name`` is the program's, for messages.

    Raises UnboundedError: it takes more than MOST_SECONDS or MOST_BYTES.
    """
    running = True

    def expire(*_: object) -> None:
        if running:
            raise _Expired

    def report(lost: Any) -> None:
        if lost.exc_type is not _Expired:  # in a destructor: the next signal comes soon
            hook(lost)

    handler, hook = signal.signal(signal.SIGPROF, expire), sys.unraisablehook
    limits = resource.getrlimit(resource.RLIMIT_AS)
    try:
        sys.unraisablehook = report
        signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS, 0.1)
        if sys.platform == "linux":
            with open("/proc/self/statm", encoding="ascii") as file:
                most = int(file.read().split()[0]) * resource.getpagesize() + MOST_BYTES
            resource.setrlimit(
                resource.RLIMIT_AS, (min([most, *(n for n in limits if n >= 0)]), limits[1])
            )
        found = work()
        running = False
        return found
    except _Expired:
        raise UnboundedError(
            f"{name} does not end within {MOST_SECONDS:g} s of one processor; repair it"
        ) from None
    except MemoryError:
        raise UnboundedError(
            f"{name} takes more than {MOST_BYTES >> 20:,} MiB of memory; repair it"
        ) from None
    finally:
        running = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
        sys.unraisablehook = hook
        resource.setrlimit(resource.RLIMIT_AS, limits)
