"""Start ranks and other processes by forking a server that has imported torch.

A fork of the server takes a few milliseconds, while a new interpreter imports torch for seconds.
"""

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
# Modules that the entries import; the server ignores a module that does not exist.
_PRELOADED = ["tools.common.preload"]
_context.set_forkserver_preload(_PRELOADED)


class RankError(RuntimeError):
    """A rank raised, died or did not answer; if it raised, the message contains its traceback."""


class Rank(NamedTuple):
    """A started process, and this process's end of the pipe to it."""

    process: Any
    pipe: Connection


class _End(NamedTuple):
    """The last message of a process; it contains the traceback if the process raised."""

    trace: str = ""


def preload(module: str) -> None:
    """Make the fork server import a further module; call before the first rank starts."""
    _PRELOADED.append(module)
    _context.set_forkserver_preload(_PRELOADED)


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 600.0
) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` on gloo ranks; return the results in rank order.

    ``fn`` is a module-level function; its result must pickle. No process outlives the call or this
    process, whatever ends it.

    Raises RankError if a rank raised (its traceback is in the message), died, or took longer than
    ``timeout`` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        bodies = [(_joined, (fn, rank, world_size, folder, args)) for rank in range(world_size)]
        with started(bodies) as ranks:
            return one_of_each(ranks, timeout)


@contextmanager
def started(bodies: Sequence[tuple[Callable[..., None], tuple[Any, ...]]]) -> Iterator[list[Rank]]:
    """Run each ``body(pipe, *args)`` in a new process until the block ends.

    No process outlives the block or this process, whatever ends it: each watches the reading end of
    a pipe whose writing end only this process has.
    """
    ranks: list[Rank] = []
    lifeline, lifeline_writer = _context.Pipe(duplex=False)
    try:
        _forkserver.ensure_running()  # start it first, or it would inherit blocked signals
        with signals_later():
            for body, args in bodies:
                starter_end, process_end = _context.Pipe()
                process = _context.Process(
                    target=_run, args=(body, process_end, lifeline, args), daemon=True
                )
                process.start()
                process_end.close()
                ranks.append(Rank(process, starter_end))
        yield ranks
    finally:
        lifeline_writer.close()
        for rank in ranks:
            rank.process.kill()
            rank.process.join()


def send(pipe: Connection, value: Any) -> None:
    """Send a picklable value through a pipe; tensors are sent by value."""
    pipe.send_bytes(pickle.dumps(value))


def receive(pipe: Connection) -> Any:
    """Receive a value from a pipe. Raises EOFError if the other end is closed."""
    return pickle.loads(pipe.recv_bytes())


def messages(ranks: Sequence[Rank], within: float) -> Iterator[tuple[int, Any]]:
    """Yield (rank number, message) until all ranks have ended.

    Iteration stops at the first failure, since the other ranks may hang.

    Raises RankError if a rank raised or died, or if no message came ``within`` seconds.
    """
    numbers = {rank.pipe: number for number, rank in enumerate(ranks)}
    while numbers:
        ready = wait(list(numbers), within)
        if not ready:
            raise RankError(
                f"ranks {sorted(numbers.values())} did not answer within {within:.0f} s"
            )
        for pipe, number in list(numbers.items()):
            if pipe not in ready:
                continue
            try:
                value = receive(pipe)
            except (EOFError, ConnectionResetError):
                process = ranks[number].process
                process.join(5)  # the pipe closes a moment before the process ends
                raise RankError(
                    f"rank {number} died without a message, exit code {process.exitcode}"
                ) from None
            if not isinstance(value, _End):
                yield number, value
            elif value.trace:
                raise RankError(f"rank {number} failed:\n{value.trace}")
            else:
                del numbers[pipe]


def one_of_each(ranks: Sequence[Rank], within: float) -> list[Any]:
    """Return one message from each rank, in rank order. Raises RankError like ``messages``."""
    values: dict[int, Any] = {}
    for number, value in messages(ranks, within):
        values[number] = value
        if len(values) == len(ranks):
            break
    return [values[number] for number in range(len(ranks))]


def _run(
    body: Callable[..., None], pipe: Connection, lifeline: Connection, args: tuple[Any, ...]
) -> None:
    # Ctrl-C reaches the starter too, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()  # on a native crash this prints the stack of each thread
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    end = _End()
    try:
        body(pipe, *args)
    except BaseException:
        end = _End(traceback.format_exc())
    send(pipe, end)
    pipe.close()


def _end_with(lifeline: Connection) -> None:
    """End this process when the other end of the pipe closes, because the starter has ended."""
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
    """Join the ranks, call ``fn``, and send its result once all ranks have a result."""
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
    """Join the ranks that use a folder on this machine as their store."""
    import torch.distributed as dist

    from runtime.processes import join

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    join(
        store=dist.FileStore(str(Path(folder) / "store"), world_size),
        rank=rank,
        world_size=world_size,
    )
