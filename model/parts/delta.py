"""Attention by a gated delta rule, which keeps a state of constant size.

The state of a head is a matrix that maps keys to values. At each token the state first decays by a
gate. The token then reads the value stored at its key, and adds beta times the difference between
its own value and the stored one. Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024,
arXiv:2412.06464) has one gate per head, Kimi Delta Attention (Kimi Linear 2025, arXiv:2510.26692)
has one per channel of the key.

Shapes: B sequences, T tokens, C width of the residual stream, K key heads of width D, H value heads
of width E.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.cache import States
from kernels.operators import gated
from kernels.ops import causal_convolution, delta_rule
from model.config import DELTA_SIZES, Architecture
from model.parts.attention import HybridAttention, refuse_mask
from model.parts.gates import Gates, Taps
from model.parts.norms import RMSNorm
from model.parts.projections import Bottleneck, Linear
from model.parts.settings import PeriodicConfig
from model.parts.weights import Inits, Splits
from runtime.errors import at_least, require
from runtime.tensors import accum_dtype

L2_EPSILON = 1e-6
"""Added to the squared norms by which queries and keys are normalised, against division by 0."""


class DeltaAttend(Protocol):
    """The core of a layer with a delta rule, and the convolution before it.

    Only these two see other tokens, so only they differ under context parallelism.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, mask: Any = None
    ) -> Tensor:
        """Return ``kernels.ops.delta_rule`` of the whole sequence: [B, T, H, E].

        ``mask`` is as in Attend.
        """

    def convolve(self, x: Tensor, weight: Tensor, mask: Any = None) -> Tensor:
        """Return the causal convolution [B, T, X] of x [B, T, X] with weight [X, taps]."""


class OneDevice:
    """A DeltaAttend of one device that has the whole sequence, in order."""

    def __init__(
        self,
        cu_seqlens_of: Callable[[Any], Sequence[int] | None] = refuse_mask,
        backend: str = "auto",
    ) -> None:
        """Choose how documents are found, and the backend.

        Args:
            cu_seqlens_of: function that returns the cumulative lengths of a mask's documents.
            backend: backend of ``delta_rule``.
        """
        self._cu_seqlens_of = cu_seqlens_of
        self._backend = backend

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, mask: Any = None
    ) -> Tensor:
        cu_seqlens = self._cu_seqlens_of(mask)
        out, _ = delta_rule(q, k, v, g, beta, cu_seqlens=cu_seqlens, backend=self._backend)
        return out

    def convolve(self, x: Tensor, weight: Tensor, mask: Any = None) -> Tensor:
        """Return the causal convolution, as in DeltaAttend."""
        return causal_convolution(x, weight, cu_seqlens=self._cu_seqlens_of(mask))


