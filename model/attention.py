"""Grouped-query attention with an injected core, so that the model does not know how the sequence is sharded.

Shapes: B sequences, T tokens, H query heads, G key and value heads, D width of a head, C width of the residual stream.
In linear attention queries and keys have width D, values width E.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.linear_attention import linear_attention
from model.layers import Rotary

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [B, T, H, D], k and v [B, T, G, D] -> [B, T, H, D]; causal, scaled by 1/sqrt(D)."""


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention on one device that holds the whole sequence in order; shapes as in Attend."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H or G, T, D]
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)


@runtime_checkable
class PrefetchingAttend(Protocol):
    """An Attend that can start on k and v before q is ready."""

    def prefetch_kv(self, k: Tensor, v: Tensor) -> Callable[[Tensor], Tensor]:
        """Return q -> attention to k and v, to be called once, before any other attention of this object."""


def prefetch_kv(attend: Attend, k: Tensor, v: Tensor) -> Callable[[Tensor], Tensor]:
    """Return q -> attend(q, k, v); a PrefetchingAttend starts on k and v now."""
    return attend.prefetch_kv(k, v) if isinstance(attend, PrefetchingAttend) else lambda q: attend(q, k, v)


LinearAttend = Callable[[Tensor, Tensor, Tensor, Sequence[float]], Tensor]
"""q and k [B, T, H, D], v [B, T, H, E], log of H decays -> [B, T, H, E]; causal, unscaled."""


def linear(q: Tensor, k: Tensor, v: Tensor, log_decay: Sequence[float]) -> Tensor:
    """Compute linear attention on one device that holds the whole sequence in order; shapes as in LinearAttend."""
    return linear_attention(q, k, v, log_decay)[0]


class HybridAttention(NamedTuple):
    """The two attention cores of a hybrid model."""

    linear: LinearAttend = linear
    softmax: Attend = sdpa


States = list[Tensor | None] | None
"""Per layer the state after the tokens so far, None before the first; None as a whole outside generation.

Linear attention keeps a state [B, H, D, E], softmax attention all keys and values, [2, B, T, G, D].
"""


def continued(q: Tensor, k: Tensor, v: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute causal attention of new tokens to a KV cache and themselves; return it and the extended cache.

    q [B, T, H, D], k and v [B, T, G, D] of the new tokens, past [2, B, S, G, D] -> [B, T, H, D], [2, B, S + T, G, D].
    """
    new = torch.stack((k, v))
    past = new if past is None else torch.cat((past, new), 2)
    tokens, seen = q.shape[1], past.shape[2]
    mask = torch.ones(tokens, seen, dtype=torch.bool, device=q.device).tril(seen - tokens)  # [T, S + T]
    q, k, v = (x.transpose(1, 2) for x in (q, *past))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2), past


class LinearCore(nn.Module):
    """The core of linear attention: injected, or in generation the recurrence on states that the caller keeps."""

    attend: LinearAttend

    def core(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Sequence[float], states: States, layer: int) -> Tensor:
        """Return the attention's output [B, T, H, E]; with states, read and replace this layer's."""
        if states is None:
            return self.attend(q, k, v, log_decay)
        out, states[layer] = linear_attention(q, k, v, log_decay, states[layer])
        return out


class Attention(nn.Module):
    """Projections, optional rotary positions, attend, output projection: [B, T, C] -> [B, T, C].

    The projections are separate linears, so that tensor parallelism can split each by heads.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_query_groups: int,
        head_dim: int,
        attend: Attend = sdpa,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.attend = attend
        self.wq = nn.Linear(hidden_size, num_heads * head_dim, bias=bias)
        self.wk = nn.Linear(hidden_size, num_query_groups * head_dim, bias=bias)
        self.wv = nn.Linear(hidden_size, num_query_groups * head_dim, bias=bias)
        self.wo = nn.Linear(num_heads * head_dim, hidden_size, bias=bias)

    def forward(self, x: Tensor, rotary: Rotary | None, states: States = None, layer: int = 0) -> Tensor:
        """Apply the attention; with states, read and replace this layer's."""
        # -1, not the number of heads: under tensor parallelism a device holds some of them.
        # k and v first: with several devices they may be in transit while q is projected.
        k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wk, self.wv))  # [B, T, G, D]
        attention = self._prefetched(k if rotary is None else rotary.rotate(k), v, states, layer)
        q = self.wq(x).unflatten(-1, (-1, self.head_dim))  # [B, T, H, D]
        out = attention(q if rotary is None else rotary.rotate(q))  # [B, T, H, D]
        return self.wo(out.flatten(-2))

    def _prefetched(self, k: Tensor, v: Tensor, states: States, layer: int) -> Callable[[Tensor], Tensor]:
        if states is None:
            return prefetch_kv(self.attend, k, v)

        def attention(q: Tensor) -> Tensor:
            out, states[layer] = continued(q, k, v, states[layer])
            return out

        return attention
