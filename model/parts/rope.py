"""Frequencies of rotary positions (rope), plain or scaled to a longer context.

A pair of channels rotates by position * frequency. A model trained on short sequences never saw the
large angles that slow pairs reach in long ones, so scalings lower their frequencies: linear lowers
all, dynamic raises the base, yarn and llama3 lower only those of pairs that rotate less than about
once in the original length, and leave fast pairs, which encode local order, as they are.

Formulas and settings are those of transformers' ROPE_INIT_FUNCTIONS. D is the number of channels of
a head that rotate.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from runtime.errors import UserError, require

PREFIX = "rope_scaling_"
_FACTOR = f"{PREFIX}factor"
_TRAINED = f"{PREFIX}original_max_position_embeddings"
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
"""Settings of each type of scaling, with transformers' names; Longmesh's names add the prefix
rope_scaling_."""
LARGEST = 1e9
"""Maximum value of a numeric setting."""


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary positions, plain or scaled."""

    rotary_base: float = 10000.0
    """Base of rope's frequencies."""
    rope_scaling_type: Literal["linear", "dynamic", "yarn", "llama3"] | None = None
    """Scale rope to a longer context: divide all positions by the factor (linear), let the base
    grow with the length (dynamic NTK), or divide only the frequencies of slow channels (yarn,
    llama3). By default rope is not scaled."""
    rope_scaling_factor: float | None = None
    """Factor by which the context becomes longer; llama3 divides the frequencies of the slowest
    channels by it."""
    rope_scaling_original_max_position_embeddings: int | None = None
    """Length of the longest sequence before scaling; dynamic, yarn and llama3 need it."""
    rope_scaling_low_freq_factor: float | None = None
    """llama3: the frequencies of channels that rotate fewer times than this in the original length
    are divided by the factor; 1 by default."""
    rope_scaling_high_freq_factor: float | None = None
    """llama3: channels that rotate more times than this in the original length are not scaled; 4 by
    default.
    """
    rope_scaling_beta_fast: float | None = None
    """yarn: channels that rotate more times than this in the original length are not scaled; 32 by
    default.
    """
    rope_scaling_beta_slow: float | None = None
    """yarn: the frequencies of channels that rotate fewer times than this in the original
    length are divided by the factor; 1 by default.
    """
    rope_scaling_attention_factor: float | None = None
    """yarn: factor of cos and sin, so that scores grow by its square; by default 0.1 ln(factor) +
    1.
    """
    rope_scaling_mscale: float | None = None
    """yarn: with mscale_all_dim, the attention factor is (0.1 mscale ln(factor) + 1) / (0.1
    mscale_all_dim ln(factor) + 1)."""
    rope_scaling_mscale_all_dim: float | None = None
    """yarn: used with mscale; see rope_scaling_mscale."""
    rope_scaling_truncate: bool = True
    """yarn: round the bounds of the ramp between fast and slow channels outwards to whole
    channels."""
    rope_scaling_seq_length: int | None = None
    """dynamic: the length for which the base is computed; by default --seq-length, or the length of
    the text so far if no run has trained the model."""

    def check_rope(self, head_dim: int, *, rotates: bool) -> None:
        """Check the scaling's settings.

        Args:
            head_dim: number D of channels that rotate.
            rotates: True if the model has rope.

        Raises:
            UserError: a setting is missing, out of range, or belongs to another type of scaling.
        """
        kind = self.rope_scaling_type
        if kind is not None and not rotates:
            raise UserError(
                f"rope_scaling_type is {kind}, but this model has no rope; leave it out"
            )
        names = (*SETTINGS["yarn"], *SETTINGS["llama3"], "seq_length")
        for key in dict.fromkeys(names):
            self._check_setting(key)
        if kind is None:
            return

        for name in (_FACTOR, _TRAINED)[: len(SETTINGS[kind])]:
            if getattr(self, name) is None:
                raise UserError(
                    f"{name} is not set, but rope_scaling_type {kind} needs it; give a value"
                )
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if self.setting(low) >= self.setting(high):
                raise UserError(
                    f"{PREFIX}{low} is {self.setting(low)}; "
                    f"it must be below {PREFIX}{high} {self.setting(high)}"
                )
        if kind in ("dynamic", "yarn") and (head_dim <= 2 or self.rotary_base <= 1):
            raise UserError(
                f"rope_scaling_type is {kind}, but rotary_base is {self.rotary_base} and heads are "
                f"{head_dim} wide; it needs a base above 1 and heads of 4 channels or more"
            )

    def _check_setting(self, key: str) -> None:
        """Check that a setting belongs to the type of scaling and is in range. Raises UserError."""
        name = PREFIX + key
        value = getattr(self, name)
        kinds = [kind for kind, keys in SETTINGS.items() if key in keys] or ["dynamic"]
        if value != getattr(RopeConfig, name) and self.rope_scaling_type not in kinds:
            verb = "has" if len(kinds) == 1 else "have"
            raise UserError(
                f"{name} is {value}, but rope_scaling_type is "
                f"{self.rope_scaling_type or 'not set'}; leave {name} out, since only "
                f"{', '.join(kinds)} {verb} it"
            )
        if value is None or type(value) is bool:
            return
        minimum = 1 if isinstance(value, int) or key == "factor" else 1 / LARGEST
        in_range = minimum <= value <= LARGEST
        require(self, in_range, name, f"it must be from {minimum:g} to {LARGEST:g}")

    def setting(self, key: str) -> float:
        """Return the value of a setting in DEFAULTS, or its default if it is not set."""
        value = getattr(self, PREFIX + key)
        return DEFAULTS[key] if value is None else value

    def scaling(self) -> dict[str, int | float | bool | str | None]:
        """Return all settings of the scaling, defaults resolved; empty if rope is not scaled."""
        if self.rope_scaling_type is None:
            return {}
        settings: dict[str, int | float | bool | str | None] = {
            "rope_scaling_type": self.rope_scaling_type
        }
        for key in SETTINGS[self.rope_scaling_type]:
            resolved = self.setting(key) if key in DEFAULTS else getattr(self, PREFIX + key)
            settings[PREFIX + key] = resolved
        return settings

    @property
    def scaled_length(self) -> int:
        """Scaled length: the original length times the factor; 0 without an original length."""
        return int(
            (self.rope_scaling_factor or 1)
            * (self.rope_scaling_original_max_position_embeddings or 0)
        )


