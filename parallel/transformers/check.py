"""Compare a sharded model with the same model in one process: losses, and the gradients of every
module.

Both are held against the model in float64, which tells what the ranks do from what its dtype does.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from copy import deepcopy
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from kernels.loss import cross_entropy_sum
from parallel.transformers.batch import IGNORED, Batch
from parallel.transformers.probe import evaluating
from runtime.errors import UserError

LIMIT = 10.0
"""Ranks of a right model may be so many times as far from float64 as one process.

Nine families of tiny models in float32 and bfloat16 were up to 2.3 times; with wrong positions,
windows or documents 25 and more, but where bfloat16 hid them.
"""
ROUNDINGS = 1e3
"""Errors of so many roundings are right in float32 and float64: one process may be exact by chance,
and no measure.
"""
LEAST = 1e-6
"""Least scale of a tensor's gradient, over the largest element of all: biases of keys may have none
but rounding.
"""


class Wide(TorchFunctionMode):
    """Compute in float64 where models of transformers ask for float32, as in norms, whatever their
    dtype.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function with float64 in the place of float32."""

        def widened(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(widened, args), **{name: widened(x) for name, x in (kwargs or {}).items()})


class Row(NamedTuple):
    """A module's gradients against float64: the largest error of an element, over the largest
    element.
    """

    module: str
    parameters: int
    ranks: float
    one_process: float


class Report(NamedTuple):
    """Losses, and a row per module, the same on every rank."""

    sharded: float
    one_process: float
    float64: float
    rounding: float
    """The least error that the model's dtype makes."""
    rows: list[Row]

    def times(self, row: Row) -> float:
        """Return how many times as far from float64 as one process the ranks are, in this module or
        a usual one.
        """
        usual = median(row.one_process for row in self.rows)
        return row.ranks / max(row.one_process, usual, self.rounding)

    def wrong(self, row: Row) -> bool:
        """Return True if the ranks are so far off in this module that rounding is not the reason."""
        return not (self.times(row) <= LIMIT or row.ranks + 0 * row.one_process <= self._enough)

    @property
    def _enough(self) -> float:
        return ROUNDINGS * self.rounding if self.rounding <= torch.finfo(torch.float32).eps else 0.0

    @property
    def _all(self) -> list[Row]:
        losses = (
            abs(x - self.float64) / abs(self.float64) for x in (self.sharded, self.one_process)
        )
        return [Row("loss", 0, *losses), *self.rows]

    @property
    def worst(self) -> float:
        """Return the largest such number of the loss and the modules; not a number if one of them
        is none.
        """
        return float(torch.tensor([self.times(row) for row in self._all]).max())

    @property
    def right(self) -> bool:
        """Return True if the ranks do as one process, up to rounding."""
        return not any(map(self.wrong, self._all))

    def __str__(self) -> str:
        width = max(len(row.module) for row in self.rows)
        lines = [f"{'module':{width}}  parameters    ranks  one process"]
        for row in self.rows:
            mark = "  wrong" if self.wrong(row) else ""
            lines.append(
                f"{row.module:{width}}  {row.parameters:10}  {row.ranks:.1e}      {row.one_process:.1e}{mark}"
            )
        losses = f"loss {self.sharded:.12g} on the ranks, {self.one_process:.12g} in one process, {self.float64:.12g}"
        lines.append(f"{losses} in float64")
        times = f"the ranks are up to {self.worst:.3g} times as far from float64 as one process"
        limit = f"{LIMIT:.0f} is the limit"
        small = f"; {limit} for errors above {self._enough:.1e}" if self.worst > LIMIT else ""
        lines.append(f"right: {times}{small}" if self.right else f"wrong: {times}, and {limit}")
        return "\n".join(lines)


