"""Operators with a gradient of their own: recompute policies and torch.compile see a single node each way."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def differentiable(
    name: str,
    tensors: str,
    others: str,
    forward: Callable[..., tuple[Tensor, Tensor]],
    fake: Callable[..., tuple[Tensor, Tensor]],
    backward: Callable[..., Sequence[Tensor | None]],
    *,
    unsaved: str = "",
    saves: Sequence[int] = (),
    owner: Callable[..., object] = lambda *others: None,
) -> None:
    """Register an operator ``(*tensors, *others) -> (out, more)``, and its backward as the operator ``name_backward``.

    Results are made dense, and gradients cast to the dtypes of their inputs. Differentiable once.

    Args:
        name: namespace and name, such as longmesh::delta_rule.
        tensors: types and names of those that have gradients, such as "Tensor q, Tensor? state".
        others: those of the other arguments; ``unsaved``: of the last ones, which the forward alone takes.
        forward: computes the results; ``fake`` returns tensors like them.
        backward: ``(dout, dmore or None, *tensors, *saved results, *others)`` -> the gradient of each tensor, whatever
            that of one that is None.
        saves: which of the two results the backward needs.
        owner: returns, given the others, an object to keep alive until the backward.
    """
    count, end = tensors.count(",") + 1, f"{tensors}, {others}".count(",") + 1
    saved = "".join(f"Tensor saved{index}, " for index in saves)

    def dense(*given: Any) -> tuple[Tensor, Tensor]:
        out, more = forward(*given)
        return out.contiguous(), more.contiguous()

    def gradients(dout: Tensor, dmore: Tensor | None, *given: Any) -> list[Tensor]:
        found = zip(backward(dout, dmore, *given), given[:count], strict=True)
        there = [(dx, x) for dx, x in found if x is not None and dx is not None]
        return [dx.to(x.dtype, memory_format=torch.contiguous_format).contiguous() for dx, x in there]

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.others = inputs[count:end]  # the handle of a plan among them keeps the plan alive
        ctx.unsaved = len(inputs) - end
        ctx.owner = owner(*ctx.others)
        ctx.like = {"size": output[0].shape, "dtype": output[0].dtype, "device": output[0].device}
        ctx.save_for_backward(*inputs[:count], *(output[index] for index in saves))
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, dout: Tensor | None, dmore: Tensor | None) -> tuple[Tensor | None, ...]:
        dout = torch.zeros(**ctx.like) if dout is None else dout
        kept = ctx.saved_tensors  # asked for once: a checkpoint gives them once
        found = iter(reverse(dout, dmore, *kept, *ctx.others))
        into = [None if x is None else next(found) for x in kept[:count]]
        return *into, *[None] * (len(ctx.others) + ctx.unsaved)

    operator = torch.library.custom_op(
        name, dense, mutates_args=(), schema=f"({tensors}, {others}{unsaved}) -> (Tensor, Tensor)"
    )
    operator.register_fake(fake)
    operator.register_autograd(differentiate, setup_context=save)
    reverse: Any = torch.library.custom_op(
        f"{name}_backward",
        gradients,
        mutates_args=(),
        schema=f"(Tensor dout, Tensor? dmore, {tensors}, {saved}{others}) -> Tensor[]",
    )
    reverse.register_fake(lambda _, __, *given: [x.new_empty(x.shape) for x in given[:count] if x is not None])
