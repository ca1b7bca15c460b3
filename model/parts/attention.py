"""Grouped-query attention whose core is an argument, so the model does not depend on ranks.

A layer projects queries, keys and values, and calls ``attend`` on them. On one device ``attend`` is
`sdpa`; under context parallelism it is an object of ``parallel.context``, which exchanges keys and
values with the other ranks. The model is the same code for both.

Shapes: B sequences, T tokens, H query heads, G key and value heads, D width of a head, C width of
the residual stream. In linear attention queries and keys have width D, values width E.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.cache import States
from kernels.linear_attention import state_after
from kernels.ops import linear_attention
from model.parts.projections import Linear
from model.parts.rotary import Rotary
from model.parts.weights import Inits, Splits
from model.parts.windows import SoftmaxType, Window
from runtime.errors import UserError
from runtime.tensors import accum_dtype


class Attend(Protocol):
    """The core of softmax attention, without projections."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any = None,
        *,
        window: Window | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return softmax attention [B, T, H, D] with scores scaled by 1 / sqrt(D).

        The model passes a keyword only if it is set.

        Args:
            q: [B, T, H, D].
            k: [B, T, G, D].
            v: [B, T, G, D].
            mask: the micro-batch's mask, from the object that made ``attend``; the model only
                passes it on. It is never a tensor, which FSDP would cast. None is the mask that
                ``attend`` was made for, such as a causal one.
            window: the layer's window, in addition to the mask.
            sinks: [H], the score of one additional key per head, which has value 0.
        """


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any = None,
    *,
    window: Window | None = None,
    sinks: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """Compute attention on one device that has the whole sequence, in order; shapes as in Attend.

    With a window or sinks, one block of queries is computed at a time, so that memory grows with T
    times the window instead of T^2; with learned sinks, the scores are kept for the backward pass.

    Raises:
        UserError: a mask was given; only context parallelism supports one.
    """
    refuse_mask(mask)
    q = q.transpose(1, 2)  # [B, H, T, D]
    k = k.transpose(1, 2)  # [B, G, T, D]
    v = v.transpose(1, 2)
    if window is None and sinks is None:
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
        return out.transpose(1, 2)  # [B, T, H, D]

    assert causal, "windows and sinks need a causal mask"
    keys_before = _keys_before(window)
    blocks = []
    for start in range(0, q.shape[2], BLOCK):
        first_key = 0 if keys_before is None else max(0, start - keys_before)
        queries = slice(start, start + BLOCK)
        keys = slice(first_key, start + BLOCK)
        blocks.append(
            _attend_last(q[:, :, queries], k[:, :, keys], v[:, :, keys], window=window, sinks=sinks)
        )
    return torch.cat(blocks, 2).transpose(1, 2)  # [B, T, H, D]


BLOCK = 256
"""Number of queries per call of the masked kernel."""


def refuse_mask(mask: Any) -> None:
    """Raise UserError for a mask, which attention on one device does not support."""
    if mask is not None:
        raise UserError(
            f"mask is a {type(mask).__name__}, but a micro-batch's mask needs a method of context "
            "parallelism, and this attention has none; set a context_parallel_method, or leave the "
            "mask out"
        )


def _keys_before(window: Window | None) -> int | None:
    """Return the number of keys before its own that a query sees; None means all."""
    return None if window is None or window[0] < 0 else window[0]


def _attend_last(
    q: Tensor, k: Tensor, v: Tensor, *, window: Window | None, sinks: Tensor | None
) -> Tensor:
    """Compute causal attention of the last T of S tokens: [B, H, T, D].

    Args:
        q: [B, H, T, D].
        k: [B, G, S, D].
        v: [B, G, S, D].
        sinks: [H].
    """
    heads, q_length = q.shape[1:3]
    k_length = k.shape[2]
    keys_before = _keys_before(window)

    mask = torch.ones(q_length, k_length, dtype=torch.bool, device=q.device)  # [T, S]
    mask = mask.tril(k_length - q_length)
    if keys_before is not None:
        mask = mask.triu(k_length - q_length - keys_before)
    bias = mask[None, None]

    if sinks is not None:
        # The sink is one more key in front of the others: its score is the bias, since its key and
        # value are 0.
        dtype = accum_dtype(q.dtype)
        k = F.pad(k, (0, 0, 1, 0))  # [B, G, 1 + S, D]
        v = F.pad(v, (0, 0, 1, 0))
        scores = torch.zeros(bias.shape, dtype=dtype, device=q.device)
        scores = scores.masked_fill(~bias, float("-inf"))[0].expand(heads, -1, -1)  # [H, T, S]
        sink = sinks.to(dtype)[:, None, None].expand(heads, q_length, 1)
        bias = torch.cat((sink, scores), 2)[None]  # [1, H, T, 1 + S]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=heads != k.shape[1])


@runtime_checkable
class PrefetchingAttend(Protocol):
    """An Attend that can start on k and v, for example by sending them, before q is ready."""

    def prefetch_kv(
        self,
        k: Tensor,
        v: Tensor,
        mask: Any = None,
        *,
        window: Window | None = None,
        sinks: Tensor | None = None,
    ) -> Callable[[Tensor], Tensor]:
        """Return a function q -> attention to k and v.

        Call the function once, before any other attention of this object.
        """


class LinearAttend(Protocol):
    """The core of linear attention, without projections."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Sequence[float], mask: Any = None
    ) -> Tensor:
        """Return causal, unscaled linear attention [B, T, H, E].

        Args:
            q: [B, T, H, D].
            k: [B, T, H, D].
            v: [B, T, H, E].
            log_decay: H numbers: the log of the factor by which a token decays each head's state.
            mask: as in Attend; passed only if it is not None.
        """


