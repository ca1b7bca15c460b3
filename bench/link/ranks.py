"""Train, or attend alone, on real ranks inside the namespaces: the time of every step, and the bytes that cross.

Ranks are forked from a server that has already imported torch and the entry, then enter their node.
"""

import argparse
import os
import re
import time
import tomllib
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bench.harness import add_results, as_measure_errors, check_same, fingerprint
from bench.link.network import Network, enter, prepare_machine
from bench.shapes import AttentionShape
from parallel.context import Plan, make_plan
from parallel.mesh import MeshConfig, distributed_mesh
from runtime.errors import UserError
from runtime.machine import describe, results_file
from runtime.ranks import messages, receive, send, started
from tools.calibrate import Figures
from tools.calibrate import measure as calibrate
from tools.common.arguments import positive
from tools.common.report import Column, write_tables
from tools.common.training import Records, measure, trainer_of
from train.config.entries import Config
from train.config.language import parse_args

PORT = 29400
ANSWER_WITHIN = 300.0  # seconds in which the next iteration must end
WARM_UP_LIMITED = 1
"""Steps within the limit that do not count: TCP finds its window."""
WARM_UP_ALONE, FREE_ALONE = 1, 1
"""Steps of an attention alone without the limit: those in which connections are made, and those that count."""
COLUMNS: dict[str, Column] = {
    "step, s": "{median:.3f}",
    "on the link": "{on_link:.0%}",
    "without a limit, s": "{unlimited:.3f}",
    "crossed, MiB": lambda row: f"{row['crossed'] / 2**20:.2f}",
}
"""Columns of an attention alone."""


def result_head(args: argparse.Namespace, benchmark: str) -> dict[str, Any]:
    """Return the head of a result: the machine at the start, and what was asked for."""
    head = {"benchmark": benchmark, "machine": describe("cpu"), "note": args.note}
    return head | {"rate": args.rate, "repeats": args.repeats}


def text_of(name: str, result: dict[str, Any], **more: Any) -> str:
    """Return the text above a bench's tables, with the result's fields and ``more`` in it."""
    texts = tomllib.loads(Path(__file__).with_name("texts.toml").read_text(encoding="utf-8"))
    return str(texts[name].format(**result, **more))


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
    own = [{"RANK": str(rank), "LOCAL_RANK": str(rank % network.ranks_per_node)} for rank in range(network.size)]
    return [(_serve, (network.path(rank), common | one, body, arguments)) for rank, one in enumerate(own)]


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
    with as_measure_errors(), started(_seated(network, body, *arguments)) as ranks:
        for rank, seconds in messages(ranks, ANSWER_WITHIN):
            now = network.crossed()
            found.append(Iteration(seconds, now[0] - start[0], now[1] - start[1]))
            before(len(found))
            start = network.crossed()
            send(ranks[rank].pipe, "go on")
    return found


def medians(
    network: Network, rate: str, run: Callable[[Callable[[int], None]], list[Iteration]], warm_up: int, free: int
) -> dict[str, Any]:
    """Return the medians of the iterations of ``run(before)``: ``warm_up`` and ``free`` without the limit, then within.

    The first within the limit does not count.
    """
    begin = warm_up + free

    def limit(iteration: int) -> None:
        if iteration in (0, begin):
            network.limit(rate if iteration else None)

    steps = run(limit)
    limited = steps[begin + WARM_UP_LIMITED :]
    return {
        "seconds": [step.seconds for step in limited],
        "median": median(step.seconds for step in limited),
        "unlimited": median(step.seconds for step in steps[warm_up:begin]),
        "crossed": max(median(step.there for step in limited), median(step.back for step in limited)),
    }


def attention_crossing(config: Config, ranks_per_node: int) -> tuple[int, int]:
    """Return the bytes that a step's attentions send from the first node to the second, and back, by the plan.

    Zero with tensor parallelism, whose layers send their tokens outside of the plan.
    """
    model, sent = config.model, [0, 0]
    plan = make_plan(
        config.context.context_parallel_method,
        seq_len=config.train.seq_length,
        size=config.mesh.context_parallel_size,
        **config.context.plan_arguments(ranks_per_node),
    )
    for layer in range(model.num_layers):
        turned = model.model_type == "transnormer" and layer == 0  # LRPE doubles queries and keys
        crossing = plan_crossing(
            plan,
            ranks_per_node,
            batch=config.train.micro_batch_size,
            heads=model.num_attention_heads,
            kv_heads=model.query_groups,
            head_dim=model.head_dim * (2 if turned else 1),
            value_dim=model.head_dim,
            element_size=4,
        )
        sent = [before + more for before, more in zip(sent, crossing, strict=True)]
    return sent[0], sent[1]