def compare(
    model: nn.Module,
    batch: Batch,
    group: dist.ProcessGroup | None,
    paused: Callable[[], AbstractContextManager[None]],
) -> Report:
    """Do as ``Sharded.check``; within ``paused()`` the model has its own attention."""
    model = model.module if isinstance(model, DistributedDataParallel) else model
    named = _trained(model)
    if not named:
        raise UserError(
            "no parameter of the model is trained, so it has no gradients; check before they are frozen"
        )
    if any(hasattr(x, "full_tensor") for x in named.values()):
        raise UserError(
            "the model's weights are sharded; compare before fully_shard, which changes no number"
        )
    if quantised := [name for name, x in model.named_parameters() if not x.is_floating_point()]:
        raise UserError(
            f"{quantised[0]} is quantised, and has no copy in float64; compare the model as it was before"
        )
    count = (batch.whole.tokens["labels"] != IGNORED).sum()
    if not count:
        raise UserError("the batch has no labels, so no loss; give labels to cp.batch")
    with evaluating(model), torch.enable_grad():
        mine = _gradients(model, named, [(batch.inputs, batch.labels)], count)
        for x in mine if group is not None else ():
            dist.all_reduce(x, group=group)
        found = torch.zeros(len(mine), 3, dtype=torch.float64, device=mine[0].device)
        failed: list[str | None] = [None]
        if group is None or dist.get_rank(group) == 0:
            try:
                with paused():
                    alone = _gradients(model, named, list(_documents(batch)), count)
                    exact = deepcopy(model).double()
                    with Wide():
                        truth = _gradients(exact, _trained(exact), list(_documents(batch)), count)
                found.copy_(_errors(mine, alone, truth))
            except Exception as error:  # such as no memory: the other ranks would wait for this one
                failed = [f"{type(error).__name__}: {error}"]
    if group is not None:
        dist.broadcast_object_list(failed, group=group, group_src=0, device=found.device)
        dist.broadcast(found, group=group, group_src=0)
    if failed[0]:
        raise UserError(
            f"the group's rank 0 could not compute the model alone, {failed[0]}; where memory is short, give fewer "
            "tokens or check the model with fewer layers"
        )
    rounding = max(torch.finfo(x.dtype).eps for x in named.values())
    sharded, one_process, exactly = found[0].tolist()
    return Report(
        sharded, one_process, exactly, max(rounding, 1e-13), _rows(named, found[1:].tolist())
    )


def _trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: x for name, x in model.named_parameters() if x.requires_grad}


def _documents(batch: Batch) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Yield the inputs and labels of each document alone."""
    for a, b in pairwise(batch.whole.bounds):
        inputs: dict[str, Any] = {name: x[:, a:b] for name, x in batch.whole.tokens.items()}
        labels = inputs.pop("labels")
        positions = inputs["position_ids"]
        if torch.equal(
            positions[0] - batch.whole.first, torch.arange(b - a, device=positions.device)
        ):
            del inputs["position_ids"]  # the model knows its own, and ours may be wrong
        yield {**inputs, "use_cache": False}, labels


def _gradients(
    model: nn.Module,
    named: Mapping[str, Tensor],
    parts: list[tuple[dict[str, Any], Tensor]],
    count: Tensor,
) -> list[Tensor]:
    """Return the loss, summed over parts, and the gradient of each parameter."""
    found: list[Tensor] = []
    for inputs, labels in parts:
        total, _ = cross_entropy_sum(model(**inputs).logits, labels)
        total = total / count
        gradients = torch.autograd.grad(total, list(named.values()), allow_unused=True)
        filled = (
            torch.zeros_like(x) if g is None else g
            for x, g in zip(named.values(), gradients, strict=True)
        )
        new = [total.detach(), *filled]
        del gradients, filled
        for i, x in enumerate(
            found
        ):  # one at a time, for memory; not in place, where two may be one tensor
            found[i] = new[i] = x + new[i]
        found = new
    return found


def _errors(mine: list[Tensor], alone: list[Tensor], truth: list[Tensor]) -> Tensor:
    """Return the three losses, and for each gradient the errors of the ranks and of one process,
    and 0: ``[P, 3]``.
    """
    least = LEAST * max(float(x.abs().max()) for x in truth[1:])
    rows = [[float(x[0]) for x in (mine, alone, truth)]]
    for x, y, z in zip(mine[1:], alone[1:], truth[1:], strict=True):
        scale = max(float(z.abs().max()), least) or 1.0
        rows.append([*(float((near.double() - z).abs().max()) / scale for near in (x, y)), 0.0])
    return torch.tensor(rows, dtype=torch.float64)


def _rows(named: Mapping[str, Tensor], errors: list[list[float]]) -> list[Row]:
    """Return a row per module: the largest errors of its parameters, or not a number if one is
    none.
    """
    parts: dict[str, list[tuple[int, list[float]]]] = {}
    for (name, parameter), found in zip(named.items(), errors, strict=True):
        parts.setdefault(name.rpartition(".")[0], []).append((parameter.numel(), found))
    rows = []
    for module, each in parts.items():
        ranks, one_process, _ = (
            torch.tensor([found for _, found in each], dtype=torch.float64).amax(0).tolist()
        )
        rows.append(Row(module, sum(count for count, _ in each), ranks, one_process))
    return rows
