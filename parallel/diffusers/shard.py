"""Shard the clips of a diffusion transformer: whole latents in, the whole prediction out.

Every rank of the group passes the same latents, noise, timestep and text, gets the whole
prediction, and computes any loss from it. Gradients are averaged over all ranks, as DDP and FSDP
do. This is exact, because the backward of all communication is its adjoint: autograd on rank r
gives the gradient of the sum of all ranks' losses with respect to r's copy of a parameter, and the
mean of these gradients is that of the mean loss, whether a parameter comes before or after the cut.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.comparison import Report, mean_loss
from parallel.context import ContextParallel, context_parallel
from parallel.context.methods import METHODS, method_of
from parallel.diffusers.check import Objective, compare
from parallel.diffusers.families import FAMILIES, Family
from parallel.diffusers.hooks import COMPILED, Hooks, is_compiled, unwrapped
from parallel.diffusers.inputs import send_first
from parallel.diffusers.noise import noise_like
from parallel.diffusers.packing import PackedForward
from runtime.errors import UserError

OF_FORWARDS = {
    "causal": "the attention of these models is full",
    "documents": "padded text is read from the model's mask",
    "layout": "under full attention all layouts divide the work equally, so tokens stay in order",
    "seq_len": "clips may have any number of tokens",
    "window": "the attention of these models is full",
}
"""Options of ``context_parallel`` that ``shard`` refuses, each with the reason."""
SHARDED: WeakSet[nn.Module] = WeakSet()
"""Models that are sharded now; sharding one of them again is refused."""


class Sharded:
    """A diffusion transformer whose attention spans the ranks of a group; made by ``shard``."""

    def __init__(
        self,
        model: nn.Module,
        family: Family,
        context: ContextParallel,
        world: dist.ProcessGroup | None,
        packed_context: ContextParallel | None = None,
    ) -> None:
        self.model = model
        self.group = context.group
        self.world = world
        self._family = family
        self._packed_over = lru_cache(maxsize=16)((packed_context or context).over)
        self._hooks = Hooks(model, family, context.group, lru_cache(maxsize=16)(context.over))
        SHARDED.add(model)

    def batch(self, *tensors: Any) -> Any:
        """Return the arguments of the group's rank 0 on every rank of the group. Collective.

        This is for loops in which only one rank of a group loads clips or draws noise. Arguments
        are tensors, or nested lists, tuples and dicts of tensors. Every forward also checks that
        its inputs are equal on all ranks.
        """
        sent = send_first(tensors, self.group)
        return sent if len(sent) > 1 else sent[0]

    def noise_like(self, latents: Tensor, samples: Sequence[int], seed: int = 0) -> Tensor:
        """Return normal noise ``[B, ...]`` that depends only on the seed and the sample numbers."""
        return noise_like(latents, samples, seed)

    def loss(self, loss_sum: Tensor, count: int | Tensor) -> Tensor:
        """Return the mean loss over the elements of all clips, equal on all ranks. Collective.

        Average its gradients over the ranks of ``world``, as DDP and FSDP do. Use it if clips have
        different sizes: a mean of the groups' means would give the elements of a small clip a
        larger weight.

        Args:
            loss_sum: sum of the loss over the elements of the group's clips.
            count: number of these elements.
        """
        size = 1 if self.group is None else dist.get_world_size(self.group)
        return mean_loss(loss_sum / size, torch.as_tensor(count) / size, self.world)

    def packed(
        self, clips: Sequence[Mapping[str, Any]], model: nn.Module | None = None
    ) -> list[Tensor]:
        """Return the predictions for clips of any sizes, packed into one sequence. Collective.

        Each clip attends only to itself and its own text, and is not padded. With the method
        exchange a clip's keys are sent only to ranks that have queries of this clip.

        Args:
            clips: arguments of the model's forward for each clip, a batch of 1 with its own
                timestep.
            model: the sharded model as wrapped, for example by DDP; by default without a wrapper.

        Raises UserError if the model has no modulation per token, or a clip cannot be packed.
        """
        if not self._hooks.active:
            raise UserError(
                "packed is called within paused(), where ranks do not share clips; call it outside"
            )
        forward = PackedForward(self.model, self._family, self._hooks, self._packed_over)
        return forward(model or self.model, clips)

    def gather(self, x: Tensor) -> Tensor:
        """Gather a block's output ``[B, n, C]`` to all image tokens ``[B, I, C]``. Collective.

        Differentiable. It is for losses on features inside the model; call it after a forward.
        """
        split = self._hooks.last_split
        if split is None:
            raise UserError("the model has not run yet; call gather after a forward")
        return split.gather(x)

    def check(self, model: nn.Module, inputs: Mapping[str, Any], objective: Objective) -> Report:
        """Compare losses, and gradients of every module, with the model in one process. Collective.

        Rank 0 of the group, as the one process, runs the model with its own attention, once in the
        model's dtype and once in float64. It holds a copy of the model in float64 and three sets of
        gradients, so give a small clip. The model is not changed.

        Args:
            model: the sharded model, possibly wrapped by peft or DDP.
            inputs: inputs of the objective, equal on the group's ranks.
            objective: function (model, inputs) that returns the loss, without random draws.

        Raises UserError if the model is another one, paused, frozen, sharded or quantised, or too
        large for rank 0's memory.
        """
        if self.model not in model.modules():
            raise UserError(
                "the model given to check is not the one that shard was called with, and does not "
                "contain it; give check the sharded model"
            )
        if not self._hooks.active:
            raise UserError(
                "the model uses its own attention within paused(), so the ranks do not share its "
                "clips; call check outside paused()"
            )
        return compare(model, inputs, objective, self.group, self.paused)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within the context, run the model in this process alone, for example to sample."""
        previous = self._hooks.active
        self._hooks.active = False
        try:
            yield
        finally:
            self._hooks.active = previous

    def remove(self) -> None:
        """Remove the hooks from the model, which can then be sharded again."""
        self._hooks.remove()
        SHARDED.discard(self.model)