@dataclass(frozen=True, kw_only=True)
class DeltaConfig(PeriodicConfig):
    """Layers with a gated delta rule between layers of softmax attention."""

    RESOLVED: ClassVar[Mapping[str, str]] = DELTA_SIZES

    linear_num_key_heads: int | None = None
    """Number of key heads of a layer with a gated delta rule; by default num_attention_heads."""
    linear_num_value_heads: int | None = None
    """Number of value heads of a layer with a gated delta rule, a multiple of its number of key
    heads; by default the same number."""
    linear_key_head_dim: int | None = None
    """Width of a key head of a layer with a gated delta rule; by default the width of a head of
    softmax attention."""
    linear_value_head_dim: int | None = None
    """Width of a value head of a layer with a gated delta rule; by default the width of a key
    head."""
    linear_conv_kernel_dim: int = 4
    """Number of tokens that the convolution before a gated delta rule sees, including a token
    itself."""
    linear_gate: Literal["per_head", "per_channel"] = "per_head"
    """Gates of a delta rule: one per head (Gated DeltaNet), or one per channel of each key, with a
    low-rank output gate (Kimi Delta Attention)."""

    default_period = 4
    delta_rule = True
    max_beta = 1.0
    """Maximum of beta, the share of a correction that is written; above 1, eigenvalues of the
    state's update may be negative."""
    dt_ones = False
    """True if the biases of gates per head start at 1; otherwise they start at softplus^-1 of a
    random step size from 0.001 to 0.1.
    """

    def check(self) -> None:
        """Check the heads of layers with a gated delta rule."""
        super().check()
        self.check_counts(*DELTA_SIZES)
        at_least(self, 1, "linear_conv_kernel_dim")
        keys = self.key_heads
        values = self.value_heads
        must = f"it must be a multiple of linear_num_key_heads {keys}; change one of them"
        require(self, values % keys == 0, "linear_num_value_heads", must)
        must = (
            f"gates per channel need as many key heads as value heads, but there are {keys} and "
            f"{values}; leave linear_gate out, or make the numbers of heads equal"
        )
        require(self, values == keys or self.linear_gate == "per_head", "linear_gate", must)

    @property
    def out_epsilon(self) -> float:
        """Epsilon of the norm of a delta rule's output."""
        return self.norm_epsilon

    def cores(self, attend: Any) -> HybridAttention:
        """Return the linear and the softmax attention core, by default those for one device."""
        return HybridAttention(OneDevice()) if attend is None else super().cores(attend)

    @property
    def linears(self) -> tuple[str, ...]:
        """Names of the linear modules that may get an adapter.

        Gates per channel are made by a bottleneck of two modules, which gets no adapter.
        """
        gates = ("wu", "wb", "wa") if self.linear_gate == "per_head" else ("wu", "wb")
        return ("wq", "wk", "wv", *gates, "wo", "gate", "up", "down")

    @property
    def key_heads(self) -> int:
        return self.linear_num_key_heads or self.num_attention_heads

    @property
    def value_heads(self) -> int:
        return self.linear_num_value_heads or self.key_heads

    @property
    def key_dim(self) -> int:
        return self.linear_key_head_dim or self.head_dim

    @property
    def value_dim(self) -> int:
        return self.linear_value_head_dim or self.key_dim

    @property
    def shared_sizes(self) -> dict[str, int]:
        """Sizes of a layer that tensor parallelism divides, keyed by setting."""
        return {**super().shared_sizes, "linear_num_key_heads": self.key_heads}

    @property
    def state_elements(self) -> int:
        """Number of elements in the states of all layers with a delta rule, per sequence."""
        return self.recurrent_layers * self.value_heads * self.key_dim * self.value_dim

    def architecture(self) -> Architecture:
        """Return the base class's entries, and the delta rule's sizes and gate."""
        names = (*DELTA_SIZES, "linear_conv_kernel_dim", "linear_gate")
        return super().architecture() | self.resolved(*names) | {"rotary_percent": 1.0}


