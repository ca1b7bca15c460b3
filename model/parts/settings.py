"""Settings that several families share: positions, windows, layers of two kinds.

A family inherits the classes of the features that it has, so a setting exists only in the families
that use it, and giving it to another is an error instead of being ignored.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeVar

from model.config import Architecture, DecoderConfig
from model.parts.rope import RopeConfig
from model.parts.windows import SoftmaxType, Window, window_of, windows_of
from runtime.errors import require, wrong

R = TypeVar("R", bound="RotaryConfig")


@dataclass(frozen=True, kw_only=True)
class WindowedConfig(DecoderConfig):
    """Windows and sinks of softmax attention."""

    window_size: str | None = None
    """Numbers of keys that a token sees before and after its own, such as 1023,0. The first may be
    -1, for all earlier keys; the second is 0, since the mask is causal. By default every layer sees
    all earlier tokens. In a hybrid only softmax layers have the window."""
    window_attn_skip_freq: str | None = None
    """Layers without the window: a number N means every N-th layer; a pattern has a 1 for each
    layer with the window and a 0 for each layer without it, such as `([1]*3+[0]*1)*6` for 24
    layers. By default every layer has the window."""
    softmax_type: SoftmaxType = "vanilla"
    """Denominator of the softmax: the sum over the keys (vanilla); this sum plus 1, so that a head
    can attend to nothing (off-by-one); or this sum plus the exponential of a learned number per
    head, an attention sink, as in gpt-oss (learnable)."""

    def check(self) -> None:
        """Check that some layer of softmax attention has the window."""
        super().check()
        must = (
            f"model_type {self.model_type} has linear attention, which has no softmax and keeps no "
            "keys; leave this setting out, or set softmax_every for layers with softmax attention"
        )
        for name in ("window_size", "softmax_type"):
            require(self, self.some_softmax or self.is_default(name), name, must)
        windows = self._windows
        is_used = window_of(self.window_size) is None
        for layer in range(len(windows)):
            is_used = is_used or bool(self.window(layer))
        must = (
            "it leaves no layer of softmax attention with the window; give one of these layers a "
            "1, or leave window_size out"
        )
        require(self, is_used, "window_attn_skip_freq", must)

    def window(self, layer: int) -> Window | None:
        return self._windows[layer] if self.has_softmax(layer) else None

    @property
    def some_windows(self) -> bool:
        """True if some layer would have a window if all layers had softmax attention."""
        return any(self._windows)

    @property
    def _windows(self) -> tuple[Window | None, ...]:
        return windows_of(self.window_size, self.window_attn_skip_freq, self.num_layers)

    def architecture(self) -> Architecture:
        """Return the base class's entries, and windows and sinks."""
        entries = super().architecture()
        windows = list(filter(None, self.windows))
        if windows:
            keys_before, keys_after = windows[0]
            flags = ",".join("0" if window is None else "1" for window in self.windows)
            entries["window_size"] = f"{keys_before},{keys_after}"
            entries["window_attn_skip_freq"] = f"[{flags}]"
        if self.softmax_type != "vanilla":
            entries["softmax_type"] = self.softmax_type
        return entries


@dataclass(frozen=True, kw_only=True)
class RotaryConfig(RopeConfig, DecoderConfig):
    """Settings of rope in softmax attention."""

    def check(self) -> None:
        """Check rope's settings, even in a model without softmax layers, which uses no rope."""
        super().check()
        require(self, 0 < self.rotary_base < math.inf, "rotary_base", "it must be a number above 0")
        rotates = self.rope is not None
        if rotates:
            self.check_rotated()
        self.check_rope(self.rotary_dim, rotates=rotates)

    def check_rotated(self) -> None:
        """Check the number of channels that rope rotates."""
        name = "hidden_size" if self.kv_channels is None else "kv_channels"
        must = (
            f"each of the {self.num_attention_heads} heads is {self.head_dim} wide, but rope "
            "rotates channels in pairs; choose an even width"
        )
        require(self, self.head_dim % 2 == 0, name, must)

    @property
    def rope(self) -> RopeConfig | None:
        """Rope settings of softmax attention; None without softmax layers."""
        return self if self.some_softmax else None

    @property
    def reach(self) -> int:
        longest = super().reach
        if self.rope_scaling_type == "linear":
            longest = int(longest * (self.rope_scaling_factor or 1))
        return max(longest, self.scaled_length)

    def with_rope_length(self: R, length: int) -> R:
        if self.rope_scaling_type != "dynamic" or self.rope_scaling_seq_length is not None:
            return self
        return replace(self, rope_scaling_seq_length=length)

    def architecture(self) -> Architecture:
        """Return the base class's entries, and rope with its scaling."""
        return super().architecture() | self.resolved("rotary_base") | self.scaling()


