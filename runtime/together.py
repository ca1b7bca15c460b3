"""Raise errors on all ranks together: a failure on one rank must not leave the others waiting."""

import pickle
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from runtime.processes import launched_world_size, meet

T = TypeVar("T")
RAISED = "(raised on rank {})"
"""Note of an error that all ranks raise."""
_ALONE: ContextVar[bool] = ContextVar("alone", default=False)


def work_alone() -> None:
    """Let this thread, which works beside its rank's main one, meet no other ranks from now on."""
    _ALONE.set(True)


def is_alone() -> bool:
    """Return whether there are no other ranks that this thread meets."""
    return _ALONE.get() or not dist.is_initialized()


def gather_results(fn: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Call ``fn`` on every rank of ``group`` and return all results, by rank. One collective.

    ``fn`` must do local work only, such as reading files: a collective inside it would wait for a rank that has failed.
    Its result must be picklable. Where this rank ``is_alone``, call ``fn`` here only. Raises the error of the lowest
    rank that failed, on every rank. A ValueError (every UserError is one) or OSError keeps its type and message;
    other ranks see anything else as a RuntimeError with the failing rank's traceback.
    """
    if is_alone():
        return [fn()]
    error: Exception | None = None
    mine: Any = None
    try:
        mine = fn()
    except Exception as caught:
        error = caught
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (mine, error and _portable(error, dist.get_rank(group))), group=group)
    for rank, (_, failure) in enumerate(everyone):
        if failure is not None and error is not None and rank == dist.get_rank(group):
            error.add_note(RAISED.format(rank))
            raise error
        if failure is not None:
            failure.add_note(RAISED.format(rank))
            raise failure from error
    return [answer for answer, _ in everyone]


def _portable(error: Exception, rank: int) -> Exception:
    """Return an error as other ranks raise it: itself, or its traceback's text where it is of no type that is kept."""
    with suppress(Exception):  # its class is local, or its constructor needs more than the message
        if isinstance(error, (ValueError, OSError)):
            return pickle.loads(pickle.dumps(error))
    return RuntimeError(f"rank {rank} failed:\n{''.join(traceback.format_exception(error))}")


def from_first(fn: Callable[[], T]) -> T:
    """Call ``fn`` on the first rank only; return its result, or raise its error, on every rank."""
    return gather_results(lambda: fn() if is_first() else None)[0]  # type: ignore[return-value]


def is_first() -> bool:
    """Return whether this process is the first rank, or ``is_alone``."""
    return is_alone() or dist.get_rank() == 0


@contextmanager
def raise_together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run a block of local work; if it fails on one rank of ``group``, raise on all (see ``gather_results``)."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught

    def outcome() -> None:
        if error is not None:
            raise error

    gather_results(outcome, group)


def on_all_ranks(error: Exception) -> bool:
    """Return whether all ranks raised an error together: then none is lost, and they can meet once more."""
    return any(note.startswith(RAISED.format("").rstrip(")")) for note in getattr(error, "__notes__", ()))


@contextmanager
def first_to_report(seconds: float) -> Iterator[bool]:
    """Yield whether this rank reports why the run fails: True on the first rank to arrive.

    Also works before the process group exists, over the launcher's store. A rank that reaches no store reports: better
    twice than never. At the end ranks wait for each other for up to ``seconds``, because the launcher ends the others
    once one exits, and any rank may host the store.
    """
    store: dist.Store | None = None
    size, first = 1, True
    with suppress(RuntimeError, ValueError):
        size = dist.get_world_size() if dist.is_initialized() else launched_world_size()
        if size > 1:
            store = _store(seconds)
            first = store.add("failed ranks", 1) == 1
    yield first
    deadline = time.monotonic() + seconds
    # The store disconnects when the rank that hosts it leaves, which it does after all others arrived.
    with suppress(RuntimeError):
        if store is not None:
            store.add("ranks that spoke or need not", 1)
            while store.add("ranks that spoke or need not", 0) < size and time.monotonic() < deadline:
                time.sleep(0.02)


def _store(seconds: float) -> dist.Store:
    """Return the process group's store or, before there is a group, the launcher's."""
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    return meet(timedelta(seconds=seconds))[0]
