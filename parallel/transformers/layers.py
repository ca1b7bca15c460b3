"""Attention, short convolution and delta rule that layers of transformers call in place of their
own.

A forward hands them the ranks and documents of its batch among its keyword arguments, which every
layer passes on. So nothing here is kept between calls, and a layer that is computed again under
checkpointing sees its own batch.

Shapes: B sequences, T local positions, H query heads, K key heads, D and E widths of keys and
values, C channels.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.transformers.masks import disagreement, mask, stated_mask
from runtime.errors import UserError

CONTEXT = "context_parallel"
"""Keyword argument that a forward passes on to its layers: the ContextParallel of its batch."""
NAME = __name__.replace(".", "_")
"""Name of the attention in transformers' registry; a checkout and a written package beside it have
their own.
"""
PROBED = f"{NAME}_probed"
"""Name of the attention while a model is probed, which has masks besides."""
PASSED_ON = {"position_ids", "is_causal", "use_cache", "cache_position"}
"""Keyword arguments that say nothing that the context does not."""
NO_BATCH = (
    "the model was called without its batch; call model(**cp.batch(...).inputs), and generate or call it as it was "
    "within cp.paused()"
)
L2_EPSILON = 1e-6


def refuse(module: nn.Module, reason: str) -> None:
    """Raise UserError about a layer."""
    layer = getattr(module, "layer_idx", None)
    raise UserError(
        f"layer {'' if layer is None else f'{layer}, '}{type(module).__name__}: {reason}"
    )


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute a layer's attention [B, T, H, E], as transformers' AttentionInterface asks for it.

    Args:
        query, key, value: ``[B, H, T, D]``, ``[B, K, T, D]`` and ``[B, K, T, E]``, E at most D.
        sliding_window: keys that a query sees, its own among them.
        s_aux: a score per head in the softmax's denominator, ``[H]``.
        others: the context, and what ``_unfit`` refuses.

    Raises UserError: what these ranks cannot do; the message names the layer and the reason.
    """
    cp = others.pop(CONTEXT, None)
    if reason := _unfit(module, cp, attention_mask, dropout, sliding_window, others):
        refuse(module, reason)
    q, k, v = (
        x.transpose(1, 2).to(value.dtype) for x in (query, key, value)
    )  # [B, T, heads, width]
    if (gap := q.shape[-1] - v.shape[-1]) < 0:
        refuse(module, f"its values are wider ({v.shape[-1]}) than its keys ({q.shape[-1]})")
    if sliding_window == 1:
        return _attend_itself(q, k, v, s_aux, scaling), None
    wide = F.pad(v, (0, gap)) if gap else v
    window = None if sliding_window is None else (sliding_window - 1, 0)
    out = cp.attend(q, k, wide, window=window, sinks=s_aux, scale=scaling)
    return (out[..., : v.shape[-1]] if gap else out), None


def _unfit(
    module: nn.Module,
    cp: Any,
    mask: Any,
    dropout: float,
    window: int | None,
    others: dict[str, Any],
) -> str | None:
    """Return the reason why the ranks cannot compute this attention, if there is one."""
    kinds, number = (
        getattr(getattr(module, "config", None), "layer_types", None),
        getattr(module, "layer_idx", None),
    )
    kind = kinds[number] if kinds and number is not None and number < len(kinds) else None
    given = {name for name, value in others.items() if value is not None and value is not False}
    unknown = sorted(given - PASSED_ON)
    causal = others.get("is_causal")
    reasons = {
        NO_BATCH: cp is None,
        "it has a mask of its own; leave attention_mask out: cp.batch takes it": mask is not None,
        "its attention is not causal": not (
            getattr(module, "is_causal", True) if causal is None else causal
        ),
        f"it soft-caps its scores (softcap {others.get('softcap')}), which no kernel here does": "softcap"
        in unknown,
        f"its attention has dropout {dropout}; set attention_dropout to 0 in the configuration": dropout
        > 0,
        f"its attention is {kind}, which is neither full nor a sliding window": kind is not None
        and kind not in ("full_attention", "sliding_attention"),
        f"its window is {window} keys; give 1 or more, its own token among them": window is not None
        and window < 1,
        "it is a layer with a sliding window and does not say which": kind == "sliding_attention"
        and window is None,
        f"its attention takes {', '.join(unknown)}, which is not known here": bool(unknown),
    }
    return next((reason for reason, found in reasons.items() if found), None)