class DeltaAttention(nn.Module):
    """Attention by a gated delta rule: [B, T, C] -> [B, T, C].

    In order: projections, a convolution and SiLU of q, k and v, the delta rule, a norm and a gate
    per head, the output projection. The projections are separate linears, so that tensor
    parallelism can split each by key heads and their value heads. The convolution is one call for
    all three, so that under context parallelism the previous rank sends its last tokens only once.
    """

    INIT: ClassVar[Inits] = {
        "wq": "qkv",
        "wk": "qkv",
        "wv": "qkv",
        "wu": "matrix",
        "wa": "gate",
        "wb": "gate",
        "out_norm": "ones",
        "wo": "residual",
    }
    SPLIT: ClassVar[Splits] = {
        "wq": "columns",
        "wk": "columns",
        "wv": "columns",
        "wu": "columns",
        "wa": "columns",
        "wb": "columns",
        "out_norm": "whole",
        "wo": "rows",
    }

    def __init__(self, config: DeltaConfig, layer: int, attend: DeltaAttend) -> None:
        super().__init__()
        self.layer = layer
        """Index of the layer in ``States``."""
        self.attend = attend
        self.convolve = attend.convolve
        self.key_dim = config.key_dim
        self.value_dim = config.value_dim
        self.max_beta = config.max_beta
        self.per_channel = config.linear_gate == "per_channel"

        hidden_size = config.hidden_size
        taps = config.linear_conv_kernel_dim
        heads = config.value_heads
        k_size = config.key_heads * self.key_dim
        v_size = heads * self.value_dim
        self.wq = Linear(hidden_size, k_size, bias=False)
        self.wk = Linear(hidden_size, k_size, bias=False)
        self.wv = Linear(hidden_size, v_size, bias=False)
        self.conv_q = Taps(k_size, taps)
        self.conv_k = Taps(k_size, taps)
        self.conv_v = Taps(v_size, taps)

        if self.per_channel:
            gate_channels = self.key_dim
            self.wu: nn.Module = Bottleneck(hidden_size, self.value_dim, v_size)
            self.wa: nn.Module = Bottleneck(hidden_size, self.value_dim, heads * gate_channels)
            self.wb = Linear(hidden_size, heads, bias=False)
            self.gates = Gates(heads, gate_channels, min_rate=1.0)
        else:
            self.wu = Linear(hidden_size, v_size, bias=False)
            self.wa = Linear(hidden_size, heads, bias=False)
            self.wb = Linear(hidden_size, heads, bias=False)
            self.gates = Gates(heads, dt_ones=config.dt_ones)
        self.out_norm = RMSNorm(self.value_dim, eps=config.out_epsilon)
        self.wo = Linear(v_size, hidden_size, bias=False)

    def forward(
        self, x: Tensor, positions: Any = None, mask: Any = None, states: States | None = None
    ) -> Tensor:
        """Apply the layer to x [B, T, C]; with states, start from the layer's state and replace it.

        ``positions`` are not used, since the state depends on the order of tokens.
        """
        if states is not None and not states.shared:
            padding = x.shape[1] - states.count
            if padding:
                out = self.forward(x[:, : states.count], states=states)
                return F.pad(out, (0, 0, 0, padding))

        # The projections return only this device's heads, so the sizes come from their outputs.
        projected = [self.wq(x), self.wk(x), self.wv(x)]  # [B, T, K D], [B, T, K D], [B, T, H E]
        sizes = [channels.shape[-1] for channels in projected]
        weight = torch.cat([self.conv_q(), self.conv_k(), self.conv_v()])  # [2 K D + H E, taps]
        qkv = torch.cat(projected, -1)  # [B, T, 2 K D + H E]
        qkv = F.silu(self._convolve(qkv, weight, mask, states))
        q, k, v = qkv.split(sizes, -1)
        q = q.unflatten(-1, (-1, self.key_dim))  # [B, T, K, D]
        k = k.unflatten(-1, (-1, self.key_dim))
        q = normalised(q, self.key_dim**-0.5)
        k = normalised(k)
        v = v.unflatten(-1, (-1, self.value_dim))  # [B, T, H, E]

        g = self.gates(self.wa(x))  # [B, T, H] or [B, T, H, D]
        b = self.wb(x)  # [B, T, H]
        beta = self.max_beta * b.to(g.dtype).sigmoid()
        out = self.out_norm(self._apply_rule(q, k, v, g, beta, mask, states))  # [B, T, H, E]

        z = self.wu(x).view_as(out)
        out = out * z.sigmoid() if self.per_channel else gated(z, out)
        return self.wo(out.flatten(-2))  # [B, T, C]

    def _convolve(self, qkv: Tensor, weight: Tensor, mask: Any, states: States | None) -> Tensor:
        """Convolve; with states, start from the previous tokens' inputs and store the last ones."""
        if states is None:
            if mask is None:
                return self.convolve(qkv, weight)
            return self.convolve(qkv, weight, mask)

        refuse_mask(mask)
        previous, state = states.layers[self.layer] or (None, None)
        gap = weight.shape[1] - 1  # number of previous tokens that the convolution sees
        if states.shared:
            states.layers[self.layer] = states.last(qkv, gap), None
            return self.convolve(qkv, weight)

        if previous is None:
            inputs = F.pad(qkv, (0, 0, gap, 0))
        else:
            inputs = torch.cat((previous, qkv), 1)
        states.layers[self.layer] = inputs[:, inputs.shape[1] - gap :], state
        return causal_convolution(qkv, weight, previous)

    def _apply_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        mask: Any,
        states: States | None,
    ) -> Tensor:
        """Return the delta rule's output [B, T, H, E]; with states, start from the layer's state
        and replace it.
        """
        if states is None:
            if mask is None:
                return self.attend(q, k, v, g, beta)
            return self.attend(q, k, v, g, beta, mask)

        previous, state = states.layers[self.layer]
        if states.shared:
            # If ranks share tokens, ``attend`` is a DeltaAttention of
            # parallel.context.linear.delta_attention.
            attend: Any = self.attend
            out, state = attend.with_state(q, k, v, g, beta)
            states.layers[self.layer] = previous, states.total(state)
            return out

        # The reference goes token by token, which is fastest for one token.
        backend = "reference" if q.shape[1] == 1 else "auto"
        out, state = delta_rule(q, k, v, g, beta, state, backend=backend)
        states.layers[self.layer] = previous, state
        return out


def normalised(x: Tensor, scale: float = 1.0) -> Tensor:
    """Scale each head of x [..., D] to norm ``scale``, in float32 or wider; return x's dtype."""
    accum = x.to(accum_dtype(x.dtype))
    inverse_norm = torch.rsqrt(accum.square().sum(-1, keepdim=True) + L2_EPSILON)  # [..., 1]
    return (accum * (scale * inverse_norm)).to(x.dtype)
