"""Run trainers that keep records in memory, and time a few iterations of configurations."""

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
"""Peak FLOP/s for runs whose MFU is not used; measuring it would take longer than their steps."""


class Records(RunLog):
    """A log that keeps a run's records unchanged in memory, and passes each to ``on_record``.

    A NaN loss stays NaN.
    """

    def __init__(self, on_record: Callable[[dict[str, Any]], object] = lambda record: None) -> None:
        self.records: list[dict[str, Any]] = []
        self._on_record = on_record

    def write(self, record: dict[str, Any]) -> None:
        """Append a record."""
        self.records.append(record)
        self._on_record(record)

    def sync(self, draw: bool = True) -> None:
        """Do nothing: there is no file."""


@contextmanager
def trainer_of(task: type[Task[Any]], flags: Sequence[str], log: RunLog) -> Iterator[Trainer]:
    """Yield a trainer of a task, configured by flags; the first rank writes to ``log``.

    Progress lines are discarded, and the mesh exists until the context ends. Collective.
    """
    # Hide torch's warning that gathering is slow.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    # The warning does not matter here, because nothing writes to the views.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")

    def open_memory_log(*args: Any) -> RunLog | None:
        return log if open_log(*args) else None

    config = task.parse_args(list(flags))
    task.validate(config, launched_world_size())
    with redirect_stdout(StringIO()), distributed_mesh(config.mesh) as mesh:
        yield build_trainer(config, mesh, PEAK, open_memory_log)


def build_trainer(
    config: CommonConfig,
    mesh: Mesh,
    peak_flops: float | None = None,
    open_log: Callable[..., RunLog | None] = open_log,
) -> Trainer:
    """Build and load everything for training a validated configuration on a mesh; collective.

    The mesh exists already, so ``allow_resize`` is switched off. Other arguments are those of
    ``Trainer``.
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
    """Return each configuration's median seconds per iteration, after one warm-up. Collective.

    Args:
        iterations: number of timed iterations per configuration; all have the same seed.
        peak_flops: FLOP/s that MFU is relative to; by default a process's peak.
    """
    seconds = []
    with distributed_mesh(configs[0].mesh):
        prints = is_first() and not quiet
        for number, config in enumerate(configs, 1):
            short = shortened(config, iterations + 1)
            if prints:
                print(f"profiling {number} of {len(configs)}: {config.context.title}", flush=True)
            with released_groups(number):
                seconds.append(_seconds(short, quiet, peak_flops))
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if prints:
                print(f"  {duration(seconds[-1])} per iteration", flush=True)

    return seconds


def shortened(config: Config, iterations: int) -> Config:
    """Return a run of a few iterations that saves nothing; its learning rates stay the same."""
    decay = max(config.optimizer.lr_decay_iters or config.train.train_iters, iterations)
    return replace(config, checkpoint=CheckpointConfig()).updated(
        train_iters=iterations,
        eval_iters=0,
        exit_interval=None,
        exit_duration_in_mins=None,
        lr_decay_iters=decay,
        profile=False,
        tensorboard_dir=None,
        wandb_project=None,
        wandb_exp_name=None,
    )


def _seconds(config: Config, quiet: bool, peak_flops: float | None) -> float:
    """Return the median seconds of a run's iterations after the first.

    Everything that the run builds is local, so that it is freed when the call returns.
    """
    output = redirect_stdout(StringIO()) if quiet else nullcontext()
    with distributed_mesh(config.mesh) as mesh, output:
        trainer = build_trainer(config, mesh, peak_flops)
        trainer.train()
        log: Any = trainer.log  # only the first rank has one

        def median_seconds() -> float:
            times = [record["iteration_time_ms"] for record in log.records[1:]]
            return statistics.median(times) / 1e3

        return from_first(median_seconds)


@contextmanager
def released_groups(number: int) -> Iterator[None]:
    """Destroy the process groups that the body created, in order of creation; collective.

    torch names a group by its ranks and the number of groups, so a later group may get the name of
    a destroyed group and find that group's dead addresses in the store. Therefore each ``number``
    has its own part of the store.
    """
    # A private function, imported here so that a torch without it fails only here.
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    groups = dist.distributed_c10d._world.pg_map
    before = set(groups)
    default_group = dist.distributed_c10d._get_default_group()
    backend, store = groups[default_group]
    groups[default_group] = backend, dist.PrefixStore(f"profile {number}", store)
    yield
    groups[default_group] = backend, store

    created = [group for group in groups if group not in before]
    for group in created:
        dist.destroy_process_group(group)

    # Cached meshes hold these groups, and would compare equal to later meshes.
    _clear_sharding_prop_cache()
