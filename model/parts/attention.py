"""Grouped-query attention with an injected core, so that the model does not know how the sequence
is sharded.

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
    """The core of softmax attention."""

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
        """Return attention scaled by 1 / sqrt(D): q [B, T, H, D], k and v [B, T, G, D] -> [B, T, H,
        D].

        The model passes only what is set.

        Args:
            mask: what the micro-batch's tokens see of each other, made where ``attend`` was; the
                model hands it on. It is no tensor, which FSDP would cast. None is what ``attend``
                was made for, such as a causal mask.
            window: of this layer, on top of the mask.
            sinks: [H], the score of one more key per head, whose value is 0.
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
    """Compute attention on one device that holds the whole sequence in order; shapes as in Attend.

    A window or sinks, which are causal, take blocks of queries, so that memory grows with T times
    the window; learned sinks keep their scores for the backward.

    Raises:
        UserError: a mask, which belongs to a method of context parallelism.
    """
    refuse_mask(mask)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H or G, T, D]
    if window is None and sinks is None:
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=grouped
        ).transpose(1, 2)
    assert causal, "a window and sinks are"
    length, left = q.shape[2], _left(window)
    found = []
    for start in range(0, length, BLOCK):
        rows, columns = (
            slice(start, start + BLOCK),
            slice(0 if left is None else max(0, start - left), start + BLOCK),
        )
        found.append(
            _of_last(q[:, :, rows], k[:, :, columns], v[:, :, columns], window=window, sinks=sinks)
        )
    return torch.cat(found, 2).transpose(1, 2)


BLOCK = 256
"""Queries that go through a masked kernel at once."""


def refuse_mask(mask: Any) -> None:
    """Raise UserError for a mask, which an attention of one device without a method does not know."""
    if mask is not None:
        raise UserError(
            f"mask is a {type(mask).__name__}, and this attention has no method of context parallelism, which alone "
            "knows masks of micro-batches; set a context_parallel_method, or leave the mask out"
        )


def _left(window: Window | None) -> int | None:
    """Return how many keys before its own a query sees under a causal mask; None is all."""
    return None if window is None or window[0] < 0 else window[0]


def _of_last(
    q: Tensor, k: Tensor, v: Tensor, *, window: Window | None, sinks: Tensor | None
) -> Tensor:
    """Compute causal attention of the last T of S tokens: q [B, H, T, D], k and v [B, G, S, D] ->
    [B, H, T, D].
    """
    (heads, tokens), seen, left = q.shape[1:3], k.shape[2], _left(window)
    bias = torch.ones(tokens, seen, dtype=torch.bool, device=q.device).tril(seen - tokens)  # [T, S]
    if left is not None:
        bias = bias.triu(seen - tokens - left)
    bias = bias[None, None]
    if sinks is not None:
        wide = accum_dtype(q.dtype)
        k, v = (F.pad(x, (0, 0, 1, 0)) for x in (k, v))  # a key and a value of 0 before the others
        scores = torch.zeros(bias.shape, dtype=wide, device=q.device).masked_fill(
            ~bias, float("-inf")
        )
        sink = sinks.to(wide)[:, None, None].expand(heads, tokens, 1)
        bias = torch.cat((sink, scores[0].expand(heads, -1, -1)), 2)[None]  # [1, H, T, 1 + S]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=heads != k.shape[1])


@runtime_checkable
class PrefetchingAttend(Protocol):
    """An Attend that can start on k and v before q is ready."""

    def prefetch_kv(
        self,
        k: Tensor,
        v: Tensor,
        mask: Any = None,
        *,
        window: Window | None = None,
        sinks: Tensor | None = None,
    ) -> Callable[[Tensor], Tensor]:
        """Return q -> attention to k and v, to be called once, before any other attention of this
        object.
        """


