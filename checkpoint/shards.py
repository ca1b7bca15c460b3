"""Write a checkpoint's tensors through the planner and the writer of torch.distributed.checkpoint (DCP)."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from checkpoint.manifest import CheckpointError, disk_errors
from checkpoint.tensors import Read, State
from runtime.errors import UserError
from runtime.files import room


class Shards:
    """This rank's part of a save: ``plan``, ``agree``, ``write`` and ``finish``, in this order.

    ``dcp.save`` has six collectives for it: all plans go to one rank, its answers back, then what was written, and a
    table that no rank needs. Here each rank works out the same answer from all plans, which takes each one the time and
    memory that it takes one there: about 4 s and 135 MB for 64 ranks of 1,200 tensors on a CPU, in step with both.
    """

    def __init__(self, read: Read | None, group: dist.ProcessGroup | None) -> None:
        """Begin a save by all ranks of ``group``; with ``read``, of meta tensors, each read as it is written."""
        self._planner = dcp.DefaultSavePlanner() if read is None else _Streaming(read)
        self._one_file = read is None  # a writer holds on to a file's tensors until it is written
        self._rank = dist.get_rank(group) if dist.is_initialized() else 0
        self._plans: list[SavePlan] = []
        self._metadata: Metadata | None = None
        self._writer: dcp.FileSystemWriter | None = None

    def plan(self, state: State) -> SavePlan:
        """Plan this rank's part, without the others."""
        self._planner.set_up_planner(state, is_coordinator=self._rank == 0)
        return self._planner.create_local_plan()

    def agree(self, plans: list[SavePlan]) -> int:
        """Take the plans of all ranks, so that each tensor is written once; return the bytes of all."""
        self._plans, self._metadata = self._planner.create_global_plan(plans)
        return sum(_bytes_of(item) for plan in self._plans for item in plan.items)

    def write(self, folder: Path, memory: FileSystem | None) -> list[WriteResult]:
        """Write and fsync this rank's tensors, or with ``memory`` write files of these names there.

        In memory tensors have no CRC-32, which would be half of the time: files are verified by their SHA-256.

        Raises:
            CheckpointError: the disk refuses, or the folder is not seen here.
        """
        if not folder.is_dir():
            raise CheckpointError(f"{folder}, made by the first rank, is not seen by all; --save needs a shared disk")
        self._writer = dcp.FileSystemWriter(folder, single_file_per_rank=self._one_file, sync_files=memory is None)
        self._writer.fs = memory or self._writer.fs
        plan = self._writer.prepare_global_plan(self._plans)[self._rank]
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(before and memory is None)
        try:
            return self._writer.write_data(self._planner.finish_plan(plan), self._planner).wait()
        except UserError:
            raise
        except Exception as error:
            fix = f"{room(folder)}: free some or write to another folder"
            if memory is not None:
                fix = "it is copied in memory first, which may be short; leave out --async-save"
            found = f"cannot write {folder}: rank {self._rank} found {type(error).__name__}: {error}"
            raise CheckpointError(f"{found}; {fix}") from error
        finally:
            torch.serialization.set_crc32_options(before)

    def finish(self, written: list[list[WriteResult]]) -> None:
        """Write the table of what all ranks have written, on the first one; raises CheckpointError there."""
        if self._rank == 0:
            assert self._writer is not None
            assert self._metadata is not None
            with disk_errors(Path(self._writer.path)):
                self._writer.finish(self._metadata, written)


def _bytes_of(item: WriteItem) -> int:
    """Return the bytes of one rank's part of a tensor; ``item.tensor_storage_size`` returns those of all parts."""
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


class _Streaming(dcp.DefaultSavePlanner):
    """Read each weight as it is written, so that one at a time is in memory."""

    def __init__(self, read: Read) -> None:
        super().__init__()
        self.read = read

    def lookup_object(self, index: Any) -> torch.Tensor:
        return self.read(index.fqn.removeprefix("model."))
