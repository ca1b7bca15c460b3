"""Train as an entry script does, in processes that a bench or a paper's table measures."""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from types import ModuleType
from typing import Any

from parallel.mesh import distributed_mesh
from runtime.processes import launched_world_size
from train.loop import Trainer
from train.watching.metrics import RunLog

PEAK = 1e9
"""MFU is not needed, and measuring the peak takes longer than these steps."""


class Records(RunLog):
    """Keep a run's records in memory only, unchanged: a NaN loss stays NaN."""

    def __init__(self) -> None:
        self._records: list[dict[str, Any]] = []

    def write(self, record: dict[str, Any]) -> None:
        """Keep a record."""
        self._records.append(record)

    def sync(self, draw: bool = True) -> None:
        """Do nothing: there is no file."""


@contextmanager
def trainer_of(entry: ModuleType, flags: Sequence[str], log: RunLog) -> Iterator[Trainer]:
    """Yield the trainer that ``entry``, pretrain_gpt or pretrain_dit, builds from ``flags``, with ``log`` on the first
    rank.

    Progress lines are discarded; the mesh lasts as long as the context. Collective.
    """
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # no warning that gathering is slow
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # nothing writes to it
    config = entry.parse_args(list(flags))
    entry.validate(config, launched_world_size())
    with redirect_stdout(StringIO()), distributed_mesh(config.mesh) as mesh:
        trainer = entry.build_trainer(config, mesh, PEAK)
        if trainer.log is not None:
            trainer.log = log
        yield trainer