def shard(
    model: nn.Module,
    group: dist.ProcessGroup | None = None,
    *,
    method: str = "ulysses",
    world: dist.ProcessGroup | None = None,
    family: Family | None = None,
    **options: Any,
) -> Sharded:
    """Make a diffusion transformer of diffusers attend over a group of ranks that share each clip.

    Collective.

    Args:
        model: a model of a class in ``FAMILIES``, possibly wrapped by peft, DDP or FSDP2.
        group: ranks that share every clip; None means only this process.
        method: name in ``METHODS`` of a method for softmax attention; ulysses needs a number of
            heads that is a multiple of the number of ranks.
        world: group of ranks whose gradients are averaged, by default all processes.
        family: description of a model whose class is not in ``FAMILIES``.
        options: as for ``context_parallel``, except those in ``OF_FORWARDS``.

    Raises UserError if a class, layer or setting is not supported (the message has the reason), if
    the method cannot divide the heads, or if the model is sharded already.
    """
    method_of(method).check_kind("shard", "softmax attention", METHODS)
    for name, reason in OF_FORWARDS.items():
        if name in options:
            raise UserError(f"shard: {name} is {options[name]!r}; leave out {name}: {reason}")

    transformer, family = _transformer(model, family)
    ranks = 1 if group is None else dist.get_world_size(group)
    context = context_parallel(
        method, seq_len=ranks, group=group, causal=False, layout="contiguous", **options
    )
    _check_settings(transformer, family, context)
    if world is None:
        world = dist.group.WORLD  # None if no process group is initialised
    packed_context = None
    if method == "exchange":  # its balanced layout divides the work of packed clips equally
        packed_context = context_parallel(
            method, seq_len=ranks, group=group, causal=False, **options
        )
    return Sharded(transformer, family, context, world, packed_context)


def _transformer(model: nn.Module, family: Family | None) -> tuple[nn.Module, Family]:
    """Return the transformer inside a possibly wrapped model, and its family."""
    for module in model.modules():
        if is_compiled(module):
            raise UserError(f"{type(model).__name__} {COMPILED}")
        if family is not None:
            if {*family.blocks, family.last} <= module._modules.keys():
                return module, family
            continue
        for base in type(module).__mro__:
            if base.__name__ in FAMILIES and base.__module__.startswith("diffusers."):
                return module, FAMILIES[base.__name__]
    raise UserError(
        f"{type(model).__name__} is none of the supported classes: {', '.join(FAMILIES)}; "
        "describe it with family=parallel.diffusers.Family(...), and verify it with cp.check"
    )


def _check_settings(model: nn.Module, family: Family, context: ContextParallel) -> None:
    """Raise UserError for a setting of the model that does not work with shared clips."""
    name = type(model).__name__
    if model in SHARDED:
        raise UserError(
            f"{name} is sharded already; use the result of that call of shard, or call its "
            "remove() and then shard again"
        )
    if getattr(model, "_parallel_config", None) is not None:
        raise UserError(
            f"{name}.enable_parallelism was called, so diffusers already splits the tokens; leave "
            "out that call"
        )
    if getattr(model, "is_cache_enabled", False):
        raise UserError(f"{name} has a cache, which is only for sampling; call disable_cache()")
    for layer, module in model.named_modules():
        if hasattr(module, "_diffusers_hook"):
            raise UserError(
                f"{layer or name} has diffusers hooks (offloading, casting or caches), which "
                "context parallelism does not support; create the model without them"
            )
        if is_compiled(module):
            raise UserError(f"{layer or name} {COMPILED}")
    for blocks in family.blocks:
        for block in getattr(model, blocks):
            for attribute in family.attention:
                heads = getattr(getattr(unwrapped(block), attribute, None), "heads", None)
                if heads is not None:
                    context.plan.geometry.check_heads(heads, heads)
