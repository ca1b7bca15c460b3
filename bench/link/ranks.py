"""Train on real ranks inside the namespaces, and time every iteration.

Ranks are forked from a server that has already imported torch and the entry, then enter their node.
"""

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch

import pretrain_gpt
from bench.errors import MeasureError
from bench.link.network import Network, enter
from testing.ranks import uninterrupted
from testing.training import trainer_of
from tools.profile_plan import measure
from train.config.language import parse_args
from train.watching.metrics import RunLog

PORT = 29400
ANSWER_WITHIN = 300.0  # seconds in which the next iteration must end
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["testing.preload"])


class Iteration(NamedTuple):
    """Seconds of a training iteration, and bytes sent meanwhile from node 0 to node 1 and back."""

    seconds: float
    there: int
    back: int


@dataclass(frozen=True)
class Seat:
    """A rank's namespace and the environment from its launcher."""

    namespace: str
    environment: dict[str, str]


def seats(network: Network) -> list[Seat]:
    """Return the ranks' seats, with the environment that a launcher with one agent per node would set."""
    common = {
        "WORLD_SIZE": str(network.size),
        "LOCAL_WORLD_SIZE": str(network.ranks_per_node),
        "MASTER_ADDR": network.address(0),
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": network.interface,
    }
    return [
        Seat(network.path(rank), {**common, "RANK": str(rank), "LOCAL_RANK": str(rank % network.ranks_per_node)})
        for rank in range(network.size)
    ]


def train(network: Network, arguments: list[str], before: Callable[[int], None]) -> list[Iteration]:
    """Run the entry with ``arguments`` on all ranks of the network; return its iterations, as ``iterate``."""
    return iterate(network, before, _train, arguments)


def iterate(
    network: Network, before: Callable[[int], None], body: Callable[..., None], *arguments: Any
) -> list[Iteration]:
    """Run ``body(pipe, *arguments)`` on all ranks of the network; return its iterations, which one rank ``tell``s.

    ``before(i)`` is called while every rank waits to begin iteration i. No process outlives the call.

    Raises:
        MeasureError: a rank failed (its traceback is in the message), died or did not answer.
    """
    found: list[Iteration] = []
    before(0)
    start = network.crossed()
    with _seated(network, body, *arguments) as pipes:
        for pipe, seconds in _messages(pipes):
            now = network.crossed()
            found.append(Iteration(seconds, now[0] - start[0], now[1] - start[1]))
            before(len(found))
            start = network.crossed()
            pipe.send("go on")
    return found


def profile(network: Network, candidates: list[list[str]], iterations: int) -> list[float]:
    """Return seconds per iteration for each candidate's arguments, as ``tools.plan --profile`` measures them.

    Raises:
        MeasureError: as ``train``.
    """
    with _seated(network, _profile, candidates, iterations) as pipes:
        return next(seconds for _, seconds in _messages(pipes))


def tell(pipe: Connection, seconds: float) -> None:
    """Report an iteration's seconds, then wait for permission to go on."""
    pipe.send(("iteration", seconds))
    pipe.recv()


@contextmanager
def _seated(network: Network, body: Callable[..., None], *arguments: Any) -> Iterator[list[Connection]]:
    """Run ``body(pipe, *arguments)`` on every rank; yield our ends of the pipes. No process outlives the context."""
    pipes, processes = [], []
    life, ours_alone = _context.Pipe(duplex=False)
    try:
        with uninterrupted():
            for seat in seats(network):
                ours, theirs = _context.Pipe()
                process = _context.Process(target=_serve, args=(theirs, life, seat, body, arguments), daemon=True)
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
        yield pipes
    finally:
        ours_alone.close()
        for process in processes:
            process.kill()
            process.join()


def _messages(pipes: list[Connection]) -> Iterator[tuple[Connection, Any]]:
    """Yield the ranks' messages, with their pipes, until all are done."""
    running = dict(zip(pipes, range(len(pipes)), strict=True))
    while running:
        ready = wait(list(running), timeout=ANSWER_WITHIN)
        if not ready:
            raise MeasureError(f"no iteration ended within {ANSWER_WITHIN:.0f} s; ranks {sorted(running.values())} run")
        for pipe in [pipe for pipe in running if pipe in ready]:
            try:
                kind, value = pipe.recv()
            except (EOFError, ConnectionResetError):
                raise MeasureError(f"rank {running[pipe]} died without a word") from None
            if kind == "failed":
                raise MeasureError(f"rank {running[pipe]} failed:\n{value}")
            if kind == "done":
                del running[pipe]
                continue
            yield pipe, value


class _Reporter(RunLog):
    """Report each iteration's seconds, then wait for permission: no rank gets further without the first."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._records = pipe, []

    def write(self, record: dict[str, Any]) -> None:
        """Send the time and wait."""
        tell(self._pipe, record["iteration_time_ms"] / 1e3)

    def sync(self, draw: bool = True) -> None:
        """Do nothing: there is no file."""


def _serve(pipe: Connection, life: Connection, seat: Seat, body: Callable[..., None], arguments: Any) -> None:
    """Run a rank; it ends, wherever it is, when the bench's end of ``life`` closes."""
    threading.Thread(target=_end_with, args=(life,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the bench too, which ends its ranks
    try:
        enter(seat.namespace)
        os.environ.update(seat.environment)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # progress lines
        torch.set_num_threads(1)
        body(pipe, *arguments)
        pipe.send(("done", None))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))


def _train(pipe: Connection, arguments: list[str]) -> None:
    with trainer_of(pretrain_gpt, arguments, _Reporter(pipe)) as trainer:
        trainer.run()


def _profile(pipe: Connection, candidates: list[list[str]], iterations: int) -> None:
    seconds = measure([parse_args(arguments) for arguments in candidates], iterations, quiet=True)
    if os.environ["RANK"] == "0":
        pipe.send(("profiled", seconds))


def _end_with(life: Connection) -> None:
    wait([life])
    os._exit(1)
