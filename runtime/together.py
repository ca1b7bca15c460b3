"""Raise errors on all ranks together, and name the ranks that were lost.

A rank that fails alone leaves the others waiting in a collective until its timeout. So local work
that may fail is wrapped here, and its outcome is exchanged.

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

from runtime.launch.rendezvous import in_time, meet
from runtime.launch.variables import launched_world_size
from runtime.processes import NODE
from runtime.slurm import AGAIN, leave_ending

T = TypeVar("T")
RAISED = "(raised on rank "
"""Start of the note on an error that all ranks raise."""
CLOSED = re.compile(
    r"(Connection (closed|reset) by peer|Broken pipe|remote process exited|Application timeout)"
    r"[^\n.]*(\.\d+[^\n.]*)*"
)
TIMED_OUT = re.compile(
    r"(Timed out waiting \d+ ?ms for|wait timeout after"
    r"|Timed out after \d+ seconds waiting for clients)[^\n.]*",
    re.I,
)
POLL_SECONDS = 0.05
"""Time between two reads of the store. Time limits count these reads instead of reading the clock,
since load slows all ranks."""
MAX_SLOWDOWN = 10
"""Factor by which a loaded machine may slow down an exchange through the store."""
GRACE_SECONDS = 1.5
"""Time, on an idle machine, until a rank with a closed connection learns that another rank timed
out."""
_ALONE: ContextVar[bool] = ContextVar("alone", default=False)


def work_alone() -> None:
    """Exclude this thread, which is not the main thread of its rank, from all later exchanges."""
    _ALONE.set(True)


def is_alone() -> bool:
    """Return True if this thread has no other ranks to exchange with."""
    return _ALONE.get() or not dist.is_initialized()


def gather_results(fn: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Call ``fn`` on every rank of ``group`` and return all results, in rank order. One collective.

    ``fn`` must do local work only, such as reading files: a collective inside it would wait for a
    rank that has failed. Its result must be picklable. If this rank ``is_alone``, only the local
    call is made.

    Raises the error of the lowest rank that failed, on every rank. A ValueError (every UserError is
    one) or OSError keeps its type and message; other ranks see anything else as a RuntimeError with
    the failing rank's traceback.
    """
    if is_alone():
        return [fn()]
    rank = dist.get_rank(group)
    result: Any = None
    error: Exception | None = None
    sent_error: Exception | None = None
    try:
        result = fn()
    except Exception as caught:
        error = caught
        trace = "".join(traceback.format_exception(error))
        sent_error = RuntimeError(f"rank {rank} failed:\n{trace}")
        # Pickling fails for a local class, or a constructor that needs more than the message.
        with suppress(Exception):
            if isinstance(error, (ValueError, OSError)):
                sent_error = pickle.loads(pickle.dumps(error))

    outcomes = list[Any]([None] * dist.get_world_size(group))
    dist.all_gather_object(outcomes, (result, sent_error), group=group)
    for other, (_, failure) in enumerate(outcomes):
        if failure is None:
            continue
        note = f"{RAISED}{other})"
        if error is not None and rank == other:
            error.add_note(note)
            raise error
        failure.add_note(note)
        raise failure from error
    return [other_result for other_result, _ in outcomes]


def from_first(fn: Callable[[], T]) -> T:
    """Call ``fn`` on the first rank only; return its result, or raise its error, on every rank."""
    return gather_results(lambda: fn() if is_first() else None)[0]  # type: ignore[return-value]


def is_first() -> bool:
    """Return True on the first rank, and in any thread that ``is_alone``."""
    return is_alone() or dist.get_rank() == 0


