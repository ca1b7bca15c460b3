"""Train on real ranks inside the namespaces, and time every iteration.

Ranks are forked from a server that has already imported torch and the entry, then enter their node.
"""

import os
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from bench.harness import failures_told
from bench.link.network import Network, enter
from bench.shapes import AttentionShape
from parallel.mesh import MeshConfig, distributed_mesh
from runtime.ranks import messages, receive, send, started
from tools.calibrate import Figures
from tools.calibrate import measure as calibrate
from tools.common.training import Records, measure, trainer_of
from train.config.language import parse_args

PORT = 29400
ANSWER_WITHIN = 300.0  # seconds in which the next iteration must end


class Iteration(NamedTuple):
    """Seconds of a training iteration, and bytes sent meanwhile from node 0 to node 1 and back."""

    seconds: float
    there: int
    back: int


def _seated(network: Network, body: Callable[..., None], *arguments: Any) -> list[tuple[Callable[..., None], Any]]:
    """Return what ``started`` takes to run ``body(pipe, *arguments)`` on every rank, as an agent per node would."""
    common = {
        "WORLD_SIZE": str(network.size),
        "LOCAL_WORLD_SIZE": str(network.ranks_per_node),
        "MASTER_ADDR": network.address(0),
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": network.interface,
    }
    found = []
    for rank in range(network.size):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank % network.ranks_per_node)}
        found.append((_serve, (network.path(rank), common | own, body, arguments)))
    return found


def train(
    network: Network, arguments: list[str], before: Callable[[int], None], entry: str = "pretrain_gpt"
) -> list[Iteration]:
    """Run the entry with ``arguments`` on all ranks of the network; return its iterations, as ``iterate``."""
    return iterate(network, before, _train, entry, arguments)


def iterate(
    network: Network, before: Callable[[int], None], body: Callable[..., None], *arguments: Any
) -> list[Iteration]:
    """Run ``body(pipe, *arguments)`` on all ranks of the network; return its iterations, which one rank ``report``s.

    ``before(i)`` is called while every rank waits to begin iteration i. No process outlives the call.

    Raises MeasureError: a rank failed, died or did not answer.
    """
    found: list[Iteration] = []
    before(0)
    start = network.crossed()
    with failures_told(), started(_seated(network, body, *arguments)) as ranks:
        for rank, seconds in messages(ranks, ANSWER_WITHIN):
            now = network.crossed()
            found.append(Iteration(seconds, now[0] - start[0], now[1] - start[1]))
            before(len(found))
            start = network.crossed()
            send(ranks[rank].pipe, "go on")
    return found


def profile(network: Network, candidates: list[list[str]], iterations: int) -> list[float]:
    """Return seconds per iteration for each candidate's arguments, as ``tools.plan --profile`` measures them.

    Raises MeasureError: as ``train``.
    """
    with failures_told(), started(_seated(network, _profile, candidates, iterations)) as ranks:
        return next(seconds for _, seconds in messages(ranks, ANSWER_WITHIN))


def calibrated(network: Network, work: AttentionShape, lengths: tuple[int, ...]) -> Figures:
    """Return what ``tools.calibrate`` measures on the ranks of the network. Raises MeasureError: as ``train``."""
    with failures_told(), started(_seated(network, _calibrate, work, lengths)) as ranks:
        return next(figures for _, figures in messages(ranks, ANSWER_WITHIN))


def report(pipe: Connection, seconds: float) -> None:
    """Tell an iteration's seconds, then wait for permission to go on."""
    send(pipe, seconds)
    receive(pipe)


class _Reporter(Records):
    """Report each iteration's seconds, then wait for permission: no rank gets further without the first."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__()
        self._pipe = pipe

    def write(self, record: dict[str, Any]) -> None:
        """Report the time and wait."""
        report(self._pipe, record["iteration_time_ms"] / 1e3)


def _serve(
    pipe: Connection, namespace: str, environment: dict[str, str], body: Callable[..., None], arguments: Any
) -> None:
    """Run a rank in its namespace, with the environment from its launcher."""
    enter(namespace)
    os.environ.update(environment)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # progress lines
    torch.set_num_threads(1)
    body(pipe, *arguments)


def _train(pipe: Connection, entry: str, arguments: list[str]) -> None:
    with trainer_of(import_module(entry), arguments, _Reporter(pipe)) as trainer:
        trainer.train()


def _profile(pipe: Connection, candidates: list[list[str]], iterations: int) -> None:
    seconds = measure([parse_args(arguments) for arguments in candidates], iterations, quiet=True)
    if os.environ["RANK"] == "0":
        send(pipe, seconds)


def _calibrate(pipe: Connection, work: AttentionShape, lengths: tuple[int, ...]) -> None:
    with distributed_mesh(MeshConfig(device="cpu")) as mesh:
        figures = calibrate(mesh.device, work, lengths, lambda line: None)
    if os.environ["RANK"] == "0":
        send(pipe, figures)
