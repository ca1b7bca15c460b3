"""Configuration shared by the decoders of all families, with Megatron-LM's names for settings.

A family's file in model/families adds its own settings and overrides the methods that build its
layers, so `Decoder` has no branches for single families: it calls the configuration's methods.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import nn

from model.parts.attention import Attend, Attention, HybridAttention, LinearAttend
from model.parts.lora import LoraConfig
from model.parts.norms import JointRMSNorm, RMSNorm
from model.parts.rope import RopeConfig
from model.parts.windows import Window
from runtime.errors import UserError, at_least, require

C = TypeVar("C", bound="DecoderConfig")
Architecture = dict[str, int | float | bool | str | None]
"""Settings that determine a model's shapes and computation, as checkpoints record them."""


class Footprint(NamedTuple):
    """Activation sizes of a family, for the planner's memory model."""

    fused_residual: float
    """Number of copies of the residual stream that a layer saves for the backward pass if norms are
    fused kernels, such as inputs and outputs of both norms
    (``planner.step_shape.StepShape.residual``)."""
    gated: bool
    """True if the feed-forward has a gate."""
    first_layer: float = 0.0
    """Number of additional copies of the residual stream that only the first layer saves
    (``planner.step_shape.StepShape.first_layer``)."""
    output_gate: float = 0.0
    """Number of copies of the queries that attention's output gate saves; layers with a delta rule
    are counted in ``planner/layers/delta_cost.py``."""
    qk_norms: float = 0.0
    """Number of copies of the queries and keys that their norms save, a float32 copy counted as 2;
    layers with a delta rule are counted in ``planner/layers/delta_cost.py``."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(LoraConfig, ABC):
    """Family and shape of the model."""

    RESOLVED: ClassVar[Mapping[str, str]] = {
        "ffn_hidden_size": "ffn_size",
        "num_query_groups": "query_groups",
        "kv_channels": "head_dim",
        "vocab_size": "vocabulary",
    }
    """Names of the properties with the final values of optional fields, keyed by field; each class
    lists its own fields."""

    model_type: str = ""
    """Family of the model; it determines which other settings exist."""
    num_layers: int = 4
    """Number of transformer layers."""
    hidden_size: int = 256
    """Width of the residual stream."""
    ffn_hidden_size: int | None = None
    """Inner width of the feed-forward; by default 8/3 of hidden_size, rounded up to a multiple of
    64, or 4 x hidden_size without a gate."""
    num_attention_heads: int = 8
    """Number of query heads."""
    num_query_groups: int | None = None
    """Number of key and value heads (grouped-query attention); by default one per query head."""
    kv_channels: int | None = None
    """Width of one head; by default hidden_size / num_attention_heads."""
    vocab_size: int | None = None
    """Number of vocabulary entries; by default the tokenizer's."""
    norm_epsilon: float = 1e-5
    """Epsilon of the norms."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights."""
    untie_embeddings_and_output_weights: bool = True
    """Give the output projection its own weights instead of the embedding's."""

    @property
    @abstractmethod
    def title(self) -> str:
        """The family's name in printed text."""

    @property
    @abstractmethod
    def footprint(self) -> Footprint:
        """Activation sizes of the family, for the planner's memory model."""

    @property
    @abstractmethod
    def positions(self) -> str:
        """Source of token positions, such as rope, as checkpoints record it."""

    @abstractmethod
    def block(self, layer: int, cores: HybridAttention) -> nn.Module:
        """Build one layer (0 is the first): a module (x, positions, mask, states) -> [B, T, C]."""

    linear_attention = False
    """True if attention keeps a state instead of keys and values; in a hybrid, in most layers.
    """
    delta_rule = False
    """True if layers without softmax attention use a gated delta rule."""
    joint_qk_norm = False
    """True if queries (and keys) are normalised over all heads at once."""
    softmax_type = "vanilla"
    """Denominator of the softmax; ``model.parts.settings.WindowedConfig`` makes it a setting."""

    def __post_init__(self) -> None:
        family = type(self).model_type
        require(
            self,
            self.model_type == family,
            "model_type",
            f"it must be {family}, to which the other settings belong",
        )
        self.check()
        self.adapted_linears()

    def check(self) -> None:
        """Check the settings; an override calls this method first. Raises UserError."""
        heads = self.num_attention_heads
        at_least(self, 1, "num_layers", "hidden_size", "num_attention_heads")
        self.check_counts("ffn_hidden_size", "num_query_groups", "kv_channels", "vocab_size")
        for name in ("norm_epsilon", "init_method_std"):
            in_range = 0 < getattr(self, name) < math.inf
            require(self, in_range, name, "it must be a number above 0")

        divides = self.kv_channels is not None or self.hidden_size % heads == 0
        must = (
            f"it must be a multiple of num_attention_heads {heads}; "
            "change one of them, or set kv_channels"
        )
        require(self, divides, "hidden_size", must)

        divides = heads % self.query_groups == 0
        must = f"it must be a divisor of num_attention_heads {heads}, such as 1"
        require(self, divides, "num_query_groups", must)

    def check_counts(self, *names: str) -> None:
        """Check settings that must be 1 or more, or left out. Raises UserError."""
        must = "it must be 1 or more, or left out for its default"
        for name in names:
            value = getattr(self, name)
            require(self, value is None or value >= 1, name, must)

    def is_default(self, name: str) -> bool:
        """Return True if a setting has its default value."""
        return bool(getattr(self, name) == getattr(type(self), name))

    @property
    def max_position_embeddings(self) -> int | None:
        """Number of positions that the model is made for or has in a table; None if unlimited."""
        return None

    @property
    def learned_positions(self) -> bool:
        """True if positions are learned embeddings."""
        return False

    @property
    def rope(self) -> RopeConfig | None:
        """Rope settings of softmax attention; None without rope."""
        return None

    @property
    def reach(self) -> int:
        """Longest sequence that the model or its rope scaling is meant for; 0 if unknown."""
        return self.max_position_embeddings or 0

    def with_rope_length(self: C, length: int) -> C:
        """Return a copy with dynamic rope scaling for this length; without such scaling, itself."""
        return self

    @property
    def local_rope(self) -> RopeConfig | None:
        """Rope settings of layers with a window; None if these use the model's rope settings."""
        return None

    @property
    def softmax_period(self) -> int | None:
        """Number of layers from one softmax layer to the next; None if all layers are alike."""
        return None

    @property
    def own_softmax_layout(self) -> bool:
        """True if softmax layers may shard tokens differently from linear layers."""
        return False

    def norm(self, width: int | None = None) -> nn.Module:
        """Build a norm, by default with the width of the residual stream."""
        return RMSNorm(width or self.hidden_size, eps=self.norm_epsilon)

    def head_norm(self, heads: int) -> nn.Module:
        """Build the norm of each head of queries or keys; all heads share its weight."""
        return self.norm(self.head_dim)

    def joint_norm(self, heads: int) -> nn.Module:
        """Build the norm of the queries or keys of all heads at once."""
        return JointRMSNorm(heads * self.head_dim, eps=self.norm_epsilon)

    def attention(self, layer: int, attend: Attend, **settings: Any) -> Attention:
        """Build the softmax attention of a layer; ``settings`` are arguments of ``Attention``."""
        softmax_type: Any = self.softmax_type
        return Attention(
            self.hidden_size,
            self.num_attention_heads,
            self.query_groups,
            self.head_dim,
            attend,
            window=self.window(layer),
            softmax_type=softmax_type,
            layer=layer,
            **settings,
        )

    def cores(self, attend: Attend | LinearAttend | HybridAttention | None) -> HybridAttention:
        """Return the linear and the softmax attention core, by default those for one device.

        If ``attend`` is a single core, it becomes the linear one in a model with linear attention,
        else the softmax one.
        """
        if attend is None:
            return HybridAttention()
        if isinstance(attend, HybridAttention):
            return attend
        core: Any = attend
        if self.linear_attention:
            return HybridAttention(linear=core)
        return HybridAttention(softmax=core)

    def embedding_scale(self, dtype: torch.dtype) -> float | None:
        """Return the factor by which embeddings of this dtype are multiplied; None means 1."""
        return None

    @property
    def logits_scale(self) -> float | None:
        """Factor of the logits, applied to the input of the output projection; None means 1."""
        return None

    def added_positions(self) -> nn.Module | None:
        """Build the module of position vectors that are added to the embeddings, or None."""
        return None

    @property
    def recurrent(self) -> bool:
        """True if some layers keep a state of constant size instead of keys and values."""
        return self.linear_attention or self.delta_rule

    @property
    def some_softmax(self) -> bool:
        """True if some layer has softmax attention."""
        return any(map(self.has_softmax, range(self.num_layers)))

    def has_softmax(self, layer: int) -> bool:
        """Return True if this layer, counted from 0, has softmax attention."""
        return True

    def window(self, layer: int) -> Window | None:
        """Return a layer's window; None if it has no window or no softmax attention."""
        return None

    @property
    def windows(self) -> tuple[Window | None, ...]:
        """Window of each layer."""
        return tuple(map(self.window, range(self.num_layers)))

    @property
    def alternating(self) -> dict[str, Any]:
        """Settings with which two kinds of layers take turns; empty if all layers are alike.

        The parity tool sets them in small copies of a model, so that two layers have both kinds.
        """
        return {}

    @property
    def linears(self) -> tuple[str, ...]:
        """Names of the linear modules in a layer that may get an adapter."""
        return ("wq", "wk", "wv", "wo", "gate", "up", "down")

    def adapted_linears(self) -> tuple[str, ...]:
        """Return the names of a layer's linear modules with adapters; empty without lora_rank."""
        return self.adapted(self.linears, self.hidden_size)

    @property
    def position_table(self) -> int | None:
        """Number of entries in the table of learned positions; None if there is no table."""
        return self.max_position_embeddings if self.learned_positions else None

    @cached_property
    def head_dim(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def rotary_dim(self) -> int:
        """Number of channels of a head that rope rotates."""
        return self.head_dim

    @property
    def query_groups(self) -> int:
        """Number of key and value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """Inner width of the feed-forward.

        By default it is 8/3 of hidden_size, rounded up to a multiple of 64. With 8/3, SwiGLU's
        three matrices have as many weights as the two of a GELU feed-forward with 4 x hidden_size.
        """
        return self.ffn_hidden_size or 64 * math.ceil(8 * self.hidden_size / 3 / 64)

    @property
    def shared_sizes(self) -> dict[str, int]:
        """Sizes of a layer that tensor parallelism divides, keyed by setting."""
        return {"num_attention_heads": self.num_attention_heads, "ffn_hidden_size": self.ffn_size}

    @property
    def vocabulary(self) -> int:
        """Number of vocabulary entries; raises UserError if not set."""
        if self.vocab_size is None:
            raise UserError("vocab_size is not set; set it, or give a tokenizer that determines it")
        return self.vocab_size

    @property
    def recurrent_layers(self) -> int:
        """Number of layers that keep a state of constant size."""
        return sum(not self.has_softmax(layer) for layer in range(self.num_layers))

    @property
    def state_elements(self) -> int:
        """Number of elements in the states of all layers, per sequence."""
        return 0

    def architecture(self) -> Architecture:
        """Return all settings that determine the model's shapes and computation, defaults resolved.

        A checkpoint can be loaded if its entries are equal to these. Checkpoints written before a
        setting existed lack its entry, so the entry is left out here if the setting has the value
        with which they were trained.
        """
        entries = self.resolved(
            "model_type",
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
            "vocab_size",
            "norm_epsilon",
            "untie_embeddings_and_output_weights",
        )
        entries["position_embedding_type"] = self.positions
        entries["max_position_embeddings"] = self.position_table
        # Every checkpoint has this entry, so families without rope write the default.
        entries["rotary_base"] = RopeConfig.rotary_base
        if self.lora_rank is not None:
            entries["lora_rank"] = self.lora_rank
            entries["lora_scale"] = self.lora_scale
            entries["lora_target"] = ",".join(self.adapted_linears())
        return entries

    def resolved(self, *names: str) -> Architecture:
        """Return the values of settings, keyed by name, with defaults for those left out."""
        properties: dict[str, str] = {}
        for cls in reversed(type(self).__mro__):
            properties |= vars(cls).get("RESOLVED", {})
        return {name: getattr(self, properties.get(name, name)) for name in names}


DELTA_SIZES: Mapping[str, str] = {
    "linear_num_key_heads": "key_heads",
    "linear_num_value_heads": "value_heads",
    "linear_key_head_dim": "key_dim",
    "linear_value_head_dim": "value_dim",
}
