"""An attention alone over the link, forward and backward: steps timed on all ranks, and the command around them."""

import argparse
import re
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.harness import add_results, check_same, fingerprint
from bench.link.network import Network, prepare_machine
from bench.link.ranks import WARM_UP_LIMITED, iterate, medians, report
from runtime.errors import UserError
from runtime.machine import results_file
from tools.common.arguments import positive
from tools.common.report import Column, write_tables

WARM_UP, FREE = 1, 1  # steps without the limit: connections are made; counted
COLUMNS: dict[str, Column] = {
    "step, s": "{median:.3f}",
    "on the link": "{on_link:.0%}",
    "without a limit, s": "{unlimited:.3f}",
    "crossed, MiB": lambda row: f"{row['crossed'] / 2**20:.2f}",
}


def add_link(parser: argparse.ArgumentParser) -> None:
    """Add the link's rate, how many steps count, and where results go."""
    parser.add_argument("--rate", default="100mbit", help="of the link or of each rail (default: %(default)s)")
    parser.add_argument("--repeats", type=positive, default=3, help="steps that count (default: %(default)s)")
    add_results(parser)


def bits_per_second(rate: str) -> float:
    """Return a rate in bits per second. Raises UserError: it is not a number with kbit, mbit or gbit."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(k|m|g)bit", rate)
    if found is None or float(found[1]) <= 0:
        raise UserError(f"--rate is {rate!r}; give a number with kbit, mbit or gbit, such as 100mbit")
    return float(found[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[found[2]]


def figures(network: Network, args: argparse.Namespace, body: Callable[..., None], *given: Any) -> dict[str, Any]:
    """Return the medians of a contestant's steps, and the share of them that the bytes take at the link's rate.

    ``body(pipe, *given, steps)`` runs them on every rank, and ends with ``run_steps``.

    Raises MeasureError: a rank failed, or computes something else than it should.
    """
    steps = WARM_UP + FREE + WARM_UP_LIMITED + args.repeats
    found = medians(network, args.rate, lambda before: iterate(network, before, body, *given, steps), WARM_UP, FREE)
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


def run(
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