@dataclass(frozen=True, kw_only=True)
class LengthConfig(DecoderConfig):
    """Setting of the maximum sequence length."""

    max_position_embeddings: int | None = None
    """Number of entries in the table of learned_absolute positions, which limits the length of
    sequences; with rope, the length that the model is meant for, beyond which a run starts with a
    note."""

    def check(self) -> None:
        super().check()
        self.check_counts("max_position_embeddings")


@dataclass(frozen=True, kw_only=True)
class RopePositionsConfig(RotaryConfig, LengthConfig):
    """Rope as the only source of positions."""

    position_embedding_type: Literal["rope", "learned_absolute"] | None = None
    """Source of token positions; by default learned_absolute in a gpt and rope in other
    families."""

    positions = "rope"

    def check(self) -> None:
        super().check()
        has_rope = self.position_embedding_type != "learned_absolute"
        must = f"model_type {self.model_type} has only rope; leave it out"
        require(self, has_rope, "position_embedding_type", must)


@dataclass(frozen=True, kw_only=True)
class LocalRopeConfig(RotaryConfig, WindowedConfig):
    """Settings of a model with a second rope, for the layers with a window."""

    rotary_base_local: float | None = None
    """Base of rope's frequencies in the layers with a window, where rope is never scaled; by
    default rotary_base."""

    def check(self) -> None:
        """Check the base of the second rope, and that some layer uses it."""
        super().check()
        base = self.rotary_base_local
        must = "it must be a number above 0, or left out to use rotary_base"
        require(self, base is None or 0 < base < math.inf, "rotary_base_local", must)
        must = (
            "only layers with a window use it, and no layer has one; leave it out, or give "
            "--window-size"
        )
        require(self, base is None or self.some_windows, "rotary_base_local", must)

    @cached_property
    def local_rope(self) -> RopeConfig | None:
        """Unscaled rope of the layers with a window; None if no layer has a window."""
        if not self.some_windows:
            return None
        return RopeConfig(rotary_base=self.rotary_base_local or self.rotary_base)

    def architecture(self) -> Architecture:
        """Return the base class's entries, and the base of the local rope."""
        entries = super().architecture()
        if self.local_rope is not None:
            entries["rotary_base_local"] = self.local_rope.rotary_base
        return entries


@dataclass(frozen=True, kw_only=True)
class PeriodicConfig(DecoderConfig):
    """Softmax attention in some layers only."""

    RESOLVED: ClassVar[Mapping[str, str]] = {"softmax_every": "softmax_period"}

    softmax_every: int | None = None
    """Give every N-th layer softmax attention, which makes the model a hybrid: with 8, seven other
    layers precede each softmax layer. By default a model with linear attention has no softmax
    layers, and in a model with a delta rule every fourth layer is one."""

    default_period = 0
    """Default of ``softmax_every``; 0 means no softmax attention."""

    def check(self) -> None:
        super().check()
        every = self.softmax_every
        default = self.default_period
        if every is None:
            must = (
                f"{self.model_type} has softmax attention in every {default}th layer, so it needs "
                f"at least {default} layers; raise num_layers, or set softmax_every"
            )
            require(self, default <= self.num_layers, "num_layers", must)
        elif not 2 <= every <= self.num_layers:
            left_out = f"left out for {default}" if default else "left out"
            must = (
                f"it must be from 2 (every other layer) to num_layers {self.num_layers} (only the "
                f"last layer), or {left_out}; for softmax attention in every layer, choose another "
                "model_type"
            )
            raise wrong(self, "softmax_every", must)

    @property
    def softmax_period(self) -> int | None:
        """Number of layers from one softmax layer to the next; None without softmax layers."""
        return self.softmax_every or self.default_period or None

    @property
    def alternating(self) -> dict[str, Any]:
        """Settings that give every other layer softmax attention; empty without softmax layers."""
        return {"softmax_every": 2} if self.softmax_period else {}

    def has_softmax(self, layer: int) -> bool:
        every = self.softmax_period
        return every is not None and (layer + 1) % every == 0

    def architecture(self) -> Architecture:
        """Return the base class's entries, and the period."""
        period = {} if self.softmax_period is None else self.resolved("softmax_every")
        return super().architecture() | period
