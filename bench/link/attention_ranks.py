"""The attention alone on real ranks inside the namespaces: what is compared, and what a rank runs."""

import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from bench.link.network import Network
from bench.link.ranks import report
from bench.processes import Step
from bench.workload import Workload, check_same, fingerprint
from parallel.context import ContextParallel, Plan
from runtime.processes import process_group


class AllRows(Plan):
    """A plan by which every row of keys and values travels, whether a query sees it or not."""

    @property
    def sparse(self) -> bool:
        """Return False."""
        return False


@dataclass(frozen=True)
class Contestant:
    """A method with its options; ``all_rows`` as ``AllRows``."""

    name: str
    method: str
    all_rows: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def plan(self, work: Workload, network: Network) -> Plan:
        """Return the plan on the ranks of a network. Raises ContextError: as ``make_plan``."""
        plan = work.plan(self.method, network.size, ranks_per_node=network.ranks_per_node, **self.options)
        return AllRows(plan.geometry, plan.mask) if self.all_rows else plan


def attend(pipe: Connection, work: Workload, name: str, plan: Plan, truth: list[float], steps: int) -> None:
    """Join, check the first of so many forwards and backwards against ``truth``, and report the time of each.

    A step lasts from a barrier until its slowest rank has ended.

    Raises MeasureError: the squares of out, dq, dk and dv do not sum to ``truth``.
    """
    with process_group() as group:
        cp = ContextParallel(plan, group)
        step = Step(cp.attend, *(cp.shard(x, dim=1) for x in work.tensors()))
        valid = (cp.positions < work.seq_length).nonzero()[:, 0]
        for index in range(steps):
            dist.barrier(group)
            start = time.perf_counter()
            found = step()
            seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(seconds, dist.ReduceOp.MAX, group)
            if index == 0:
                sums = fingerprint([x[:, valid] for x in found])
                dist.all_reduce(sums, group=group)
                check_same(name, sums.tolist(), truth, work.dtype)
            if dist.get_rank(group) == 0:
                report(pipe, float(seconds))
