"""Frequencies of rotary positions (rope), plain or scaled to a longer context.

The formulas and their settings are those of transformers' ROPE_INIT_FUNCTIONS; D is the channels of
a head that turn.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from runtime.errors import UserError, require

PREFIX = "rope_scaling_"
_FACTOR, _TRAINED = f"{PREFIX}factor", f"{PREFIX}original_max_position_embeddings"
DEFAULTS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}
SETTINGS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
        *("attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
"""Settings of each type of scaling, under transformers' names; ours begin with rope_scaling_."""
LARGEST = 1e9


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary positions, plain or scaled."""

    rotary_base: float = 10000.0
    """Base of the angles of rope."""
    rope_scaling_type: Literal["linear", "dynamic", "yarn", "llama3"] | None = None
    """Scale rope to a longer context: all positions divided by the factor (linear), a base that
    grows with the length (dynamic NTK), only slow channels divided (yarn, llama3). By default rope
    is not scaled."""
    rope_scaling_factor: float | None = None
    """Factor by which the context becomes longer; llama3 divides the slowest channels by it."""
    rope_scaling_original_max_position_embeddings: int | None = None
    """Longest sequence before scaling; dynamic, yarn and llama3 need it."""
    rope_scaling_low_freq_factor: float | None = None
    """llama3: channels that turn fewer times than this in the original length are divided by the
    factor; 1 by default."""
    rope_scaling_high_freq_factor: float | None = None
    """llama3: channels that turn more times than this in the original length stay as they are; 4 by
    default.
    """
    rope_scaling_beta_fast: float | None = None
    """yarn: channels that turn more times than this in the original length stay as they are; 32 by
    default.
    """
    rope_scaling_beta_slow: float | None = None
    """yarn: channels that turn fewer times than this in the original length are divided by the
    factor; 1 by default.
    """
    rope_scaling_attention_factor: float | None = None
    """yarn: factor of cos and sin, so that scores grow by its square; by default 0.1 ln(factor) +
    1.
    """
    rope_scaling_mscale: float | None = None
    """yarn: with mscale_all_dim, the attention factor is (0.1 mscale ln(factor) + 1) / (0.1
    mscale_all_dim ln(factor) + 1)."""
    rope_scaling_mscale_all_dim: float | None = None
    """yarn: see mscale."""
    rope_scaling_truncate: bool = True
    """yarn: round the bounds of the channels in between outwards to whole ones."""
    rope_scaling_seq_length: int | None = None
    """dynamic: the length that the base is computed for; by default --seq-length, or of a model
    that no run has trained the text so far."""

    def check_rope(self, head_dim: int, *, rotates: bool) -> None:
        """Check the scaling; ``rotates``: whether the model has rope. Raises UserError."""
        kind = self.rope_scaling_type
        if kind is not None and not rotates:
            raise UserError(
                f"rope_scaling_type is {kind}, and this model has no rope; leave it out"
            )
        names = (*SETTINGS["yarn"], *SETTINGS["llama3"], "seq_length")
        for key in dict.fromkeys(names):
            value, default = getattr(self, PREFIX + key), getattr(RopeConfig, PREFIX + key)
            takers = [one for one, keys in SETTINGS.items() if key in keys] or ["dynamic"]
            if value != default and kind not in takers:
                only = f"{', '.join(takers)} alone {'has' if len(takers) == 1 else 'have'} it"
                raise UserError(
                    f"{PREFIX}{key} is {value} and rope_scaling_type {kind or 'not set'}; {only}"
                )
            least = 1 if isinstance(value, int) or key == "factor" else 1 / LARGEST
            inside = value is None or type(value) is bool or least <= value <= LARGEST
            require(self, inside, PREFIX + key, f"it must be from {least:g} to {LARGEST:g}")
        if kind is None:
            return
        for name in (_FACTOR, _TRAINED)[: len(SETTINGS[kind])]:
            if getattr(self, name) is None:
                raise UserError(
                    f"{name} is not set, and rope_scaling_type {kind} needs it; give it"
                )
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if self.setting(low) >= self.setting(high):
                raise UserError(
                    f"{PREFIX}{low} is {self.setting(low)}; it must be below {PREFIX}{high} {self.setting(high)}"
                )
        if kind in ("dynamic", "yarn") and (head_dim <= 2 or self.rotary_base <= 1):
            raise UserError(
                f"rope_scaling_type is {kind} with rotary_base {self.rotary_base} and heads {head_dim} wide; it needs "
                "a base above 1 and heads of 4 channels or more"
            )

    def setting(self, key: str) -> float:
        """Return a setting that has a default."""
        value = getattr(self, PREFIX + key)
        return DEFAULTS[key] if value is None else value

    def scaling(self) -> dict[str, int | float | bool | str | None]:
        """Return the scaling's settings by our names, defaults resolved; empty if rope is not
        scaled.
        """
        if self.rope_scaling_type is None:
            return {}
        names = SETTINGS[self.rope_scaling_type]
        found = {
            PREFIX + key: self.setting(key) if key in DEFAULTS else getattr(self, PREFIX + key)
            for key in names
        }
        return {"rope_scaling_type": self.rope_scaling_type, **found}

    @property
    def scaled_length(self) -> int:
        """Tokens that the scaling reaches from the original length; 0 if it says none."""
        return int(
            (self.rope_scaling_factor or 1)
            * (self.rope_scaling_original_max_position_embeddings or 0)
        )


def frequencies(rope: RopeConfig, head_dim: int, positions: Tensor) -> tuple[Tensor, float]:
    """Return the radians per position [D/2] of each pair of channels, float64, and the factor of
    cos and sin.

    linear is position interpolation (Chen et al. 2023), dynamic is NTK-aware scaling of the base by
    the length, yarn is Peng et al. 2023 (sections 3.2 and 3.4), llama3 is that of Llama 3.1
    (Grattafiori et al. 2024). Only dynamic without a length of its own looks at the positions: at
    the last one.
    """
    exponents = (
        torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    )  # [D/2]
    kind, base = rope.rope_scaling_type, rope.rotary_base
    if kind is None:
        return base**-exponents, 1.0
    factor, trained = rope.rope_scaling_factor, rope.rope_scaling_original_max_position_embeddings
    assert factor is not None  # checked with the configuration
    if kind == "linear":
        return base**-exponents / factor, 1.0
    assert trained is not None
    if kind == "dynamic":
        length = rope.rope_scaling_seq_length or int(positions.max()) + 1
        return dynamic_base(rope, head_dim, length) ** -exponents, 1.0
    plain = base**-exponents
    if kind == "llama3":
        low, high = rope.setting("low_freq_factor"), rope.setting("high_freq_factor")
        kept = ((trained * plain / (2 * math.pi) - low) / (high - low)).clamp(
            0, 1
        )  # 1 where channels turn fast
        return plain * (kept + (1 - kept) / factor), 1.0
    kept = 1 - _yarn_ramp(rope, head_dim, trained, plain)
    return plain * (kept + (1 - kept) / factor), _yarn_attention(rope, factor)


def dynamic_base(rope: RopeConfig, head_dim: int, length: int) -> float:
    """Return the base of plain rope that dynamic scaling is at a length."""
    factor, trained = rope.rope_scaling_factor, rope.rope_scaling_original_max_position_embeddings
    assert factor is not None  # checked with the configuration
    assert trained is not None
    stretch = factor * max(length, trained) / trained - (factor - 1)
    return float(rope.rotary_base * stretch ** (head_dim / (head_dim - 2)))


def _yarn_ramp(rope: RopeConfig, head_dim: int, trained: int, like: Tensor) -> Tensor:
    """Return 0 for pairs that turn fast, 1 for slow ones, and a line in between [D/2] (YaRN, eq.
    18).
    """

    def pair(turns: float) -> float:
        """Return the pair that turns so many times in the original length, as a fraction."""
        return (
            head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope.rotary_base))
        )

    first, last = pair(rope.setting("beta_fast")), pair(rope.setting("beta_slow"))
    if rope.rope_scaling_truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001
    return (
        (torch.arange(head_dim // 2, dtype=like.dtype, device=like.device) - first) / width
    ).clamp(0, 1)


def _yarn_attention(rope: RopeConfig, factor: float) -> float:
    """Return the factor of cos and sin (YaRN, eq. 22)."""
    if rope.rope_scaling_attention_factor is not None:
        return rope.rope_scaling_attention_factor
    if rope.rope_scaling_mscale and rope.rope_scaling_mscale_all_dim:
        return _mscale(factor, rope.rope_scaling_mscale) / _mscale(
            factor, rope.rope_scaling_mscale_all_dim
        )
    return _mscale(factor)


def _mscale(factor: float, times: float = 1.0) -> float:
    return 0.1 * times * math.log(factor) + 1 if factor > 1 else 1.0