def linear(q: Tensor, k: Tensor, v: Tensor, log_decay: Sequence[float], mask: Any = None) -> Tensor:
    """Compute linear attention on one device that has the whole sequence; takes no masks."""
    refuse_mask(mask)
    return linear_attention(q, k, v, log_decay)[0]


class HybridAttention(NamedTuple):
    """The two attention cores of a hybrid model, linear and softmax."""

    linear: Any = linear
    """A LinearAttend, or ``model.parts.delta.DeltaAttend`` in a model with a delta rule."""
    softmax: Attend = sdpa


class LinearCore(nn.Module):
    """Base class of linear attention layers: calls ``attend``, or a recurrence in generation."""

    attend: LinearAttend

    def core(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Sequence[float],
        mask: Any = None,
        states: States | None = None,
        layer: int = 0,
    ) -> Tensor:
        """Return the output [B, T, H, E]; with states, start from the layer's and update it."""
        if states is None:
            if mask is None:
                return self.attend(q, k, v, log_decay)
            return self.attend(q, k, v, log_decay, mask)

        refuse_mask(mask)
        count = states.count  # number of real tokens among T; the rest are padding
        if states.shared:
            state = state_after(k[:, :count], v[:, :count], log_decay, states.remaining_tokens)
            states.layers[layer] = states.total(state)
            return self.attend(q, k, v, log_decay)

        out, states.layers[layer] = linear_attention(
            q[:, :count], k[:, :count], v[:, :count], log_decay, states.layers[layer]
        )
        return F.pad(out, (0, 0, 0, 0, 0, q.shape[1] - count))


