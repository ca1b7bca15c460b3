"""Attention, short convolution and delta rule over ranks, for transformers layers to call.

The context of a batch (its ranks and documents) is a keyword argument of the model's forward, which
every layer passes on. A module-level variable would be wrong: a layer that gradient checkpointing
recomputes, after the next batch's forward pass, must see its own batch.

Shapes: B sequences, T local positions, H query heads, K key heads, D and E widths of keys and
values, C channels.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.transformers.masks import disagreement, mask, stated_mask
from runtime.errors import UserError
from runtime.tensors import accum_dtype

CONTEXT = "context_parallel"
"""Keyword argument by which the model and its layers receive the batch's ContextParallel."""
NAME = __name__.replace(".", "_")
"""Name of the attention in transformers' registry. The name contains this module's path, so that a
checkout and an installed wheel can be used in one process.
"""
PROBED = f"{NAME}_probed"
"""Name of the attention during a probe, which also checks the layers' masks."""
IGNORED_ARGUMENTS = {
    "position_ids",
    "is_causal",
    "use_cache",
    "cache_position",
    "output_router_logits",
}
"""Keyword arguments of a layer's attention to ignore: the context makes them redundant, or, as the
last, they are for other modules.
"""
NO_BATCH = (
    "the model was called without its batch; call model(**cp.batch(...).inputs), or use "
    "cp.paused() to generate text or to call the unsharded model"
)
L2_EPSILON = 1e-6


def refuse(module: nn.Module, reason: str) -> NoReturn:
    """Raise UserError about a layer, with its name and the reason."""
    title = type(module).__name__
    layer = getattr(module, "layer_idx", None)
    if layer is not None:
        title = f"{layer}, {title}"
    raise UserError(f"layer {title}: {reason}")


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
    """Compute a layer's attention [B, T, H, E]; the signature is AttentionInterface's.

    Args:
        query, key, value: ``[B, H, T, D]``, ``[B, K, T, D]`` and ``[B, K, T, E]``, E at most D.
        sliding_window: number of keys that a query sees, its own included.
        s_aux: a score per head in the softmax's denominator, ``[H]``.
        others: the context, and further arguments, which ``_unsupported`` checks.

    Raises UserError if the ranks cannot compute the attention; the message names the layer and the
    reason.
    """
    cp = others.pop(CONTEXT, None)
    reason = _unsupported(module, cp, attention_mask, dropout, sliding_window, others)
    if reason is not None:
        refuse(module, reason)

    q = query.transpose(1, 2).to(value.dtype)  # [B, T, H, D]
    k = key.transpose(1, 2).to(value.dtype)  # [B, T, K, D]
    v = value.transpose(1, 2)  # [B, T, K, E]
    padding = q.shape[-1] - v.shape[-1]
    if padding < 0:
        refuse(
            module,
            f"its values have {v.shape[-1]} channels, but its keys only {q.shape[-1]}; values must "
            "not be wider than keys",
        )
    if sliding_window == 1:
        return _attend_itself(q, k, v, s_aux, scaling), None

    # The kernels need values that are as wide as the keys.
    padded_v = F.pad(v, (0, padding)) if padding else v  # [B, T, K, D]
    window = None if sliding_window is None else (sliding_window - 1, 0)
    out = cp.attend(q, k, padded_v, window=window, sinks=s_aux, scale=scaling)  # [B, T, H, D]
    if padding:
        out = out[..., : v.shape[-1]]
    return out, None


def _unsupported(
    module: nn.Module,
    cp: Any,
    mask: Any,
    dropout: float,
    window: int | None,
    others: dict[str, Any],
) -> str | None:
    """Return the first reason why the ranks cannot compute this attention; None if they can."""
    kind = _layer_type(module)
    is_causal = others.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    set_names = {name for name, value in others.items() if value is not None and value is not False}
    unknown = sorted(set_names - IGNORED_ARGUMENTS)

    if cp is None:
        return NO_BATCH
    if mask is not None:
        return "it has a mask of its own; give attention_mask to cp.batch instead"
    if not is_causal:
        return "its attention is not causal, but the ranks compute only causal attention"
    if "softcap" in unknown:
        softcap = others.get("softcap")
        return f"it soft-caps its scores (softcap {softcap}), which no kernel here supports"
    if dropout > 0:
        return (
            f"its attention has dropout {dropout}; set attention_dropout to 0 in the configuration"
        )
    if kind not in (None, "full_attention", "sliding_attention"):
        return f"its attention is {kind}, but must be full attention or a sliding window"
    if window is not None and window < 1:
        return f"its window is {window} keys; give 1 or more, since it includes the query's own"
    if kind == "sliding_attention" and window is None:
        return "its attention is a sliding window, but it does not pass the window's size"
    if unknown:
        return f"its attention gets {', '.join(unknown)}, but the ranks do not support that"
    return None


