"""Compare a sharded model with the same model in one process: losses, and the gradients of every module."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kernels.loss import cross_entropy_sum
from parallel.transformers.batch import IGNORED, Batch
from runtime.errors import UserError


class Row(NamedTuple):
    """A module's gradients: the largest difference of an element, over the largest element in one process."""

    module: str
    parameters: int
    error: float


class Report(NamedTuple):
    """Losses of both, and a row per module, the same on every rank."""

    sharded: float
    one_process: float
    rows: list[Row]

    @property
    def worst(self) -> float:
        """Return the largest relative difference of the loss and the gradients."""
        loss = abs(self.sharded - self.one_process) / abs(self.one_process)
        return max([loss, *(row.error for row in self.rows)])

    def __str__(self) -> str:
        width = max(len(row.module) for row in self.rows)
        lines = [f"{'module':{width}}  parameters  gradients differ by"]
        lines += [f"{row.module:{width}}  {row.parameters:10}  {row.error:.1e}" for row in self.rows]
        return "\n".join([*lines, f"loss {self.sharded:.12g}, in one process {self.one_process:.12g}"])


def compare(
    model: nn.Module, batch: Batch, group: dist.ProcessGroup | None, paused: Callable[[], AbstractContextManager[None]]
) -> Report:
    """Do as ``Sharded.check``; within ``paused()`` the model has its own attention."""
    named = {name: x for name, x in model.named_parameters() if x.requires_grad}
    if any(hasattr(x, "full_tensor") for x in named.values()):
        raise UserError("the model's weights are sharded; compare before fully_shard, which changes no number")
    count = (batch.whole.tokens["labels"] != IGNORED).sum()
    mine = _gradients(model, named, [(batch.inputs, batch.labels)], count)
    alone = [torch.zeros_like(x) for x in mine]
    if group is None or dist.get_rank(group) == 0:
        with paused():
            alone = _gradients(model, named, list(_documents(batch)), count)
    for x, y in zip(mine, alone, strict=True) if group is not None else ():
        dist.all_reduce(x, group=group)
        dist.broadcast(y, group=group, group_src=0)
    return Report(float(mine[0]), float(alone[0]), _rows(list(named), mine[1:], alone[1:]))


def _documents(batch: Batch) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Yield the inputs and labels of each document alone."""
    for a, b in pairwise(batch.whole.bounds):
        inputs: dict[str, Any] = {name: x[:, a:b] for name, x in batch.whole.tokens.items()}
        labels = inputs.pop("labels")
        yield {**inputs, "use_cache": False}, labels


def _gradients(
    model: nn.Module, named: Mapping[str, Tensor], parts: list[tuple[dict[str, Any], Tensor]], count: Tensor
) -> list[Tensor]:
    """Return the loss, summed over parts, and the gradient of each parameter."""
    found: list[Tensor] = []
    for inputs, labels in parts:
        total, _ = cross_entropy_sum(model(**inputs).logits, labels)
        total = total / count
        gradients = torch.autograd.grad(total, list(named.values()), allow_unused=True)
        filled = (torch.zeros_like(x) if g is None else g for x, g in zip(named.values(), gradients, strict=True))
        new = [total.detach(), *filled]
        found = [a + b for a, b in zip(found, new, strict=True)] if found else new
    return found


def _rows(names: list[str], mine: list[Tensor], alone: list[Tensor]) -> list[Row]:
    rows: dict[str, Row] = {}
    for name, x, y in zip(names, mine, alone, strict=True):
        module = name.rpartition(".")[0]
        scale = float(y.abs().max()) or 1.0
        before = rows.get(module, Row(module, 0, 0.0))
        error = max(before.error, float((x - y).abs().max()) / scale)
        rows[module] = Row(module, before.parameters + x.numel(), error)
    return list(rows.values())