class Attention(nn.Module):
    """Grouped-query softmax attention with rotary positions: [B, T, C] -> [B, T, C].

    In order: projections, optional norms of q and k, rotation, ``attend``, an optional gate, the
    output projection. The projections are separate linears, so that tensor parallelism can split
    each by heads.

    ``sinks`` [H] are learned in the weights' dtype and added in float32. In bfloat16, rounding
    moves a sink by 0.4 % at most, like a norm's weight.
    """

    INIT: ClassVar[Inits] = {
        "wq": "qkv",
        "wk": "qkv",
        "wv": "qkv",
        "wu": "matrix",
        "q_norm": "ones",
        "k_norm": "ones",
        "sinks": "normal",
        "wo": "residual",
    }
    SPLIT: ClassVar[Splits] = {
        "num_heads": "heads",
        "wq": "columns",
        "wk": "kv_heads",
        "wv": "kv_heads",
        "wu": "columns",
        "q_norm": "whole",
        "k_norm": "whole",
        "sinks": "heads",
        "wo": "rows",
    }

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_query_groups: int,
        head_dim: int,
        attend: Attend = sdpa,
        bias: bool = False,
        *,
        window: Window | None = None,
        softmax_type: SoftmaxType = "vanilla",
        qkv_bias: bool = False,
        qk_norm: Callable[[int], nn.Module] | None = None,
        output_gate: bool = False,
        query_scale: float = 1.0,
        rotates: bool = True,
        layer: int = 0,
    ) -> None:
        """Build the modules.

        Args:
            bias: give all four projections a bias.
            qkv_bias: give only wq, wk and wv a bias.
            qk_norm: builds the norm of q or k [B, T, H, D], given the number of heads.
            output_gate: multiply the output by sigmoid(wu x).
            query_scale: factor of the queries, besides the 1 / sqrt(D) of ``attend``.
            rotates: rotate q and k, if the model has rope.
            layer: index of the layer in ``States``.
        """
        super().__init__()
        self.attend = attend
        self.layer = layer
        self.head_dim = head_dim
        self.num_heads = num_heads
        """Number of query heads on this device; tensor parallelism reduces it."""
        self.window = window
        self.softmax_type = softmax_type
        self.query_scale = query_scale
        self.rotates = rotates

        q_size = num_heads * head_dim
        kv_size = num_query_groups * head_dim
        self.sinks = nn.Parameter(torch.empty(num_heads)) if softmax_type == "learnable" else None
        self.wq = Linear(hidden_size, q_size, bias=bias or qkv_bias)
        self.wk = Linear(hidden_size, kv_size, bias=bias or qkv_bias)
        self.wv = Linear(hidden_size, kv_size, bias=bias or qkv_bias)
        self.wu = Linear(hidden_size, q_size, bias=False) if output_gate else None
        self.q_norm = None if qk_norm is None else qk_norm(num_heads)
        self.k_norm = None if qk_norm is None else qk_norm(num_query_groups)
        self.wo = Linear(q_size, hidden_size, bias=bias)

    def forward(
        self,
        x: Tensor,
        rotary: Rotary | None,
        mask: Any = None,
        states: States | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Apply attention to x [B, T, C].

        Args:
            rotary: rotation of the tokens' positions; None without rope.
            mask: the micro-batch's mask, passed on to ``attend``.
            states: the key-value cache of earlier tokens, which x extends.
            sinks: sink scores of this device's heads; by default those of all heads of the layer.
        """
        if rotary is not None:
            rotary = rotary.under(self.window) if self.rotates else None

        # unflatten with -1, not the number of heads: under tensor parallelism a device has fewer. k
        # and v come first: with several devices they may be in transit while q is projected. The
        # unrotated k is never assigned to a name, so attention can reuse its memory.
        k = self._normalize_and_rotate(
            self.wk(x).unflatten(-1, (-1, self.head_dim)), self.k_norm, rotary
        )  # [B, T, G, D]
        v = self.wv(x).unflatten(-1, (-1, self.head_dim))  # [B, T, G, D]
        attend_kv = self._prefetch(k, v, mask, states, sinks)
        out = attend_kv(self._project_queries(x, rotary))  # [B, T, H, D]

        out = out.flatten(-2)  # [B, T, H D]
        if self.wu is not None:
            out = out * self.wu(x).sigmoid()
        return self.wo(out)  # [B, T, C]

    def _project_queries(self, x: Tensor, rotary: Rotary | None) -> Tensor:
        q = self.wq(x).unflatten(-1, (-1, self.head_dim))  # [B, T, H, D]
        if self.query_scale != 1:
            q = q * self.query_scale
        return self._normalize_and_rotate(q, self.q_norm, rotary)

    @staticmethod
    def _normalize_and_rotate(x: Tensor, norm: nn.Module | None, rotary: Rotary | None) -> Tensor:
        if norm is not None:
            x = norm(x)
        return x if rotary is None else rotary.rotate(x)

    def _prefetch(
        self, k: Tensor, v: Tensor, mask: Any, states: States | None, sinks: Tensor | None
    ) -> Callable[[Tensor], Tensor]:
        """Return a function q -> attention to k and v; a PrefetchingAttend starts its work now."""
        sinks = self.own_sinks(k, sinks)
        if states is not None:
            refuse_mask(mask)
            attend_cached = states.attention(self.layer, k, v, _keys_before(self.window), sinks)
            if attend_cached is not None:
                return attend_cached

        settings: dict[str, Any] = {}
        for name, value in (("mask", mask), ("window", self.window), ("sinks", sinks)):
            if value is not None:
                settings[name] = value
        if isinstance(self.attend, PrefetchingAttend):
            return self.attend.prefetch_kv(k, v, **settings)
        return lambda q: self.attend(q, k, v, **settings)

    def own_sinks(self, like: Tensor, sinks: Tensor | None = None) -> Tensor | None:
        """Return the sink scores [H] of this device's heads, on the device of ``like``, or None.

        The off-by-one softmax has a sink with score 0, since exp(0) = 1. Learned scores are
        ``sinks``, by default those of all heads.
        """
        if self.softmax_type == "off-by-one":
            return torch.zeros(self.num_heads, dtype=torch.float32, device=like.device)
        return self.sinks if sinks is None else sinks
