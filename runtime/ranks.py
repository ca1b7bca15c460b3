"""Processes that this one starts: ranks and others, forked from a server that has imported torch."""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver as _forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from runtime.signals import signals_later

_context = multiprocessing.get_context("forkserver")
_PRELOADED = [
    "tools.common.preload"
]  # what the entries import; the server passes over a module that is not there
_context.set_forkserver_preload(_PRELOADED)


class RankError(RuntimeError):
    """A rank raised, died or did not answer; if it raised, the lines after the first are its
    traceback.
    """


class Rank(NamedTuple):
    """A started process, and our end of its pipe."""

    process: Any
    pipe: Connection


class _End(NamedTuple):
    """The last message of a process: the traceback of what it raised, or nothing."""

    trace: str = ""


def preload(module: str) -> None:
    """Make the fork server import a module too; call before the first rank starts."""
    _PRELOADED.append(module)
    _context.set_forkserver_preload(_PRELOADED)


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 600.0
) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` on ``world_size`` processes joined by gloo; return their
    results by rank.

    ``fn`` is a module-level function; its result must pickle. No process outlives the call or this
    process, whatever ends it.

    Raises RankError: a rank raised (its traceback is in the message), died, or took longer than
    ``timeout`` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        bodies = [(_joined, (fn, rank, world_size, folder, args)) for rank in range(world_size)]
        with started(bodies) as ranks:
            return one_of_each(ranks, timeout)


@contextmanager
def started(bodies: Sequence[tuple[Callable[..., None], tuple[Any, ...]]]) -> Iterator[list[Rank]]:
    """Run ``body(pipe, *args)`` in a process each; none outlives the context or this process,
    whatever ends it.
    """
    ranks: list[Rank] = []
    lifeline, held = _context.Pipe(duplex=False)
    try:
        _forkserver.ensure_running()  # first, or it would inherit blocked signals
        with signals_later():
            for body, args in bodies:
                ours, theirs = _context.Pipe()
                process = _context.Process(
                    target=_run, args=(body, theirs, lifeline, args), daemon=True
                )
                process.start()
                theirs.close()
                ranks.append(Rank(process, ours))
        yield ranks
    finally:
        held.close()
        for rank in ranks:
            rank.process.kill()
            rank.process.join()


def send(pipe: Connection, value: Any) -> None:
    """Send what pickles to the other end of a pipe, tensors by their values."""
    pipe.send_bytes(pickle.dumps(value))


def receive(pipe: Connection) -> Any:
    """Receive what the other end of a pipe tells; EOFError if it is closed."""
    return pickle.loads(pipe.recv_bytes())


def messages(ranks: Sequence[Rank], within: float) -> Iterator[tuple[int, Any]]:
    """Yield what ranks tell, with their numbers, until all have ended; stop at the first failure:
    others may hang.

    Raises RankError: a rank raised, died, or none told anything ``within`` so many seconds.
    """
    numbers = {rank.pipe: number for number, rank in enumerate(ranks)}
    while numbers:
        ready = wait(list(numbers), within)
        if not ready:
            raise RankError(
                f"ranks {sorted(numbers.values())} did not answer within {within:.0f} s"
            )
        for pipe in [pipe for pipe in numbers if pipe in ready]:
            number = numbers[pipe]
            try:
                value = receive(pipe)
            except (EOFError, ConnectionResetError):
                process = ranks[number].process
                process.join(5)  # its pipe closes a moment before it ends
                raise RankError(
                    f"rank {number} died without a word, exit code {process.exitcode}"
                ) from None
            if not isinstance(value, _End):
                yield number, value
            elif value.trace:
                raise RankError(f"rank {number} failed:\n{value.trace}")
            else:
                del numbers[pipe]


def one_of_each(ranks: Sequence[Rank], within: float) -> list[Any]:
    """Return one message of each rank, by rank; raises as ``messages``."""
    found: dict[int, Any] = {}
    for number, value in messages(ranks, within):
        found[number] = value
        if len(found) == len(ranks):
            break
    return [found[number] for number in range(len(ranks))]


def _run(
    body: Callable[..., None], pipe: Connection, lifeline: Connection, args: tuple[Any, ...]
) -> None:
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the starter too, which ends this process
    faulthandler.enable()  # a native crash then prints each thread's stack
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    end = _End()
    try:
        body(pipe, *args)
    except BaseException:
        end = _End(traceback.format_exc())
    send(pipe, end)
    pipe.close()


def _end_with(lifeline: Connection) -> None:
    """End this process when the other end closes: its parent is gone."""
    lifeline.poll(None)
    os._exit(1)


def _joined(
    pipe: Connection,
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    folder: str,
    args: tuple[Any, ...],
) -> None:
    """Tell what ``fn`` returns, when all have called it."""
    import torch
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    join_here(rank, world_size, folder)
    value = fn(rank, world_size, *args)
    dist.barrier()
    dist.destroy_process_group()
    send(pipe, value)


def join_here(rank: int, world_size: int, folder: str) -> None:
    """Join the ranks that meet in a folder of this machine."""
    import torch.distributed as dist

    from runtime.processes import join

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    join(
        store=dist.FileStore(str(Path(folder) / "store"), world_size),
        rank=rank,
        world_size=world_size,
    )
