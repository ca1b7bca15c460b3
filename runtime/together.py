"""Raise errors on all ranks together, since a rank that fails alone leaves the others waiting; name
lost ranks.

Errors of a lost peer are recognised by the texts of gloo and the store. Not measured under NCCL,
whose watchdog ends the process in C++ before Python sees an error.
"""

import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from runtime.processes import NODE, in_time, launched_world_size, meet
from runtime.slurm import AGAIN, leave_ending

T = TypeVar("T")
RAISED = "(raised on rank {})"
"""Note of an error that all ranks raise."""
CLOSED = re.compile(
    r"(Connection (closed|reset) by peer|Broken pipe|remote process exited|Application timeout)[^\n.]*(\.\d+[^\n.]*)*"
)
TIMED_OUT = re.compile(
    r"(Timed out waiting \d+ ?ms for|wait timeout after|Timed out after \d+ seconds waiting for clients)[^\n.]*",
    re.I,
)
TURN, SLOWED = 0.05, 10
"""Seconds between two looks at the store, which are counted, as load slows all ranks alike; by how
much it may.
"""
GRACE = 1.5
"""Seconds, on an idle machine, for a rank whose connection closed to hear that another one timed
out.
"""
_ALONE: ContextVar[bool] = ContextVar("alone", default=False)


def work_alone() -> None:
    """Let this thread, which works beside its rank's main one, meet no other ranks from now on."""
    _ALONE.set(True)


def is_alone() -> bool:
    """Return whether there are no other ranks that this thread meets."""
    return _ALONE.get() or not dist.is_initialized()


def gather_results(fn: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Call ``fn`` on every rank of ``group`` and return all results, by rank. One collective.

    ``fn`` must do local work only, such as reading files: a collective inside it would wait for a
    rank that has failed. Its result must be picklable. Where this rank ``is_alone``, call ``fn``
    here only. Raises the error of the lowest rank that failed, on every rank. A ValueError (every
    UserError is one) or OSError keeps its type and message; other ranks see anything else as a
    RuntimeError with the failing rank's traceback.
    """
    if is_alone():
        return [fn()]
    error: Exception | None = None
    mine: Any = None
    sent: Exception | None = None
    own_rank, everyone = dist.get_rank(group), list[Any]([None] * dist.get_world_size(group))
    try:
        mine = fn()
    except Exception as caught:
        error = caught
        sent = RuntimeError(
            f"rank {own_rank} failed:\n{''.join(traceback.format_exception(error))}"
        )
        with suppress(
            Exception
        ):  # its class is local, or its constructor needs more than the message
            if isinstance(error, (ValueError, OSError)):
                sent = pickle.loads(pickle.dumps(error))
    dist.all_gather_object(everyone, (mine, sent), group=group)
    for rank, (_, failure) in enumerate(everyone):
        if failure is not None and error is not None and rank == own_rank:
            error.add_note(RAISED.format(rank))
            raise error
        if failure is not None:
            failure.add_note(RAISED.format(rank))
            raise failure from error
    return [answer for answer, _ in everyone]


def from_first(fn: Callable[[], T]) -> T:
    """Call ``fn`` on the first rank only; return its result, or raise its error, on every rank."""
    return gather_results(lambda: fn() if is_first() else None)[0]  # type: ignore[return-value]


def is_first() -> bool:
    """Return whether this process is the first rank, or ``is_alone``."""
    return is_alone() or dist.get_rank() == 0


@contextmanager
def raise_together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run a block of local work; if it fails on one rank of ``group``, raise on all (see
    ``gather_results``).
    """
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
    """Return whether all ranks raised an error together: then none is lost, and they can meet once
    more.
    """
    return any(
        note.startswith(RAISED.format("").rstrip(")")) for note in getattr(error, "__notes__", ())
    )


@contextmanager
def first_to_report(seconds: float) -> Iterator[bool]:
    """Yield whether this rank reports why the run fails: True on the first rank to arrive.

    Also works before the process group exists, over the launcher's store. A rank that reaches no
    store reports: better twice than never. At the end ranks wait for each other for up to
    ``seconds``, because the launcher ends the others once one exits, and any rank may host the
    store.
    """
    store: dist.Store | None = None
    size, first = 1, True
    with suppress(RuntimeError, ValueError):
        size = dist.get_world_size() if dist.is_initialized() else launched_world_size()
        if size > 1:
            shared = dist.is_initialized()
            store = (
                dist.distributed_c10d._get_default_store()
                if shared
                else meet(timedelta(seconds=seconds))[0]
            )
            first = store.add("failed ranks", 1) == 1
    yield first
    deadline = time.monotonic() + seconds
    # The store disconnects when the rank that hosts it leaves, which it does after all others
    # arrived.
    with suppress(RuntimeError):
        if store is not None:
            store.add("ranks that spoke or need not", 1)
            while (
                store.add("ranks that spoke or need not", 0) < size and time.monotonic() < deadline
            ):
                time.sleep(0.02)


def report_unresponsive_ranks(error: RuntimeError, seconds: float) -> bool:
    """Print one line if a collective failed because of a peer; return False, silently, for any
    other error.

    Ranks that timed out call the roll through the store for up to ``seconds``; one of them names
    the ranks that do not answer: stopped, hanging or gone. A rank whose connection closed reports
    only that.
    """
    timed_out = TIMED_OUT.search(str(error))
    if (found := timed_out or CLOSED.search(str(error))) is None:
        return False
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
    alone = f"rank {rank} ends because a peer of it did ({found[0]})"
    leave_ending(AGAIN, alone)

    def end(*_: object) -> NoReturn:
        print(alone, file=sys.stderr, flush=True)
        os._exit(1)

    # The launcher ends this rank as soon as it sees that another ended.
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, end) if is_main else None
    line: str | None = alone
    if dist.is_initialized():
        line = in_time(lambda: _line_of_roll(alone, timed_out, seconds), SLOWED * seconds)
    if line is None:
        advice = "the store does not answer either, which rank 0 holds where torchrun does not: look at rank 0"
        line = f"{alone}; {advice}" if timed_out else alone
    if before is not None:
        signal.signal(signal.SIGTERM, before)
    print(line, end="\n" * bool(line), file=sys.stderr, flush=True)
    time.sleep(0.5)  # let the speaker print: the launcher ends all ranks once one has ended
    return True


