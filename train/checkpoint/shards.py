"""Write this rank's shards of a checkpoint with the planners of torch.distributed.checkpoint (DCP).

``dcp.save`` needs six collectives for this: one rank receives all plans and answers them, then
receives the results and sends back a table that no rank needs. Here every rank computes the same
global plan from all plans. Every rank then spends the time and memory of that one rank: about
4 s and 135 MB for 64 ranks of 1,200 tensors on a CPU, in proportion to both numbers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from runtime.errors import UserError
from runtime.files import room
from train.checkpoint.manifest import CheckpointError, disk_errors
from train.checkpoint.tensors import State

Read = Callable[[str], torch.Tensor]
"""Maps a parameter's name to its tensor; each call may read a file."""
Copies = dict[MetadataIndex, torch.Tensor]
"""Copies in host memory of the tensors that a rank writes."""


class Shards:
    """This rank's part of a save.

    The steps are ``plan``, ``agree``, ``copy`` if the save is asynchronous, ``write`` and
    ``finish``, in this order.
    """

    def __init__(self, read: Read | None) -> None:
        """Prepare a save by all ranks.

        With ``read``, the state has meta tensors, and each is read when it is written.
        """
        self._planner = _SavePlanner(read)
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._plans: list[SavePlan] = []
        self._metadata: Metadata | None = None
        self._writer: dcp.FileSystemWriter | None = None

    def plan(self, state: State) -> SavePlan:
        """Plan this rank's part of the save, without communication."""
        self._planner.set_up_planner(state, is_coordinator=self._rank == 0)
        return self._planner.create_local_plan()

    def agree(self, plans: list[SavePlan]) -> int:
        """Merge all ranks' plans, so that each tensor is written once; return the total bytes."""
        self._plans, self._metadata = self._planner.create_global_plan(plans)
        total = 0
        for plan in self._plans:
            for item in plan.items:
                # Not item.tensor_storage_size, which counts the bytes of all parts of a tensor.
                tensor = item.tensor_data
                if tensor is not None:
                    total += tensor.chunk.sizes.numel() * tensor.properties.dtype.itemsize
        return total

    def copy(self, folder: Path, memory: Copies) -> None:
        """Copy this rank's tensors for ``write``, reusing the ``memory`` of the save before.

        Raises CheckpointError if memory is short.
        """
        fix = (
            "async_save first copies the tensors to host memory, which may be short; leave out "
            "--async-save"
        )
        with _named_errors(folder, lambda: fix):
            for item in self._plans[self._rank].items:
                source = self._planner.resolve_data(item).detach()
                memory[item.index] = host_copy(source, memory.get(item.index))
        self._planner.copies = memory

    def write(self, folder: Path) -> list[WriteResult]:
        """Write and fsync this rank's tensors.

        Raises CheckpointError if the disk cannot be written to, or this rank does not see the
        folder.
        """
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder} was created by another rank, but this one does not see it; give a "
                "--save on a disk that all ranks share"
            )
        # A writer keeps the tensors of a file in memory until the file is written.
        self._writer = dcp.FileSystemWriter(folder, single_file_per_rank=self._planner.read is None)
        with _named_errors(folder, lambda: f"{room(folder)}; free more or write to another folder"):
            plan = self._writer.prepare_global_plan(self._plans)[self._rank]
            return self._writer.write_data(self._planner.finish_plan(plan), self._planner).wait()

    def finish(self, results: list[list[WriteResult]]) -> None:
        """Write the table of all ranks' tensors; call on the first rank.

        Raises CheckpointError if the disk cannot be written to.
        """
        assert self._writer is not None
        assert self._metadata is not None
        with disk_errors(Path(self._writer.path)):
            self._writer.finish(self._metadata, results)


def host_copy(source: torch.Tensor, memory: torch.Tensor | None) -> torch.Tensor:
    """Copy a tensor into ``memory``, or into a new one if its shape or dtype differs."""
    if memory is None or memory.shape != source.shape or memory.dtype != source.dtype:
        memory = torch.empty(source.shape, dtype=source.dtype)
    return memory.copy_(source)


class _SavePlanner(dcp.DefaultSavePlanner):
    """Give the writer copies in place of a state's tensors, or weights read one at a time."""

    def __init__(self, read: Read | None) -> None:
        super().__init__()
        self.read = read
        self.copies: Copies | None = None

    def lookup_object(self, index: MetadataIndex) -> Any:
        if self.read is None:
            return super().lookup_object(index)
        return self.read(index.fqn.removeprefix("model."))

    def resolve_data(self, write_item: WriteItem) -> Any:
        if self.copies is None:
            return super().resolve_data(write_item)
        return self.copies[write_item.index]


@contextmanager
def _named_errors(folder: Path, fix: Callable[[], str]) -> Iterator[None]:
    """Turn any error of a save into a CheckpointError that names the folder, the rank and a fix."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        rank = dist.get_rank() if dist.is_initialized() else 0
        problem = f"rank {rank} found {type(error).__name__}: {error}"
        raise CheckpointError(f"cannot write {folder}: {problem}; {fix()}") from error