@contextmanager
def raise_together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run a block of local work; if it fails on one rank, raise on all (see ``gather_results``)."""
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
    """Return True if all ranks raised this error together, so that no rank is lost."""
    return any(note.startswith(RAISED) for note in getattr(error, "__notes__", ()))


@contextmanager
def first_to_report(seconds: float) -> Iterator[bool]:
    """Yield True on the first rank to arrive, which reports why the run fails.

    Also works before the process group exists, through the launcher's store. A rank that cannot
    reach the store reports too: better twice than never. At the end the ranks wait for each other
    for up to ``seconds``, because the launcher ends the others once one exits, and any rank may
    host the store.
    """
    store: dist.Store | None = None
    world_size = 1
    is_reporter = True
    with suppress(RuntimeError, ValueError):
        if dist.is_initialized():
            world_size = dist.get_world_size()
        else:
            world_size = launched_world_size()
        if world_size > 1:
            if dist.is_initialized():
                store = dist.distributed_c10d._get_default_store()
            else:
                store = meet(timedelta(seconds=seconds))[0]
            is_reporter = store.add("failed ranks", 1) == 1

    yield is_reporter

    deadline = time.monotonic() + seconds
    # The store disconnects when the rank that hosts it leaves, which happens after all others
    # arrived.
    with suppress(RuntimeError):
        if store is not None:
            key = "ranks that spoke or need not"
            store.add(key, 1)
            while store.add(key, 0) < world_size and time.monotonic() < deadline:
                time.sleep(0.02)


def report_unresponsive_ranks(error: RuntimeError, seconds: float) -> bool:
    """Print one line if a collective failed because of another rank; else return False.

    Ranks that timed out call the roll through the store for up to ``seconds``; one of them names
    the ranks that do not answer: stopped, hanging or gone. A rank whose connection closed reports
    only that.
    """
    timed_out = TIMED_OUT.search(str(error))
    match = timed_out or CLOSED.search(str(error))
    if match is None:
        return False
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
    ending_message = f"rank {rank} ends because another rank did ({match[0]})"
    leave_ending(AGAIN, ending_message)

    def end(*_: object) -> NoReturn:
        print(ending_message, file=sys.stderr, flush=True)
        os._exit(1)

    # The launcher ends this rank as soon as it sees that another rank ended.
    is_main = threading.current_thread() is threading.main_thread()
    previous_handler = signal.signal(signal.SIGTERM, end) if is_main else None
    line: str | None = ending_message
    if dist.is_initialized():
        line = in_time(
            lambda: _line_of_roll(ending_message, bool(timed_out), seconds), MAX_SLOWDOWN * seconds
        )
    if line is None:
        line = ending_message
        if timed_out:
            line += (
                "; the store, which rank 0 or torchrun hosts, does not answer either: look at "
                "rank 0"
            )
    if previous_handler is not None:
        signal.signal(signal.SIGTERM, previous_handler)

    if line:
        print(line, file=sys.stderr, flush=True)
    time.sleep(0.5)  # let the reporting rank print: the launcher ends all once one has ended
    return True


def _line_of_roll(ending_message: str, timed_out: bool, seconds: float) -> str:
    """Call the roll; return this rank's line, or "" if another rank names the silent ranks."""
    store = open_connection()
    name = "longmesh/answer of rank"
    time_out_key = "longmesh/timed out"
    if timed_out:
        store.set(time_out_key, "")
    else:
        call_roll(store, name, "", min(GRACE_SECONDS, seconds))
        if not store.check([time_out_key]):
            return ending_message

    answers = call_roll(store, name, "", seconds)
    silent = sorted(set(range(dist.get_world_size())) - answers.keys())
    if store.add("longmesh/speaker", 1) > 1:
        return ""

    reason = ending_message.partition(" (")[2]
    advice = "if they are only slow, give a longer --distributed-timeout-minutes"
    if not silent:
        return f"ranks timed out waiting for each other ({reason}, but all answer now; {advice}"
    names = []
    for rank in silent:
        key = NODE.format(rank)
        node = store.get(key).decode() if store.check([key]) else ""
        names.append(f"{rank} on {node}" if node else str(rank))
    ranks = "ranks" if len(silent) > 1 else "rank"
    return (
        f"{ranks} {', '.join(names)} did not answer ({reason}: stopped, hanging or lost, so the "
        f"others end; {advice}"
    )


def open_connection() -> dist.Store:
    """Return the ranks' store on a new connection, since other threads may block the shared one."""
    shared: Any = dist.distributed_c10d._get_default_store()
    return shared.clone()


def call_roll(store: dist.Store, name: str, answer: str, seconds: float) -> dict[int, str]:
    """Answer a roll call; return the answers that came in time, keyed by rank."""
    keys = [f"{name} {rank}" for rank in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], answer)
    wait_for(lambda: store.check(keys), seconds)

    answers: dict[int, str] = {}
    for rank, key in enumerate(keys):
        if store.check([key]):
            answers[rank] = store.get(key).decode()
    return answers


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    """Poll until a condition holds; ``seconds`` limits the number of polls, not the time."""
    for _ in range(round(seconds / POLL_SECONDS)):
        if condition():
            return
        time.sleep(POLL_SECONDS)
