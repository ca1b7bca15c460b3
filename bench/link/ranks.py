"""Train, or only attend, on real ranks inside the namespaces, and measure steps and traffic.

Ranks are forked from a server that has already imported torch and the entry; then each enters the
namespace of its node.
"""

import argparse
import os
import re
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bench.harness import add_results, as_measure_errors, check_same, fingerprint, heading
from bench.link.network import Network, enter, prepare_machine
from parallel.context import Plan, make_plan
from parallel.mesh import MeshConfig, distributed_mesh
from runtime.errors import UserError
from runtime.machine import describe, results_file
from runtime.ranks import messages, receive, send, started
from tools.calibrate.devices import Figures
from tools.calibrate.measure import measure as calibrate
from tools.common.arguments import positive
from tools.common.report import Column, write_tables
from tools.common.shapes import AttentionShape
from tools.common.training import Records, trainer_of
from train.config.entries import Config
from train.tasks.registry import ENTRIES

PORT = 29400
ANSWER_WITHIN = 300.0  # seconds in which the next iteration must end
WARM_UP = 1
"""Number of warm-up steps without the limit, which set up connections and do not count."""
UNLIMITED = 1
"""Number of timed steps without the limit, after the warm-up steps."""
WARM_UP_LIMITED = 1
"""Number of warm-up steps with the limit, in which TCP adapts its window; they do not count."""
SHARED = {"shared": "one link for all ranks", "rails": "a link for each rank"}
COLUMNS: dict[str, Column] = {
    "": "{name}",
    "step, s": "{median:.3f}",
    "on the link": "{on_link:.0%}",
    "without a limit, s": "{unlimited:.3f}",
    "crossed, MiB": lambda row: f"{row['crossed'] / 2**20:.2f}",
    "attention by the plan, MiB": lambda row: f"{row['attention_by_plan'] / 2**20:.2f}",
}


class Iteration(NamedTuple):
    """Duration of an iteration in seconds, and the bytes sent during it to node 1 and to node 0."""

    seconds: float
    to_node_1: int
    to_node_0: int


def _seated(
    network: Network, body: Callable[..., None], *arguments: Any
) -> list[tuple[Callable[..., None], Any]]:
    """Return the argument of ``started`` that runs ``body(pipe, *arguments)`` on every rank.

    The environment is the one that a launcher's agent on each node would set.
    """
    seats = []
    for rank in range(network.size):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % network.ranks_per_node),
            "WORLD_SIZE": str(network.size),
            "LOCAL_WORLD_SIZE": str(network.ranks_per_node),
            "MASTER_ADDR": network.address(0),
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": network.interface,
        }
        seats.append((_serve, (network.path(rank), environment, body, arguments)))
    return seats


def _serve(
    pipe: Connection,
    namespace: str,
    environment: dict[str, str],
    body: Callable[..., None],
    arguments: Any,
) -> None:
    """Run a rank in its namespace, with the environment from its launcher."""
    enter(namespace)
    os.environ.update(environment)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # discard progress lines
    torch.set_num_threads(1)
    body(pipe, *arguments)


def train(
    network: Network,
    arguments: list[str],
    before: Callable[[int], None],
    entry: str = "pretrain_gpt",
) -> list[Iteration]:
    """Run the entry with ``arguments`` on all ranks, and return iterations as ``iterate`` does."""
    return iterate(network, before, _train, entry, arguments)


def iterate(
    network: Network, before: Callable[[int], None], body: Callable[..., None], *arguments: Any
) -> list[Iteration]:
    """Run ``body(pipe, *arguments)`` on all ranks, and return the iterations that a rank reports.

    ``before(i)`` is called while every rank waits to begin iteration i. No process outlives the
    call.

    Raises MeasureError if a rank failed, died or did not answer.
    """
    iterations: list[Iteration] = []
    before(0)
    start = network.crossed()
    with as_measure_errors(), started(_seated(network, body, *arguments)) as ranks:
        for rank, seconds in messages(ranks, ANSWER_WITHIN):
            end = network.crossed()
            iterations.append(Iteration(seconds, end[0] - start[0], end[1] - start[1]))
            before(len(iterations))
            start = network.crossed()
            send(ranks[rank].pipe, "go on")
    return iterations


def calibrated(network: Network, work: AttentionShape, lengths: tuple[int, ...]) -> Figures:
    """Calibrate the network: return the figures of ``tools.calibrate`` on its ranks.

    Raises MeasureError if a rank failed, died or did not answer in time.
    """
    with as_measure_errors(), started(_seated(network, _calibrate, work, lengths)) as ranks:
        return next(figures for _, figures in messages(ranks, ANSWER_WITHIN))


def report(pipe: Connection, seconds: float) -> None:
    """Send an iteration's seconds, then wait for permission to continue.

    Only the first rank reports; the others wait for it in the next collective.
    """
    send(pipe, seconds)
    receive(pipe)


def _train(pipe: Connection, entry: str, arguments: list[str]) -> None:
    log = Records(lambda record: report(pipe, record["iteration_time_ms"] / 1e3))
    with trainer_of(ENTRIES[f"{entry}.py"], arguments, log) as trainer:
        trainer.train()


def _calibrate(pipe: Connection, work: AttentionShape, lengths: tuple[int, ...]) -> None:
    with distributed_mesh(MeshConfig(device="cpu")) as mesh:
        figures = calibrate(mesh.device, work, lengths)
    if os.environ["RANK"] == "0":
        send(pipe, figures)