def plan_crossing(plan: Plan, ranks_per_node: int, **sizes: Any) -> tuple[int, int]:
    """Return the bytes that one attention sends from the first node to the second, and back; as ``plan.cost``."""
    sent = [0, 0]
    for rank in range(plan.size):
        cost = plan.cost(rank, **sizes)
        for traffic in (cost.forward, cost.backward):
            sent[rank // ranks_per_node] += traffic.between_nodes(rank, ranks_per_node)
    return sent[0], sent[1]


def profile(network: Network, candidates: list[list[str]], iterations: int) -> list[float]:
    """Return seconds per iteration for each candidate's arguments, as ``tools.plan --profile`` measures them.

    Raises MeasureError: as ``train``.
    """
    with as_measure_errors(), started(_seated(network, _profile, candidates, iterations)) as ranks:
        return next(seconds for _, seconds in messages(ranks, ANSWER_WITHIN))


def calibrated(network: Network, work: AttentionShape, lengths: tuple[int, ...]) -> Figures:
    """Return what ``tools.calibrate`` measures on the ranks of the network. Raises MeasureError: as ``train``."""
    with as_measure_errors(), started(_seated(network, _calibrate, work, lengths)) as ranks:
        return next(figures for _, figures in messages(ranks, ANSWER_WITHIN))


def report(pipe: Connection, seconds: float) -> None:
    """Tell an iteration's seconds, then wait for permission to go on: no rank gets further without the first."""
    send(pipe, seconds)
    receive(pipe)


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
    log = Records(lambda record: report(pipe, record["iteration_time_ms"] / 1e3))
    with trainer_of(import_module(entry), arguments, log) as trainer:
        trainer.train()


def _profile(pipe: Connection, candidates: list[list[str]], iterations: int) -> None:
    seconds = measure([parse_args(arguments) for arguments in candidates], iterations, quiet=True)
    if os.environ["RANK"] == "0":
        send(pipe, seconds)


def _calibrate(pipe: Connection, work: AttentionShape, lengths: tuple[int, ...]) -> None:
    with distributed_mesh(MeshConfig(device="cpu")) as mesh:
        figures = calibrate(mesh.device, work, lengths)
    if os.environ["RANK"] == "0":
        send(pipe, figures)


def add_link(parser: argparse.ArgumentParser) -> None:
    """Add the link's rate, how many steps count, and where results go."""
    parser.add_argument("--rate", default="100mbit", help="of the link or of each rail (default: %(default)s)")
    parser.add_argument("--repeats", type=positive, default=3, help="steps that count (default: %(default)s)")
    add_results(parser)


def figures(network: Network, args: argparse.Namespace, body: Callable[..., None], *given: Any) -> dict[str, Any]:
    """Return the medians of a contestant's steps, and the share of them that the bytes take at the link's rate.

    ``body(pipe, *given, steps)`` runs them on every rank, and ends with ``run_steps``.

    Raises MeasureError: a rank failed, or computes something else than it should.
    """
    warm_up, free = WARM_UP_ALONE, FREE_ALONE
    steps = warm_up + free + WARM_UP_LIMITED + args.repeats
    found = medians(network, args.rate, lambda before: iterate(network, before, body, *given, steps), warm_up, free)
    rails = network.ranks_per_node if network.rails else 1
    return {**found, "on_link": found["crossed"] * 8 / bits_per_second(args.rate) / rails / found["median"]}


def run_steps(
    pipe: Connection, group: dist.ProcessGroup, steps: int, step: Callable[[], list[Tensor]], *same: Any
) -> None:
    """Report the time of each of so many steps, from a barrier until the slowest rank has ended.

    The squares of what the first one returns must sum over the ranks to the truth: ``same`` is as of ``check_same``,
    without what was got.
    """
    name, *truth = same
    for index in range(steps):
        dist.barrier(group)
        start = time.perf_counter()
        found = step()
        seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group)
        if index == 0:
            sums = fingerprint(found)
            dist.all_reduce(sums, group=group)
            check_same(name, sums.tolist(), *truth)
        if dist.get_rank(group) == 0:
            report(pipe, float(seconds))


def bits_per_second(rate: str) -> float:
    """Return a rate in bits per second. Raises UserError: it is not a number with kbit, mbit or gbit."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(k|m|g)bit", rate)
    if found is None or float(found[1]) <= 0:
        raise UserError(f"--rate is {rate!r}; give a number with kbit, mbit or gbit, such as 100mbit")
    return float(found[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[found[2]]


def run_bench(
    args: argparse.Namespace,
    name: str,
    title: str,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    markdown: Callable[[dict[str, Any]], str],
) -> None:
    """Measure, print and, if asked, write. Raises UserError: a wrong rate; NetworkError: as ``prepare_machine``."""
    bits_per_second(args.rate)
    prepare_machine()
    result = measure(args)
    print("\n" + markdown(result))
    if args.results:
        path, text = results_file(args.results, name, result["machine"]), f"# {title}\n\n{markdown(result)}"
        print(f"wrote {write_tables(path, result, text)} and its .jsonl")
