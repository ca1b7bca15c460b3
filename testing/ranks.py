"""Run a function on real gloo ranks, forked from a server that has imported torch and megatron-core already."""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver as _forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")
_PRELOADED = ["testing.preload"]
_context.set_forkserver_preload(_PRELOADED)


def preload(module: str) -> None:
    """Make the fork server import a module too; call before the first rank starts."""
    _PRELOADED.append(module)
    _context.set_forkserver_preload(_PRELOADED)


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 600.0) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` on ``world_size`` processes joined by gloo; return their results by rank.

    ``fn`` is a module-level function; its result must pickle. No process outlives the call or this process, whatever
    ends it.

    Raises:
        RuntimeError: a rank raised (its traceback is in the message), died, or took longer than ``timeout`` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes = [_context.Pipe(duplex=False) for _ in range(world_size)]
        lifeline, held = _context.Pipe(duplex=False)
        ranks = [
            _context.Process(
                target=_rank_main, args=(fn, rank, world_size, folder, pipes[rank][1], lifeline, args), daemon=True
            )
            for rank in range(world_size)
        ]
        try:
            with uninterrupted():
                for process in ranks:
                    process.start()
            for _, writer in pipes:
                writer.close()
            return _collect([reader for reader, _ in pipes], ranks, time.monotonic() + timeout)
        finally:
            held.close()
            for process in ranks:
                if process.pid is not None:
                    process.kill()
                    process.join()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer Ctrl-C and SIGTERM: a process whose start they interrupt would run on with its id unknown."""
    _forkserver.ensure_running()  # first, or it would inherit the blocked signals
    told = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, told)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _collect(readers: list[Connection], ranks: Sequence[BaseProcess], deadline: float) -> list[Any]:
    """Return results by rank; stop at the first failure, since the other ranks may hang without that one."""
    results: dict[int, Any] = {}
    while len(results) < len(readers):
        waiting = {reader: rank for rank, reader in enumerate(readers) if rank not in results}
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RuntimeError(f"ranks {sorted(waiting.values())} did not answer in time")
        for reader in ready:
            rank = waiting[reader]  # type: ignore[index]
            try:
                ok, value = pickle.loads(reader.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                ranks[rank].join(5)  # its pipe closes a moment before it ends
                code = ranks[rank].exitcode
                raise RuntimeError(f"rank {rank} died without a word, exit code {code}") from None
            if not ok:
                raise RuntimeError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(readers))]


def _rank_main(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    folder: str,
    writer: Connection,
    lifeline: Connection,
    args: tuple[Any, ...],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the starter too, which ends this process
    faulthandler.enable()  # a native crash then prints each thread's stack
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME="lo")
    import torch
    import torch.distributed as dist

    from runtime.processes import join

    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(Path(folder) / "store"), world_size)
        join(store=store, rank=rank, world_size=world_size)
        answer = (True, fn(rank, world_size, *args))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        answer = (False, traceback.format_exc())
    writer.send_bytes(pickle.dumps(answer))
    writer.close()


def _end_with(lifeline: Connection) -> None:
    """End this process when the other end closes: its parent is gone."""
    lifeline.poll(None)
    os._exit(1)