def _layer_type(module: nn.Module) -> str | None:
    """Return the attention type of a layer from its configuration; None if it is not stated."""
    layer_types = getattr(getattr(module, "config", None), "layer_types", None)
    layer = getattr(module, "layer_idx", None)
    if not layer_types or layer is None or layer >= len(layer_types):
        return None
    layer_type: str | None = layer_types[layer]
    return layer_type


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
    """Compute attention in a probe; refuse a layer whose mask differs from its other arguments."""
    if attention_mask is not None:
        is_causal = None  # transformers ignores this argument if there is a mask
    output = attend(
        module,
        query,
        key,
        value,
        None,
        sliding_window=sliding_window,
        is_causal=is_causal,
        **others,
    )
    reason = disagreement(attention_mask, sliding_window)
    if reason is not None:
        refuse(module, reason)
    return output


def _attend_itself(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float | None
) -> Tensor:
    """Return the attention [B, T, H, E] of each token to itself only, which needs no other rank.

    Without sinks the result is v; a sink takes its share of the softmax.
    """
    repeats = q.shape[2] // k.shape[2]
    k = k.repeat_interleave(repeats, 2)  # [B, T, H, D]
    v = v.repeat_interleave(repeats, 2)  # [B, T, H, E]
    products = (q * k).to(accum_dtype(q.dtype))
    if scale is None:
        scale = q.shape[-1] ** -0.5
    scores = products.sum(-1) * scale  # [B, T, H]
    lse = scores if sinks is None else torch.logaddexp(scores, sinks.to(scores.dtype))
    return v * (scores - lse).exp()[..., None].to(v.dtype)


def convolving(local_function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a ``causal_conv1d_fn`` that spans the ranks if the call has a context."""

    @wraps(local_function)
    def convolve(
        hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, **others: Any
    ) -> Tensor:
        """Convolve [B, C, T] with weight [C, taps]."""
        cp = others.pop(CONTEXT, None)
        if cp is None:
            return local_function(hidden_states, weight, bias, **others)

        out = cp.convolve(hidden_states.transpose(1, 2).to(weight.dtype), weight)  # [B, T, C]
        if bias is not None:
            out = out + bias
        activation = others.get("activation")
        if activation:
            from transformers.activations import ACT2FN

            out = ACT2FN[activation](out)
        return out.transpose(1, 2).to(hidden_states.dtype)

    return convolve


def recurring(local_function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``torch_chunk_gated_delta_rule`` that spans the ranks if the call has a context."""

    @wraps(local_function)
    def delta_rule(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **others: Any
    ) -> Any:
        """Return [B, T, H, E] and no state.

        query and key are [B, T, K, D], value [B, T, H, E], g and beta [B, T, H].
        """
        cp = others.pop(CONTEXT, None)
        if cp is None:
            return local_function(query, key, value, g=g, beta=beta, **others)

        scale = query.shape[-1] ** -0.5
        if others.get("use_qk_l2norm_in_kernel"):
            query = _l2_normalized(query, scale)
            key = _l2_normalized(key)
        else:
            query = query * scale
        return cp.attend_delta(query, key, value, g, beta), None

    return delta_rule


def _l2_normalized(x: Tensor, scale: float = 1.0) -> Tensor:
    """Return ``scale * x / |x|`` over the last dimension, computed in float32 at least."""
    accum = x.to(accum_dtype(x.dtype))
    squares = accum.square().sum(-1, keepdim=True)
    return (accum * (scale * torch.rsqrt(squares + L2_EPSILON))).to(x.dtype)


STATEFUL = {"causal_conv1d_fn": convolving, "torch_chunk_gated_delta_rule": recurring}
"""Wrappers that make functions of transformers' model files span the ranks, keyed by the functions'
names there."""


def install(model: nn.Module) -> None:
    """Register the attention, and wrap the stateful functions in the model's source files.

    For a model that is not sharded, the wrappers call the original function.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)
    AttentionInterface.register(PROBED, attend_masked)
    AttentionMaskInterface.register(PROBED, stated_mask)

    classes = {base for module in model.modules() for base in type(module).__mro__}
    for module_name in {kind.__module__ for kind in classes}:
        names = vars(sys.modules.get(module_name, object))
        for name, wrap in STATEFUL.items():
            if name in names and not hasattr(names[name], CONTEXT):
                wrapper = wrap(names[name])
                setattr(wrapper, CONTEXT, True)
                setattr(sys.modules[module_name], name, wrapper)