def run_steps(
    pipe: Connection,
    group: dist.ProcessGroup,
    steps: int,
    step: Callable[[], list[Tensor]],
    name: str,
    truth: list[float],
) -> None:
    """Run float32 steps, and report the time of each, from a barrier to the slowest rank's end.

    The fingerprint of the first step's results, summed over the ranks, must equal ``truth``.
    """
    for index in range(steps):
        dist.barrier(group)
        start = time.perf_counter()
        tensors = step()
        seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group)
        if index == 0:
            sums = fingerprint(tensors)
            dist.all_reduce(sums, group=group)
            check_same(name, sums.tolist(), truth, "float32")
        if dist.get_rank(group) == 0:
            report(pipe, float(seconds))


def attention_crossing(config: Config, ranks_per_node: int) -> tuple[int, int]:
    """Return the bytes that a step's attentions send to node 1 and node 0, according to the plan.

    With tensor parallelism they are 0, since its layers exchange tokens outside of the plan.
    """
    model = config.model
    to_node_1 = 0
    to_node_0 = 0
    plan = make_plan(
        config.context.context_parallel_method,
        seq_len=config.train.seq_length,
        size=config.mesh.context_parallel_size,
        **config.context.plan_arguments(ranks_per_node),
    )
    for layer in range(model.num_layers):
        head_dim = model.head_dim
        if model.model_type == "transnormer" and layer == 0:
            head_dim *= 2  # LRPE doubles the width of queries and keys
        layer_to_node_1, layer_to_node_0 = plan_crossing(
            plan,
            ranks_per_node,
            batch=config.train.micro_batch_size,
            heads=model.num_attention_heads,
            kv_heads=model.query_groups,
            head_dim=head_dim,
            value_dim=model.head_dim,
        )
        to_node_1 += layer_to_node_1
        to_node_0 += layer_to_node_0
    return to_node_1, to_node_0


def plan_crossing(plan: Plan, ranks_per_node: int, **sizes: Any) -> tuple[int, int]:
    """Return the bytes that a float32 attention sends to node 1 and to node 0.

    ``sizes`` are arguments of ``plan.cost``.
    """
    sent = [0, 0]
    for rank in range(plan.size):
        cost = plan.cost(rank, **sizes, element_size=4)
        for traffic in (cost.forward, cost.backward):
            sent[rank // ranks_per_node] += traffic.between_nodes(rank, ranks_per_node)
    return sent[0], sent[1]


def add_link(parser: argparse.ArgumentParser, repeats: int) -> None:
    """Add flags for the link's rate, the number of steps, and the results."""
    parser.add_argument(
        "--rate", default="100mbit", help="rate of the link or each rail (default: %(default)s)"
    )
    parser.add_argument(
        "--repeats",
        type=positive,
        default=repeats,
        help="number of timed steps (default: %(default)s)",
    )
    add_results(parser)


def figures(
    network: Network,
    args: argparse.Namespace,
    run: Callable[[Callable[[int], None], int], list[Iteration]],
) -> dict[str, Any]:
    """Return a contestant's median step times without and with the limit, and its traffic.

    ``run(before, steps)`` returns iterations as ``iterate`` does. ``crossed`` is the bytes of a
    step in the busier direction; ``on_link`` is the time that they take at the link's rate, as a
    share of the step.

    Raises MeasureError if a rank failed, or its result is wrong.
    """
    first_limited = WARM_UP + UNLIMITED

    def limit(iteration: int) -> None:
        if iteration == 0:
            network.limit(None)
        elif iteration == first_limited:
            network.limit(args.rate)

    steps = run(limit, first_limited + WARM_UP_LIMITED + args.repeats)
    limited = steps[first_limited + WARM_UP_LIMITED :]
    seconds = [step.seconds for step in limited]
    median_seconds = median(seconds)
    crossed = max(
        median(step.to_node_1 for step in limited), median(step.to_node_0 for step in limited)
    )
    links = network.ranks_per_node if network.rails else 1
    return {
        "seconds": seconds,
        "median": median_seconds,
        "unlimited": median(step.seconds for step in steps[WARM_UP:first_limited]),
        "crossed": crossed,
        "on_link": crossed * 8 / bits_per_second(args.rate) / links / median_seconds,
    }


def bits_per_second(rate: str) -> float:
    """Return a rate in bits per second.

    Raises UserError if it is not a number with kbit, mbit or gbit.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(k|m|g)bit", rate)
    if match is None or float(match[1]) <= 0:
        raise UserError(
            f"--rate is {rate!r}; give a number with kbit, mbit or gbit, such as 100mbit"
        )
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


def run_bench(
    args: argparse.Namespace,
    name: str,
    title: str,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    markdown: Callable[[dict[str, Any]], list[str]],
) -> None:
    """Measure, print a report, and write it to ``--results`` if given.

    Raises UserError if the rate is invalid, and NetworkError as ``prepare_machine`` does.
    """
    bits_per_second(args.rate)
    prepare_machine()
    machine = describe("cpu")
    result = {
        "benchmark": title,
        "machine": machine,
        "note": args.note,
        "rate": args.rate,
        "repeats": args.repeats,
    }
    result |= measure(args)
    result["load_average"] = list(os.getloadavg())
    setting = f"{args.rate} between two nodes in each direction; medians of {args.repeats} steps."
    text = "\n".join([f"# {title}", "", *heading(result), setting, *markdown(result), ""])
    print("\n" + text)
    if args.results:
        path = write_tables(results_file(args.results, name, machine), result, text)
        print(f"wrote {path} and its .jsonl")