def attend_masked(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend within a probe, where a layer has its mask: it must say what the arguments of the
    layer say.
    """
    causal = (
        None if attention_mask is not None else is_causal
    )  # a mask takes the place of the argument
    output = attend(
        module, query, key, value, None, sliding_window=sliding_window, is_causal=causal, **others
    )
    if reason := disagreement(attention_mask, sliding_window):
        refuse(module, reason)
    return output


def _attend_itself(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float | None
) -> Tensor:
    """Return the attention [B, T, H, E] of tokens to themselves alone: a window of 1 needs no other
    rank.
    """
    repeats = q.shape[2] // k.shape[2]
    keys = k.repeat_interleave(repeats, 2)
    values = v.repeat_interleave(repeats, 2)
    products = (q * keys).to(torch.promote_types(q.dtype, torch.float32))
    scores = products.sum(-1) * (q.shape[-1] ** -0.5 if scale is None else scale)  # [B, T, H]
    total = scores if sinks is None else torch.logaddexp(scores, sinks.to(scores.dtype))
    return values * (scores - total).exp()[..., None].to(values.dtype)


def convolving(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a ``causal_conv1d_fn`` that goes over the ranks where the forward says so."""

    @wraps(own)
    def convolve(
        hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, **others: Any
    ) -> Tensor:
        """Convolve [B, C, T] with weight [C, taps]."""
        cp = others.pop(CONTEXT, None)
        if cp is None:
            return own(hidden_states, weight, bias, **others)
        out = cp.convolve(hidden_states.transpose(1, 2).to(weight.dtype), weight)
        out = out if bias is None else out + bias
        if activation := others.get("activation"):
            from transformers.activations import ACT2FN

            out = ACT2FN[activation](out)
        return out.transpose(1, 2).to(hidden_states.dtype)

    return convolve


def recurring(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``torch_chunk_gated_delta_rule`` that goes over the ranks where the forward says so."""

    @wraps(own)
    def delta_rule(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **others: Any
    ) -> Any:
        """Return [B, T, H, E] and no state; query and key [B, T, K, D], value [B, T, H, E], g and
        beta [B, T, H].
        """
        cp = others.pop(CONTEXT, None)
        if cp is None:
            return own(query, key, value, g=g, beta=beta, **others)
        scale = query.shape[-1] ** -0.5
        if others.get("use_qk_l2norm_in_kernel"):
            query, key = _normalised(query, scale), _normalised(key)
        else:
            query = query * scale
        return cp.attend_delta(query, key, value, g, beta), None

    return delta_rule


def _normalised(x: Tensor, scale: float = 1.0) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * (scale * torch.rsqrt(wide.square().sum(-1, keepdim=True) + L2_EPSILON))).to(
        x.dtype
    )


STATEFUL = {"causal_conv1d_fn": convolving, "torch_chunk_gated_delta_rule": recurring}
"""Functions that files of models call by these names, and what takes their place."""


def install(model: nn.Module) -> None:
    """Register the attention, and put the functions into the files of the model's layers, where
    they pass on to the file's own for every model but a sharded one."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)
    AttentionInterface.register(PROBED, attend_masked)
    AttentionMaskInterface.register(PROBED, stated_mask)
    for kind in {base for module in model.modules() for base in type(module).__mro__}:
        names = vars(sys.modules.get(kind.__module__, object))
        for name, replace in STATEFUL.items():
            if name in names and not hasattr(names[name], CONTEXT):
                setattr(sys.modules[kind.__module__], name, taking := replace(names[name]))
                setattr(taking, CONTEXT, True)
