"""Training as an entry does it, for processes whose figures a bench or a paper's table takes."""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from types import ModuleType
from typing import Any

from parallel.mesh import joined
from runtime.processes import launched_world_size
from train import loop
from train.loop import Trainer
from train.metrics import RunLog


class Records(RunLog):
    """Keeps a run's records in memory alone, as they are: a loss that is no number stays one."""

    def __init__(self) -> None:
        self._records: list[dict[str, Any]] = []

    def write(self, record: dict[str, Any]) -> None:
        """Note an iteration."""
        self._records.append(record)

    def sync(self) -> None:
        """Nothing is written."""


@contextmanager
def prepared_by(entry: ModuleType, flags: Sequence[str], log: RunLog) -> Iterator[Trainer]:
    """The trainer that ``entry``, pretrain_gpt or pretrain_dit, makes of ``flags``, with ``log`` on the first rank.

    Progress lines go nowhere; the mesh lasts as long as the context. Collective.
    """
    loop.peak_flops = lambda *_: 1e9  # MFU is not asked for, and measuring its peak takes longer than these steps
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # that making tensors whole is slow
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # which nobody writes to
    config = entry.parse_args(list(flags))
    entry.validate(config, launched_world_size())
    with redirect_stdout(StringIO()), joined(config.mesh) as mesh:
        trainer = entry.prepared(config, mesh)
        if trainer.log is not None:
            trainer.log = log
        yield trainer
