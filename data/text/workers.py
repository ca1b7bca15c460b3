"""Work on the items of a stream in several processes, in their order."""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from typing import TypeVar

from data.errors import StoppedError

Item = TypeVar("Item")
Result = TypeVar("Result")


def usable_cores() -> int:
    """Return the cores that this process may use; outside Linux, all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(work: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Generator[Result, None, None]:
    """Yield `work` of each item, in order, computed in as many processes; 1 is this one.

    At most 2 items a process are read ahead. The processes end with this one, even if it is killed.

    Raises:
        StoppedError: a process was killed.
    """
    if workers == 1:
        yield from map(work, items)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start)
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            with _signals_later():  # it may start a process
                pending.append(pool.submit(work, item))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise StoppedError(
            f"one of {workers} processes was killed, perhaps for memory; give fewer --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _signals_later() -> Iterator[None]:
    """Take Ctrl-C and SIGTERM after the block: amid a start, one would leave a process without its orders."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals never interrupt this one
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda n, _: came.append(n)) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the started processes inherit this
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        for number, handler in before.items():
            signal.signal(number, handler)
        for sent in came:
            signal.raise_signal(sent)


def _start() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the first one ends the others
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if parent := parent_process():
        parent.join()
        os._exit(1)