def _line_of_roll(alone: str, timed_out: re.Match[str] | None, seconds: float) -> str:
    """Call the roll; return the line that this rank is to say, empty where another one names the
    silent ranks.
    """
    store, name = own_connection(), "longmesh/answer of rank"
    another = "longmesh/timed out"
    if timed_out:
        store.set(another, "")
    else:
        call_roll(store, name, "", min(GRACE, seconds))
        if not store.check([another]):
            return alone
    silent = sorted(set(range(dist.get_world_size())) - call_roll(store, name, "", seconds).keys())
    if store.add("longmesh/speaker", 1) > 1:
        return ""
    reason, advice = (
        alone.partition(" (")[2],
        "where they are only slow, give a longer --distributed-timeout-minutes",
    )
    if not silent:
        return (
            f"ranks waited in vain for each other ({reason}, and all of them answer now; {advice}"
        )
    keys = {other: NODE.format(other) for other in silent}
    nodes = {
        other: store.get(key).decode() if store.check([key]) else "" for other, key in keys.items()
    }
    names = ", ".join(f"{other}{node and f' on {node}'}" for other, node in nodes.items())
    ranks = "ranks" if len(silent) > 1 else "rank"
    return f"{ranks} {names} did not answer ({reason}: stopped, hanging or lost, and so the others end; {advice}"


def own_connection() -> dist.Store:
    """Return the ranks' store on a connection of its own, as other threads may wait on the shared
    one.
    """
    shared: Any = dist.distributed_c10d._get_default_store()
    return shared.clone()


def call_roll(store: dist.Store, name: str, said: str, seconds: float) -> dict[int, str]:
    """Answer a roll call and wait until all ranks have; return what each rank says that answers in
    time.
    """
    keys = [f"{name} {rank}" for rank in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], said)
    wait_for(lambda: store.check(keys), seconds)
    return {rank: store.get(key).decode() for rank, key in enumerate(keys) if store.check([key])}


def wait_for(holds: Callable[[], bool], seconds: float) -> None:
    """Look until it holds, or so many seconds of looks are over."""
    for _ in range(round(seconds / TURN)):
        if holds():
            return
        time.sleep(TURN)
