"""The tensors of a run, written and read by the planners of torch.distributed.checkpoint (DCP)."""

import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from enum import EnumType
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.storage import WriteResult

from runtime.errors import UserError, first_few
from runtime.files import room
from runtime.together import gather_results
from train.checkpoint.manifest import METADATA, CheckpointError, Manifest, disk_errors, is_count

State = dict[str, dict[str, torch.Tensor]]
Model = nn.Module | Sequence[nn.Module]
"""A model, or the parts of it that a rank holds, with parameter names as in the whole model."""
Read = Callable[[str], torch.Tensor]
"""A parameter's name -> its tensor; each call may read a file."""
Copies = dict[MetadataIndex, torch.Tensor]
"""Tensors that a rank writes, in the memory of its host."""

# Beside the dataclasses and enumerations of DCP's metadata, what it puts into `.metadata`; each
# only holds data.
_DATA_CLASSES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


def tensors_of(
    model: Model, optimizer: torch.optim.Optimizer | None, *, create: bool = False
) -> State:
    """Return a run's tensors by the plain model's parameter names: {"model": weights, "optimizer":
    moments, step}.

    These are the live tensors (DTensors where sharded), not copies: DCP writes and reads them in
    place, without a cast. (``set_optimizer_state_dict`` would cast float32 moments to bf16
    parameters.)

    Args:
        optimizer: None leaves out the "optimizer" section.
        create: create the (zero) state of an optimizer that has not stepped, to read into.
    """
    # Weights first: an evaluation may have left FSDP modules unsharded, and this reshards them.
    state: State = {"model": {}}
    parts = [model] if isinstance(model, nn.Module) else model
    for part in parts:
        state["model"] |= get_model_state_dict(part)  # type: ignore[arg-type]
    if optimizer is not None:
        if create:
            _first_step_without_effect(optimizer)
        state["optimizer"] = {
            f"state.{name}.{key}": value
            for part in parts
            for name, parameter in part.named_parameters()
            for key, value in optimizer.state.get(parameter, {}).items()
        }
        if torch.cuda.is_initialized():  # moments in host memory may be on their way there
            torch.cuda.synchronize()
    for section, values in state.items():
        for name, value in values.items():
            if not isinstance(value, torch.Tensor) or value.is_meta:
                kind = (
                    "a meta tensor"
                    if isinstance(value, torch.Tensor)
                    else f"a {type(value).__name__}"
                )
                raise CheckpointError(
                    f"{section} state {name} is {kind}; a checkpoint holds tensors with data only"
                )
    return state


@torch.no_grad()
def spread_copies(model: Model, optimizer: torch.optim.Optimizer | None) -> None:
    """Copy value and moments of each parameter that several parts hold from the last part, which
    was read.
    """
    parts = [model] if isinstance(model, nn.Module) else model
    read = {name: parameter for part in parts for name, parameter in part.named_parameters()}
    for part in parts:
        for name, parameter in part.named_parameters():
            if parameter is not (source := read[name]):
                parameter.copy_(source)
                if optimizer is not None:
                    for key, value in optimizer.state.get(source, {}).items():
                        optimizer.state[parameter][key].copy_(value)