class LinearAttend(Protocol):
    """The core of linear attention."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Sequence[float], mask: Any = None
    ) -> Tensor:
        """Return causal, unscaled attention: q and k [B, T, H, D], v [B, T, H, E], H log decays ->
        [B, T, H, E].

        ``mask`` as in Attend; passed only if it is set.
        """


def linear(q: Tensor, k: Tensor, v: Tensor, log_decay: Sequence[float], mask: Any = None) -> Tensor:
    """Compute linear attention on one device that holds the whole sequence in order: a LinearAttend
    without masks.
    """
    refuse_mask(mask)
    return linear_attention(q, k, v, log_decay)[0]


class HybridAttention(NamedTuple):
    """The two attention cores of a hybrid model.

    ``linear`` is a LinearAttend, or in a model with a delta rule a
    ``model.parts.delta.DeltaAttend``.
    """

    linear: Any = linear
    softmax: Attend = sdpa


class LinearCore(nn.Module):
    """The core of linear attention: injected, or in generation the recurrence on states that the
    caller keeps.
    """

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
        """Return the attention's output [B, T, H, E]; with states, read and replace this layer's."""
        if states is None:
            return self.attend(q, k, v, log_decay, *(() if mask is None else (mask,)))
        refuse_mask(mask)
        own_q, own_k, own_v = (x[:, : states.count] for x in (q, k, v))
        if states.shared:
            states.layers[layer] = states.total(state_after(own_k, own_v, log_decay, states.remaining_tokens))
            return self.attend(q, k, v, log_decay)
        out, states.layers[layer] = linear_attention(
            own_q, own_k, own_v, log_decay, states.layers[layer]
        )
        return F.pad(out, (0, 0, 0, 0, 0, q.shape[1] - states.count))


class Attention(nn.Module):
    """Projections, optional norms and rotary positions, attend, optional gate, output projection:
    [B, T, C], as x.

    The projections are separate linears, so that tensor parallelism can split each by heads.

    ``sinks`` [H] are learned in the weights' dtype, bfloat16 in such a run, and added in float32:
    rounding moves a sink by 0.4 % at most, as it does a norm's weight.
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
        """Build it.

        Args:
            bias: of all four projections.
            qk_norm: makes the norm of so many heads [B, T, H, D].
            query_scale: factor of the queries, which ``attend`` divides by sqrt(D).
            rotates: whether it takes the model's rope.
        """
        super().__init__()
        self.query_scale, self.rotates = query_scale, rotates
        self.layer = layer
        """Its place in ``States``."""
        self.head_dim, self.window, self.softmax_type = head_dim, window, softmax_type
        self.num_heads = num_heads
        """Query heads of this device; tensor parallelism lowers it."""
        self.attend = attend
        self.sinks = nn.Parameter(torch.empty(num_heads)) if softmax_type == "learnable" else None
        self.wq = Linear(hidden_size, num_heads * head_dim, bias=bias or qkv_bias)
        self.wk = Linear(hidden_size, num_query_groups * head_dim, bias=bias or qkv_bias)
        self.wv = Linear(hidden_size, num_query_groups * head_dim, bias=bias or qkv_bias)
        self.wu = Linear(hidden_size, num_heads * head_dim, bias=False) if output_gate else None
        self.q_norm = None if qk_norm is None else qk_norm(num_heads)
        self.k_norm = None if qk_norm is None else qk_norm(num_query_groups)
        self.wo = Linear(num_heads * head_dim, hidden_size, bias=bias)

    def forward(
        self,
        x: Tensor,
        rotary: Rotary | None,
        mask: Any = None,
        states: States | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Apply the attention under the micro-batch's mask; with states, attend to this layer's
        cache too.

        ``sinks`` are those of these heads: under tensor parallelism a device holds some of them.
        """
        rotary = rotary.under(self.window) if rotary is not None and self.rotates else None
        # -1, not the number of heads: under tensor parallelism a device holds some of them.
        # k and v first: with several devices they may be in transit while q is projected.
        # What has been rotated has no name: its memory is free for the attention.
        k = self._placed(
            self.wk(x).unflatten(-1, (-1, self.head_dim)), self.k_norm, rotary
        )  # [B, T, G, D]
        v = self.wv(x).unflatten(-1, (-1, self.head_dim))
        attention = self._prefetched(k, v, mask, states, sinks)
        out = attention(self._queries(x, rotary))  # [B, T, H, D]
        out = out.flatten(-2)
        return self.wo(out if self.wu is None else out * self.wu(x).sigmoid())

    def _queries(self, x: Tensor, rotary: Rotary | None) -> Tensor:
        q = self.wq(x).unflatten(-1, (-1, self.head_dim))  # [B, T, H, D]
        return self._placed(
            q if self.query_scale == 1 else q * self.query_scale, self.q_norm, rotary
        )

    @staticmethod
    def _placed(x: Tensor, norm: nn.Module | None, rotary: Rotary | None) -> Tensor:
        """Normalise each head's queries or keys, and rotate them."""
        x = x if norm is None else norm(x)
        return x if rotary is None else rotary.rotate(x)

    def _prefetched(
        self, k: Tensor, v: Tensor, mask: Any, states: States | None, sinks: Tensor | None
    ) -> Callable[[Tensor], Tensor]:
        """Return q -> attention to k and v, on which a PrefetchingAttend starts now."""
        sinks = self.own_sinks(k, sinks)
        if states is not None:
            refuse_mask(mask)
            if (
                attention := states.attention(self.layer, k, v, _left(self.window), sinks)
            ) is not None:
                return attention
        found: dict[str, Any] = {"mask": mask, "window": self.window, "sinks": sinks}
        settings = {name: value for name, value in found.items() if value is not None}
        if isinstance(self.attend, PrefetchingAttend):
            return self.attend.prefetch_kv(k, v, **settings)
        return lambda q: self.attend(q, k, v, **settings)

    def own_sinks(self, like: Tensor, sinks: Tensor | None = None) -> Tensor | None:
        """Return the scores [H] of the sinks of this device's heads on the device of ``like``; None
        if there are none.

        off-by-one is a score of 0, whose exponential is 1. Learned ones are ``sinks``, by default
        all heads'.
        """
        if self.softmax_type == "off-by-one":
            return torch.zeros(self.num_heads, dtype=torch.float32, device=like.device)
        return self.sinks if sinks is None else sinks
