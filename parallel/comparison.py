"""Compare a model over ranks with one process: the loss, and the gradients of every module.

Neither the ranks nor one process is exact, so comparing them with each other would need a tolerance
per model and dtype. Both are compared with the model in float64 instead: the ranks are right if
they are about as far from it as one process is, however large this model's rounding errors are.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from statistics import median
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from runtime.errors import UserError

LIMIT = 10.0
"""Factor by which the error of a correct model on the ranks may exceed the error of one process.

Nine families of tiny models in float32 and bfloat16 reached a factor of 2.3; wrong positions,
windows or documents gave 25 and more, unless bfloat16 hid them.
"""
ROUNDINGS = 1e3
"""Error of the ranks, as a multiple of the rounding error, that is always accepted in float32 and
float64. One process may be exact by chance, and then its error is no yardstick.
"""
MIN_SCALE = 1e-6
"""Minimum divisor of a gradient's error, as a fraction of the largest element of all gradients.

Errors are divided by the gradient's own largest element, but a key bias's gradient may be nothing
but rounding errors.
"""

LossTerm: TypeAlias = Callable[[nn.Module], Tensor]
"""Function that maps a model to a term of its loss."""


class Float64Mode(TorchFunctionMode):
    """Computes in float64 wherever a model asks for float32.

    Models of transformers compute norms and rotary positions in float32 for every dtype, so
    ``model.double()`` alone would not be a reference in float64.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function with float64 in place of float32."""

        def replace_dtype(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        if func is torch.Tensor.float:
            func = torch.Tensor.double
        kwargs = {name: replace_dtype(x) for name, x in (kwargs or {}).items()}
        return func(*map(replace_dtype, args), **kwargs)


class ModuleErrors(NamedTuple):
    """Errors of a module's gradients against float64: largest error divided by largest element.

    ``ranks`` is the error of the sharded model, ``one_process`` that of the model by itself.
    """

    module: str
    parameters: int
    ranks: float
    one_process: float


class Report(NamedTuple):
    """Result of a check: three losses, and one row of errors per module; equal on every rank."""

    sharded: float
    one_process: float
    float64: float
    rounding: float
    """Relative rounding error of the model's dtype."""
    rows: list[ModuleErrors]

    def times(self, row: ModuleErrors) -> float:
        """Return the ratio of the ranks' error to one process's error for a module.

        The error of one process is its error in this module or, if larger, in the median module,
        because in a single module it may be exact by chance.
        """
        typical_error = median(other.one_process for other in self.rows)
        return row.ranks / max(row.one_process, typical_error, self.rounding)

    def wrong(self, row: ModuleErrors) -> bool:
        """Return True if rounding does not explain the ranks' error in this module."""
        # Written with `not` and `+ 0 *` so that NaN in either error is wrong.
        within_limit = self.times(row) <= LIMIT
        return not (within_limit or row.ranks + 0 * row.one_process <= self._negligible_error)

    @property
    def _negligible_error(self) -> float:
        if self.rounding <= torch.finfo(torch.float32).eps:
            return ROUNDINGS * self.rounding
        return 0.0

    @property
    def _all_rows(self) -> list[ModuleErrors]:
        sharded_error = abs(self.sharded - self.float64) / abs(self.float64)
        process_error = abs(self.one_process - self.float64) / abs(self.float64)
        return [ModuleErrors("loss", 0, sharded_error, process_error), *self.rows]

    @property
    def worst(self) -> float:
        """The largest ratio ``times`` over the loss and all modules; NaN if any of them is NaN."""
        return float(torch.tensor([self.times(row) for row in self._all_rows]).max())

    @property
    def right(self) -> bool:
        """True if the ranks compute the same as one process, up to rounding."""
        return not any(map(self.wrong, self._all_rows))

    def __str__(self) -> str:
        width = max(len(row.module) for row in self.rows)
        lines = [f"{'module':{width}}  parameters    ranks  one process"]
        for row in self.rows:
            mark = "  wrong" if self.wrong(row) else ""
            errors = f"{row.ranks:.1e}      {row.one_process:.1e}"
            lines.append(f"{row.module:{width}}  {row.parameters:10}  {errors}{mark}")
        lines.append(
            f"loss {self.sharded:.12g} on the ranks, {self.one_process:.12g} in one process, "
            f"{self.float64:.12g} in float64"
        )

        verdict = f"the ranks are up to {self.worst:.3g} times as far from float64 as one process"
        limit = f"{LIMIT:.0f} is the limit"
        if not self.right:
            lines.append(f"wrong: {verdict}, and {limit}")
        elif self.worst > LIMIT:
            lines.append(f"right: {verdict}; {limit} for errors above {self._negligible_error:.1e}")
        else:
            lines.append(f"right: {verdict}")
        return "\n".join(lines)