def frequencies(rope: RopeConfig, head_dim: int, positions: Tensor) -> tuple[Tensor, float]:
    """Return the radians per position of each pair [D/2], float64, and the factor of cos and sin.

    linear is position interpolation (Chen et al. 2023), dynamic is NTK-aware scaling of the base by
    the length, yarn is Peng et al. 2023 (sections 3.2 and 3.4), llama3 is the scaling of Llama 3.1
    (Grattafiori et al. 2024).

    Only dynamic scaling without rope_scaling_seq_length reads the positions: the largest is taken
    as the length.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device)
    exponents = exponents / head_dim  # [D/2]
    kind = rope.rope_scaling_type
    base = rope.rotary_base
    if kind is None:
        return base**-exponents, 1.0

    factor = rope.rope_scaling_factor
    assert factor is not None  # checked with the configuration
    if kind == "linear":
        return base**-exponents / factor, 1.0

    trained_length = rope.rope_scaling_original_max_position_embeddings
    assert trained_length is not None
    if kind == "dynamic":
        length = rope.rope_scaling_seq_length or int(positions.max()) + 1
        return dynamic_base(rope, head_dim, length) ** -exponents, 1.0

    unscaled = base**-exponents
    if kind == "llama3":
        low = rope.setting("low_freq_factor")
        high = rope.setting("high_freq_factor")
        rotations = trained_length * unscaled / (2 * math.pi)  # in the original length, [D/2]
        unscaled_share = ((rotations - low) / (high - low)).clamp(0, 1)  # 1 for fast pairs
        return unscaled * (unscaled_share + (1 - unscaled_share) / factor), 1.0

    unscaled_share = 1 - _yarn_ramp(rope, head_dim, trained_length, unscaled)
    scaled = unscaled * (unscaled_share + (1 - unscaled_share) / factor)
    return scaled, _yarn_attention(rope, factor)


def dynamic_base(rope: RopeConfig, head_dim: int, length: int) -> float:
    """Return the base with which unscaled rope equals dynamically scaled rope at this length."""
    factor = rope.rope_scaling_factor
    trained_length = rope.rope_scaling_original_max_position_embeddings
    assert factor is not None  # checked with the configuration
    assert trained_length is not None
    stretch = factor * max(length, trained_length) / trained_length - (factor - 1)
    return float(rope.rotary_base * stretch ** (head_dim / (head_dim - 2)))


def _yarn_ramp(rope: RopeConfig, head_dim: int, trained_length: int, like: Tensor) -> Tensor:
    """Return 0 for fast pairs, 1 for slow ones, and a ramp between them [D/2] (YaRN, eq. 18)."""

    def pair_with(rotations: float) -> float:
        """Return the fractional index of the pair with these rotations in the original length."""
        return (
            head_dim
            * math.log(trained_length / (rotations * 2 * math.pi))
            / (2 * math.log(rope.rotary_base))
        )

    first = pair_with(rope.setting("beta_fast"))
    last = pair_with(rope.setting("beta_slow"))
    if rope.rope_scaling_truncate:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, head_dim - 1)
    width = last - first or 0.001
    pairs = torch.arange(head_dim // 2, dtype=like.dtype, device=like.device)
    return ((pairs - first) / width).clamp(0, 1)


def _yarn_attention(rope: RopeConfig, factor: float) -> float:
    """Return the factor of cos and sin (YaRN, eq. 22)."""
    if rope.rope_scaling_attention_factor is not None:
        return rope.rope_scaling_attention_factor
    if rope.rope_scaling_mscale and rope.rope_scaling_mscale_all_dim:
        numerator = yarn_mscale(factor, rope.rope_scaling_mscale)
        return numerator / yarn_mscale(factor, rope.rope_scaling_mscale_all_dim)
    return yarn_mscale(factor)


def yarn_mscale(factor: float, coefficient: float = 1.0) -> float:
    """Return the factor of cos and sin for a scaling of the context (YaRN, eq. 22)."""
    return 0.1 * coefficient * math.log(factor) + 1 if factor > 1 else 1.0
