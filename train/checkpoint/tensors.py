"""Name the tensors of a run, and read them with torch.distributed.checkpoint (DCP).

Names are those of the plain, single-device model, whatever wraps or shards it, so that a checkpoint
loads on any mesh. DCP writes and reads the live tensors in place, without a cast or a second copy.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from runtime.errors import UserError, first_few
from runtime.together import gather_results
from train.checkpoint.manifest import CheckpointError

State = dict[str, dict[str, torch.Tensor]]
Model = nn.Module | Sequence[nn.Module]
"""A model, or the parts of it that a rank holds, with parameter names as in the whole model."""


def _parts(model: Model) -> Sequence[nn.Module]:
    return [model] if isinstance(model, nn.Module) else model


def tensors_of(
    model: Model, optimizer: torch.optim.Optimizer | None, *, create: bool = False
) -> State:
    """Return a run's tensors, keyed by section ("model" or "optimizer") and then by name.

    The optimizer's tensors are moments and step counts. Names are the plain model's parameter
    names. These are the live tensors (DTensors if sharded), not copies.
    (``set_optimizer_state_dict`` would cast float32 moments to bf16 parameters.)

    Args:
        optimizer: None leaves out the "optimizer" section.
        create: create the (zero) state of an optimizer that has not stepped, to read into.
    """
    # Weights first: an evaluation may have left FSDP modules unsharded, and this reshards them.
    state: State = {"model": {}}
    for part in _parts(model):
        state["model"] |= get_model_state_dict(part)  # type: ignore[arg-type]

    if optimizer is not None:
        if create:
            _step_without_effect(optimizer)
        state["optimizer"] = {}
        for part in _parts(model):
            for name, parameter in part.named_parameters():
                for key, value in optimizer.state.get(parameter, {}).items():
                    state["optimizer"][f"state.{name}.{key}"] = value
        if torch.cuda.is_initialized():  # copies of moments to host memory may be in flight
            torch.cuda.synchronize()

    for section, values in state.items():
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and not value.is_meta:
                continue
            kind = f"a {type(value).__name__}"
            if isinstance(value, torch.Tensor):
                kind = "a meta tensor"
            raise CheckpointError(
                f"{section} state {name} is {kind}, but a checkpoint holds only tensors with data"
            )
    return state


def _step_without_effect(optimizer: torch.optim.Optimizer) -> None:
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


@torch.no_grad()
def spread_copies(model: Model, optimizer: torch.optim.Optimizer | None) -> None:
    """Copy a tied parameter and its moments from the last part that holds it to the others.

    DCP reads a name into one tensor, that of the last part. A rank holds two copies if it has the
    first stage of a pipeline and the last, as with virtual stages.
    """
    loaded: dict[str, nn.Parameter] = {}
    for part in _parts(model):
        loaded.update(part.named_parameters())

    for part in _parts(model):
        for name, parameter in part.named_parameters():
            source = loaded[name]
            if parameter is source:
                continue
            parameter.copy_(source)
            if optimizer is not None:
                for key, value in optimizer.state.get(source, {}).items():
                    optimizer.state[parameter][key].copy_(value)


def read_shards(folder: Path, state: State, metadata: Metadata) -> None:
    """Read a checkpoint into the tensors of ``state``, however its writers sharded them.

    Collective; raises CheckpointError on every rank if a tensor cannot be read.
    """
    try:
        with warnings.catch_warnings():
            # A single process without a process group is supported here.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(state, storage_reader=_Reader(folder, metadata), planner=_TensorPlanner())
    except CheckpointException as error:  # has the tracebacks of all ranks that failed
        rank, (cause, _) = min(error.failures.items())
        if isinstance(cause, (UserError, SystemExit, KeyboardInterrupt)):
            raise cause from error
        problem = f"rank {rank} found {type(cause).__name__}: {cause}"
        raise CheckpointError(
            f"cannot load {folder}: {problem}; correct that, or load another checkpoint"
        ) from error


def files_read(state: State, metadata: Metadata) -> set[str]:
    """Return the names of the files that ``read_shards`` reads on this rank."""
    planner = _TensorPlanner()
    planner.set_up_planner(state, metadata)
    files = set()
    for item in planner.create_local_plan().items:
        files.add(metadata.storage_data[item.storage_index].relative_path)
    return files


def compare_tensors(folder: Path, state: State, metadata: Metadata, *, exact_dtype: bool) -> None:
    """Compare names, shapes and (``exact_dtype``) dtypes of ``state`` with a checkpoint's.

    Collective. A dtype may be wider than the checkpoint's, since it holds the same values: weights
    may be imported in bfloat16 and trained in float32. Raises CheckpointError, on every rank, with
    the first few tensors that differ.
    """

    def find_surplus() -> set[str]:
        """Check this rank's tensors; return the names in the checkpoint that it does not have."""
        problems = []
        names = set()
        for section, values in state.items():
            for key, value in values.items():
                name = f"{section}.{key}"
                names.add(name)
                stored = metadata.state_dict_metadata.get(name)
                problem = _difference(stored, value, exact_dtype=exact_dtype)
                if problem:
                    problems.append(f"{name} {problem}")
        _raise_if_any(folder, problems)

        sections = tuple(f"{section}." for section in state)
        stored_names = set(metadata.state_dict_metadata)
        return {name for name in stored_names - names if name.startswith(sections)}

    # Ranks may hold different parts of the model: a tensor is surplus if no rank has it.
    surplus = set.intersection(*gather_results(find_surplus))
    _raise_if_any(folder, [f"{name} is not in this run" for name in sorted(surplus)])


def _difference(stored: Any, value: torch.Tensor, *, exact_dtype: bool) -> str:
    """Return the difference between a tensor and the entry of the checkpoint; empty if none."""
    if not isinstance(stored, TensorStorageMetadata):
        return "is not in the checkpoint"
    if stored.size != value.shape:
        return f"has shape {list(stored.size)} instead of {list(value.shape)}"
    dtype = stored.properties.dtype
    if exact_dtype and dtype != value.dtype and not _is_wider(value.dtype, dtype):
        return f"is {dtype} instead of {value.dtype}"
    return ""


def _is_wider(dtype: torch.dtype, stored: torch.dtype) -> bool:
    """Return True if a dtype holds every number of the stored one; numbers of 8 bits are codes."""
    if 1 in (dtype.itemsize, stored.itemsize):
        return False
    return torch.promote_types(dtype, stored) == dtype


def _raise_if_any(folder: Path, problems: list[str]) -> None:
    if problems:
        raise CheckpointError(
            f"{folder} does not fit this model: {first_few(problems)}; load another checkpoint"
        )


class _Reader(dcp.FileSystemReader):
    """Reads shards with the checked table of tensors; DCP would unpickle it again, unchecked."""

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
            f"{read_item.dest_index.fqn} is not a tensor, but a checkpoint holds only tensors"
        )