def compare_losses(
    model: nn.Module,
    group: dist.ProcessGroup | None,
    paused: Callable[[], AbstractContextManager[None]],
    *,
    sharded: Sequence[LossTerm],
    one_process: Sequence[LossTerm],
    exact: Sequence[LossTerm],
) -> Report:
    """Compare sums of losses and their gradients: over ranks, in one process, and in float64.

    Args:
        paused: a context in which the model computes in one process.
        sharded: terms of a rank's share of the loss; the ranks' shares add up to the loss.
        one_process: terms of the whole loss.
        exact: terms of the whole loss, for a copy of the model in float64.
    """
    model = model.module if isinstance(model, DistributedDataParallel) else model
    parameters = _trained(model)
    _check_comparable(model, parameters)

    with evaluating(model), torch.enable_grad():
        on_ranks = _gradients(model, parameters, sharded)
        if group is not None:
            for x in on_ranks:
                dist.all_reduce(x, group=group)

        errors = torch.zeros(len(on_ranks), 3, dtype=torch.float64, device=on_ranks[0].device)
        failure: list[str | None] = [None]
        if group is None or dist.get_rank(group) == 0:
            try:
                with paused():
                    alone = _gradients(model, parameters, one_process)
                    exact_model = deepcopy(model).double()
                    with Float64Mode():
                        reference = _gradients(exact_model, _trained(exact_model), exact)
                errors.copy_(_errors(on_ranks, alone, reference))
            except Exception as error:  # raised later: the other ranks wait for this one
                failure = [f"{type(error).__name__}: {error}"]

    if group is not None:
        dist.broadcast_object_list(failure, group=group, group_src=0, device=errors.device)
        dist.broadcast(errors, group=group, group_src=0)
    if failure[0]:
        raise UserError(
            f"the group's rank 0 could not run the model by itself ({failure[0]}); if memory is "
            "short, give fewer tokens, or check the model with fewer layers"
        )
    rounding = max(torch.finfo(x.dtype).eps for x in parameters.values())
    loss_sharded, loss_alone, loss_float64 = errors[0].tolist()
    rows = _rows_by_module(parameters, errors[1:].tolist())
    return Report(loss_sharded, loss_alone, loss_float64, max(rounding, 1e-13), rows)


def _check_comparable(model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
    """Raise UserError if the model has no gradients, or one process cannot copy it in float64."""
    if not parameters:
        raise UserError(
            "no parameter of the model is trained, so there are no gradients to compare; call "
            "check before the parameters are frozen"
        )
    if any(hasattr(x, "full_tensor") for x in parameters.values()):
        raise UserError(
            "the model's weights are sharded, but one process needs all of them; call check before "
            "fully_shard, which does not change the results"
        )
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            raise UserError(
                f"{name} is quantised, so it has no copy in float64; call check before the model "
                "is quantised"
            )


def _trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: x for name, x in model.named_parameters() if x.requires_grad}


def _gradients(
    model: nn.Module, parameters: Mapping[str, Tensor], terms_of_loss: Sequence[LossTerm]
) -> list[Tensor]:
    """Return the sum of the loss's terms, and the gradient of each parameter."""
    sums: list[Tensor] = []
    for term in terms_of_loss:
        loss = term(model)
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)

        terms = [loss.detach()]
        for parameter, gradient in zip(parameters.values(), gradients, strict=True):
            terms.append(torch.zeros_like(parameter) if gradient is None else gradient)
        del gradients, gradient  # the sums below replace them

        # Added one at a time to save memory, but not in place, since autograd may return a tensor
        # twice.
        for i, x in enumerate(sums):
            sums[i] = terms[i] = x + terms[i]
        sums = terms
    return sums


def _errors(sharded: list[Tensor], one_process: list[Tensor], exact: list[Tensor]) -> Tensor:
    """Return the three losses, then a row (ranks, one process, 0) per gradient: ``[1 + P, 3]``."""
    min_scale = MIN_SCALE * max(float(x.abs().max()) for x in exact[1:])
    rows = [[float(sharded[0]), float(one_process[0]), float(exact[0])]]
    for x, y, reference in zip(sharded[1:], one_process[1:], exact[1:], strict=True):
        scale = max(float(reference.abs().max()), min_scale) or 1.0
        ranks_error = float((x.double() - reference).abs().max()) / scale
        process_error = float((y.double() - reference).abs().max()) / scale
        rows.append([ranks_error, process_error, 0.0])
    return torch.tensor(rows, dtype=torch.float64)


def _rows_by_module(
    parameters: Mapping[str, Tensor], errors: list[list[float]]
) -> list[ModuleErrors]:
    """Return one row per module: the largest errors of its parameters, NaN if any error is NaN."""
    counts: dict[str, int] = {}
    errors_of: dict[str, list[list[float]]] = {}
    for (name, parameter), parameter_errors in zip(parameters.items(), errors, strict=True):
        module = name.rpartition(".")[0]
        counts[module] = counts.get(module, 0) + parameter.numel()
        errors_of.setdefault(module, []).append(parameter_errors)

    rows = []
    for module, module_errors in errors_of.items():
        # Use tensor.amax, since Python's max() drops NaN.
        ranks, one_process, _ = torch.tensor(module_errors, dtype=torch.float64).amax(0).tolist()
        rows.append(ModuleErrors(module, counts[module], ranks, one_process))
    return rows


def mean_loss(
    loss_sum: Tensor,
    valid: Tensor | int,
    world: dist.ProcessGroup | None,
    count: Tensor | int | None = None,
) -> Tensor:
    """Return the mean of all ranks' terms; its gradients are to be averaged over ``world``.

    Args:
        loss_sum: sum of this rank's terms.
        valid: number of this rank's terms.
        count: number by which to divide, by default that of all ranks' terms.
    """
    local_valid = torch.as_tensor(valid, dtype=torch.float64, device=loss_sum.device)
    sums = torch.stack([loss_sum.detach().double(), local_valid])
    world_size = 1
    if world is not None:
        dist.all_reduce(sums, group=world)
        world_size = dist.get_world_size(world)
    if count is None:
        terms = sums[1].clamp(min=1)
    else:
        terms = torch.as_tensor(count, device=sums.device).double()

    # The gradient is that of this rank's share, times the number of ranks over which it will be
    # averaged; the value is the global mean.
    share = loss_sum * (world_size / terms).to(loss_sum.dtype)
    return share - share.detach() + (sums[0] / terms).to(loss_sum.dtype)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set the model to evaluation mode until the block ends; restore each module's own mode."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
