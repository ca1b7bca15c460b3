"""Runs that are measured: a trainer whose records stay in memory, and a few iterations of many
configurations.
"""

import gc
import logging
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from io import StringIO
from typing import Any

import torch
import torch.distributed as dist

from parallel.mesh import Mesh, distributed_mesh
from planner.choice import PLANNER
from runtime.processes import launched_world_size
from runtime.progress import duration
from runtime.together import from_first, is_first
from train.callbacks.metrics import RunLog
from train.checkpoint.api import CheckpointConfig
from train.config.common import CommonConfig
from train.config.entries import Config
from train.config.finalize import finalize
from train.run import open_log
from train.tasks.registry import task_of
from train.tasks.task import Task
from train.trainer import Trainer

PEAK = 1e9
"""MFU is not needed, and measuring the peak takes longer than these steps."""


class Records(RunLog):
    """Keep a run's records in memory only, unchanged, and tell each to ``on_record``: a NaN loss
    stays NaN.
    """

    def __init__(self, on_record: Callable[[dict[str, Any]], object] = lambda record: None) -> None:
        self.records: list[dict[str, Any]] = []
        self._on_record = on_record

    def write(self, record: dict[str, Any]) -> None:
        """Keep a record."""
        self.records.append(record)
        self._on_record(record)

    def sync(self, draw: bool = True) -> None:
        """Do nothing: there is no file."""


@contextmanager
def trainer_of(task: type[Task[Any]], flags: Sequence[str], log: RunLog) -> Iterator[Trainer]:
    """Yield the trainer of a task with these flags, and with ``log`` on the first rank.

    Progress lines are discarded; the mesh lasts as long as the context. Collective.
    """
    logging.getLogger("torch.distributed.tensor").setLevel(
        logging.ERROR
    )  # no warning that gathering is slow
    warnings.filterwarnings(
        "ignore", message="FSDP2-wrapped module .* returned a view"
    )  # nothing writes to it
    config = task.parse_args(list(flags))
    task.validate(config, launched_world_size())
    with redirect_stdout(StringIO()), distributed_mesh(config.mesh) as mesh:
        yield build_trainer(config, mesh, PEAK, lambda *given: log if open_log(*given) else None)


def build_trainer(
    config: CommonConfig,
    mesh: Mesh,
    peak_flops: float | None = None,
    open_log: Callable[..., RunLog | None] = open_log,
) -> Trainer:
    """Build and load everything for training on a mesh of a validated configuration; collective.

    The mesh is there: ``allow_resize`` chooses no other. Other arguments are those of ``Trainer``.
    """
    task = task_of(config)
    final = finalize(config.updated(allow_resize=False), task, PLANNER)
    return Trainer(task(final.config, mesh), final, peak_flops=peak_flops, open_log=open_log)


def measure(
    configs: Sequence[Config],
    iterations: int,
    *,
    quiet: bool = False,
    peak_flops: float | None = None,
) -> list[float]:
    """Return the median seconds of ``iterations`` of each, from the same seed, after one warm-up.
    Collective.

    Args:
        peak_flops: FLOP/s that MFU is relative to; by default a process's peak.
    """
    found = []
    with distributed_mesh(configs[0].mesh):
        for number, config in enumerate(configs, 1):
            whole = max(config.optimizer.lr_decay_iters or config.train.train_iters, iterations + 1)
            # The run saves nothing, with the learning rates of the whole one.
            short = replace(config, checkpoint=CheckpointConfig()).updated(
                train_iters=iterations + 1,
                eval_iters=0,
                exit_interval=None,
                exit_duration_in_mins=None,
                lr_decay_iters=whole,
                tensorboard_dir=None,
                wandb_project=None,
                wandb_exp_name=None,
            )
            if is_first() and not quiet:
                print(f"profiling {number} of {len(configs)}: {config.context.title}", flush=True)
            with released_groups(number):
                found.append(_seconds(short, quiet, peak_flops))
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if is_first() and not quiet:
                print(f"  {duration(found[-1])} per iteration", flush=True)
    return found


def _seconds(config: Config, quiet: bool, peak_flops: float | None) -> float:
    """Return the median seconds of a run's iterations but the first; nothing of it outlives the
    call.
    """
    with (
        distributed_mesh(config.mesh) as mesh,
        redirect_stdout(StringIO()) if quiet else nullcontext(),
    ):
        trainer = build_trainer(config, mesh, peak_flops)
        trainer.train()
        log: Any = trainer.log  # of the first rank
        return from_first(
            lambda: statistics.median(one["iteration_time_ms"] for one in log.records[1:]) / 1e3
        )


@contextmanager
def released_groups(number: int) -> Iterator[None]:
    """Destroy the process groups that the body created, in order of creation; collective.

    torch names a group by its ranks and the number of groups, so a later group may get a destroyed
    one's name and find its dead addresses in the store: each ``number`` has its own part of the
    store.
    """
    from torch.distributed.tensor.debug import (
        _clear_sharding_prop_cache,
    )  # private: a torch without it fails only here

    groups = dist.distributed_c10d._world.pg_map
    before, everyone = set(groups), dist.distributed_c10d._get_default_group()
    backend, store = groups[everyone]
    groups[everyone] = backend, dist.PrefixStore(f"profile {number}", store)
    yield
    groups[everyone] = backend, store
    for group in [group for group in groups if group not in before]:
        dist.destroy_process_group(group)
    _clear_sharding_prop_cache()  # its meshes hold these groups and compare equal to later ones
