"""Limit the processor time and memory of other people's code: templates and patterns."""

import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from runtime.errors import DataError

MAX_SECONDS = 10.0
"""Maximum processor time of one call; unlike wall-clock time it does not grow with the machine's
load."""
MAX_BYTES = 1 << 30
"""Maximum memory of one call, in addition to what the process uses already (Linux only)."""
Result = TypeVar("Result")


class UnboundedError(DataError):
    """Code exceeded the time or memory limit of a call; callers do not call it again."""


class _Expired(BaseException):
    """Raised when the time is over; a BaseException, so that no `except Exception` catches it."""


def bounded(name: str, work: Callable[[], Result]) -> Result:
    """Return ``work()`` under limits of time and memory; call in the main thread.

    ``name`` is the name of the code, for messages.

    Raises UnboundedError if the call takes more than MAX_SECONDS or MAX_BYTES.
    """
    running = True

    def expire(*_: object) -> None:
        if running:
            raise _Expired

    def report(unraisable: Any) -> None:
        # If _Expired is raised in a destructor, it is lost; the next signal comes soon.
        if unraisable.exc_type is not _Expired:
            hook(unraisable)

    handler = signal.signal(signal.SIGPROF, expire)
    hook = sys.unraisablehook
    limits = resource.getrlimit(resource.RLIMIT_AS)
    try:
        sys.unraisablehook = report
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS, 0.1)
        if sys.platform == "linux":
            with open("/proc/self/statm", encoding="ascii") as file:
                process_bytes = int(file.read().split()[0]) * resource.getpagesize()
            finite_limits = [limit for limit in limits if limit >= 0]
            soft_limit = min([process_bytes + MAX_BYTES, *finite_limits])
            resource.setrlimit(resource.RLIMIT_AS, (soft_limit, limits[1]))
        result = work()
        running = False
        return result
    except _Expired:
        raise UnboundedError(
            f"{name} does not finish within {MAX_SECONDS:g} s of processor time; repair it"
        ) from None
    except MemoryError:
        raise UnboundedError(
            f"{name} takes more than {MAX_BYTES >> 20:,} MiB of memory; repair it"
        ) from None
    finally:
        running = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
        sys.unraisablehook = hook
        resource.setrlimit(resource.RLIMIT_AS, limits)