def _first_step_without_effect(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer create its state by a step with zero gradients and learning rate."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


class Shards:
    """This rank's part of a save: ``plan``, ``agree``, perhaps ``copy``, ``write`` and ``finish``,
    in this order.

    ``dcp.save`` has six collectives for it: all plans go to one rank, its answers back, then what
    was written, and a table that no rank needs. Here each rank works out the same answer from all
    plans, which takes each one the time and memory that it takes one there: about 4 s and 135 MB
    for 64 ranks of 1,200 tensors on a CPU, in step with both.
    """

    def __init__(self, read: Read | None) -> None:
        """Begin a save by all ranks; with ``read``, of meta tensors, each read as it is written."""
        self._planner = _Planner(read)
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._plans: list[SavePlan] = []
        self._metadata: Metadata | None = None
        self._writer: dcp.FileSystemWriter | None = None

    def plan(self, state: State) -> SavePlan:
        """Plan this rank's part, without the others."""
        self._planner.set_up_planner(state, is_coordinator=self._rank == 0)
        return self._planner.create_local_plan()

    def agree(self, plans: list[SavePlan]) -> int:
        """Take the plans of all ranks, so that each tensor is written once; return the bytes of
        all.
        """
        self._plans, self._metadata = self._planner.create_global_plan(plans)
        # Not item.tensor_storage_size, which has the bytes of all parts of a tensor.
        written = [
            data
            for plan in self._plans
            for item in plan.items
            if (data := item.tensor_data) is not None
        ]
        return sum(data.chunk.sizes.numel() * data.properties.dtype.itemsize for data in written)

    def copy(self, folder: Path, memory: Copies) -> None:
        """Let ``write`` take copies of this rank's tensors, in the ``memory`` of the save before
        where they fit.

        Raises CheckpointError: memory is short.
        """
        with _refused(
            folder,
            lambda: "it is copied in memory first, which may be short; leave out --async-save",
        ):
            for item in self._plans[self._rank].items:
                memory[item.index] = host_copy(
                    self._planner.resolve_data(item).detach(), memory.get(item.index)
                )
        self._planner.copies = memory

    def write(self, folder: Path) -> list[WriteResult]:
        """Write and fsync this rank's tensors. Raises CheckpointError: the disk refuses, or the
        folder is not here.
        """
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder}, made by the first rank, is not seen by all; --save needs a shared disk"
            )
        # A writer holds on to a file's tensors until it is written.
        self._writer = dcp.FileSystemWriter(folder, single_file_per_rank=self._planner.read is None)
        with _refused(folder, lambda: f"{room(folder)}: free some or write to another folder"):
            plan = self._writer.prepare_global_plan(self._plans)[self._rank]
            return self._writer.write_data(self._planner.finish_plan(plan), self._planner).wait()

    def finish(self, written: list[list[WriteResult]]) -> None:
        """Write the table of what all ranks have written; for the first one. Raises
        CheckpointError.
        """
        assert self._writer is not None
        assert self._metadata is not None
        with disk_errors(Path(self._writer.path)):
            self._writer.finish(self._metadata, written)


def host_copy(source: torch.Tensor, held: torch.Tensor | None) -> torch.Tensor:
    """Copy a tensor into the one that is ``held``, or into a new one where that is of another shape
    or dtype.
    """
    if held is None or (held.shape, held.dtype) != (source.shape, source.dtype):
        held = torch.empty(source.shape, dtype=source.dtype)
    return held.copy_(source)


class _Planner(dcp.DefaultSavePlanner):
    """Write copies in place of a state's tensors, or weights that are each read as they are
    written.
    """

    def __init__(self, read: Read | None) -> None:
        super().__init__()
        self.read = read
        self.copies: Copies | None = None

    def lookup_object(self, index: MetadataIndex) -> Any:
        return (
            super().lookup_object(index)
            if self.read is None
            else self.read(index.fqn.removeprefix("model."))
        )

    def resolve_data(self, write_item: WriteItem) -> Any:
        return (
            super().resolve_data(write_item)
            if self.copies is None
            else self.copies[write_item.index]
        )


@contextmanager
def _refused(folder: Path, fix: Callable[[], str]) -> Iterator[None]:
    """Turn what this rank finds amid a save into a CheckpointError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        rank = dist.get_rank() if dist.is_initialized() else 0
        found = f"cannot write {folder}: rank {rank} found {type(error).__name__}: {error}"
        raise CheckpointError(f"{found}; {fix()}") from error


def read_shards(folder: Path, state: State, metadata: Metadata) -> None:
    """Read into the tensors of ``state``, whatever the sharding of the writers.

    Collective; raises CheckpointError on every rank.
    """
    try:
        with warnings.catch_warnings():
            # A single process without a process group is supported here.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(state, storage_reader=_Reader(folder, metadata), planner=_TensorPlanner())
    except CheckpointException as error:  # the tracebacks of all ranks that failed
        rank, (cause, _) = min(error.failures.items())
        if isinstance(cause, (UserError, SystemExit, KeyboardInterrupt)):
            raise cause from error
        found = f"rank {rank} found {type(cause).__name__}: {cause}"
        raise CheckpointError(f"cannot load {folder}: {found}") from error


def files_read(state: State, metadata: Metadata) -> set[str]:
    """Return which files ``read_shards`` reads here."""
    planner = _TensorPlanner()
    planner.set_up_planner(state, metadata)
    return {
        metadata.storage_data[item.storage_index].relative_path
        for item in planner.create_local_plan().items
    }


def read_metadata(folder: Path, manifest: Manifest) -> Metadata:
    """Read DCP's table of tensors without executing code that it may contain.

    Raises CheckpointError: it is unreadable, asks for a class outside the list above, names a file
    outside the manifest, or none for some tensor.
    """
    path, written = folder / METADATA, sum(size for size, _ in manifest.files.values())
    if METADATA not in manifest.files:
        raise CheckpointError(
            f"{folder} lists no {METADATA} in its manifest; load another checkpoint"
        )
    try:
        with path.open("rb") as file:
            metadata = _DataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{path} holds no table of tensors; load another checkpoint")
        entries, places = metadata.state_dict_metadata.values(), metadata.storage_data.values()
        kinds = {type(entry) for entry in entries}
        files = {str(place.relative_path) for place in places}
        mapped = {
            place.fqn for place in metadata.storage_data
        } >= metadata.state_dict_metadata.keys()
        numbers = [number for place in places for number in (place.offset, place.length)]
        tensors = [entry for entry in entries if isinstance(entry, TensorStorageMetadata)]
        possible = all(
            map(is_count, [*numbers, *(length for entry in tensors for length in entry.size)])
        )
        possible &= (
            max((e.size.numel() * e.properties.dtype.itemsize for e in tensors), default=0)
            <= written
        )
    except CheckpointError:
        raise
    except Exception as error:
        # A corrupt pickle can raise nearly anything.
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {error}); load another one"
        ) from error
    if kinds - {TensorStorageMetadata}:
        raise CheckpointError(
            f"{path} holds objects besides tensors, which could run code when read; do not trust it"
        )
    if files - manifest.files.keys():
        raise CheckpointError(
            f"{path} points at {min(files - manifest.files.keys())!r}, not a file of the checkpoint"
        )
    if not possible:
        raise CheckpointError(
            f"{path} has tensors larger than its files, or places in no file; load another checkpoint"
        )
    if not mapped:
        raise CheckpointError(
            f"{path} does not say where all of its tensors lie; load another checkpoint"
        )
    return metadata


def compare_tensors(folder: Path, state: State, metadata: Metadata, *, exact_dtype: bool) -> None:
    """Compare names, shapes and (``exact_dtype``) dtypes of ``state`` with a checkpoint's.
    Collective.

    A wider dtype than the checkpoint's holds the same values, as with weights that were imported in
    bfloat16. Raises CheckpointError naming the first few tensors that differ, on every rank.
    """

    def surplus() -> set[str]:
        wanted = {
            f"{part}.{name}": value
            for part, values in state.items()
            for name, value in values.items()
        }
        problems = []
        for name, value in wanted.items():
            stored = metadata.state_dict_metadata.get(name)
            if not isinstance(stored, TensorStorageMetadata):
                problems.append(f"{name} is missing")
            elif stored.size != value.shape:
                problems.append(
                    f"{name} has shape {list(stored.size)} instead of {list(value.shape)}"
                )
            elif (
                exact_dtype
                and torch.promote_types(stored.properties.dtype, value.dtype) != value.dtype
            ):
                problems.append(f"{name} is {stored.properties.dtype} instead of {value.dtype}")
        _refuse(folder, problems)
        parts = tuple(f"{part}." for part in state)
        return {
            name for name in metadata.state_dict_metadata if name.startswith(parts)
        } - wanted.keys()

    # Ranks may hold different parts of the model; only what no rank wants is surplus.
    unwanted = set.intersection(*gather_results(surplus))
    _refuse(folder, [f"{name} is too many" for name in sorted(unwanted)])


def _refuse(folder: Path, problems: list[str]) -> None:
    if problems:
        raise CheckpointError(f"{folder} does not fit this model: {first_few(problems)}")


def _member(kind: Any, name: str) -> Any:
    """Return a member of an enumeration, which Python 3.11.2 (Debian's) pickles as getattr and its
    arguments.
    """
    if not (isinstance(kind, EnumType) and name in kind.__members__):
        raise CheckpointError(
            f"its {METADATA} asks for {name} of {kind}, which no checkpoint needs; do not trust it"
        )
    return kind[name]


class _DataUnpickler(pickle.Unpickler):
    """Unpickle only DCP's own tables; see "Restricting Globals" in the documentation of pickle."""

    def find_class(self, module: str, name: str) -> Any:
        kind = vars(dcp.metadata).get(name) if module == dcp.metadata.__name__ else None
        dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if (
            dtype
            or (module, name) in _DATA_CLASSES
            or is_dataclass(kind)
            or isinstance(kind, EnumType)
        ):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise CheckpointError(
            f"its {METADATA} asks for {module}.{name}, which no checkpoint needs; do not trust it"
        )


class _Reader(dcp.FileSystemReader):
    """Read shards by a table that is checked already, instead of unpickling it again unchecked."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self.checked = metadata

    # No **kwargs: with them DCP would try rank-local tables.
    def read_metadata(self) -> Metadata:
        return self.checked


class _TensorPlanner(dcp.DefaultLoadPlanner):
    """Refuse to unpickle objects, which DCP does with weights_only=False."""

    def load_bytes(self, read_item: Any, value: IO[bytes]) -> None:
        raise CheckpointError(
            f"{read_item.dest_index.fqn} is not a tensor; a checkpoint holds tensors only"
        )
