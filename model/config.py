"""The configuration that decoders of every family share, with Megatron-LM's names.

A family adds settings of its own in its file of model/families.
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
"""Settings that decide a model's shapes and function, as checkpoints record them."""


class Footprint(NamedTuple):
    """Numbers of a family that the planner's model of memory takes."""

    fused_residual: float
    """``planner.step_memory.StepShape.residual`` if norms are kernels: inputs and outputs of both,
    and more."""
    gated: bool
    """True if the feed-forward has a gate."""
    first_layer: float = 0.0
    """``planner.step_memory.StepShape.first_layer``: what the first layer keeps beyond the
    others."""
    output_gate: float = 0.0
    """Widths of the queries that a gate of attention's output keeps, beside layers with a delta
    rule."""
    qk_norms: float = 0.0
    """Copies of the queries and keys that their norms keep, beside layers with a delta rule; 2 in
    float32."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(LoraConfig, ABC):
    """Family and shape of the model."""

    RESOLVED: ClassVar[Mapping[str, str]] = {
        "ffn_hidden_size": "ffn_size",
        "num_query_groups": "query_groups",
        "kv_channels": "head_dim",
        "vocab_size": "vocabulary",
    }
    """Fields that may be left out, and the properties that resolve them; a class states its own."""

    model_type: str = ""
    """Family of the model, which decides the other settings."""
    num_layers: int = 4
    """Transformer layers."""
    hidden_size: int = 256
    """Width of the residual stream."""
    ffn_hidden_size: int | None = None
    """Width inside the feed-forward; by default 8/3 of hidden_size, rounded up to a multiple of 64;
    4 x without a gate."""
    num_attention_heads: int = 8
    """Query heads."""
    num_query_groups: int | None = None
    """Key and value heads (grouped-query attention); by default one per query head."""
    kv_channels: int | None = None
    """Width of one head; by default hidden_size / num_attention_heads."""
    vocab_size: int | None = None
    """Vocabulary entries; by default the tokenizer's."""
    norm_epsilon: float = 1e-5
    """Epsilon of the norms."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights."""
    untie_embeddings_and_output_weights: bool = True
    """Give the output projection weights of its own, not the embedding's."""

    @property
    @abstractmethod
    def title(self) -> str:
        """The family's name on the screen."""

    @property
    @abstractmethod
    def footprint(self) -> Footprint:
        """Numbers of the family that the planner takes."""

    @property
    @abstractmethod
    def positions(self) -> str:
        """Source of tokens' positions, as checkpoints record it."""

    @abstractmethod
    def block(self, layer: int, attends: HybridAttention) -> nn.Module:
        """Build a layer, counted from 0, of [B, T, C] -> [B, T, C]; it takes (x, places, mask,
        states)."""

    linear_attention = False
    """True if attention keeps a state instead of keys and values; in a hybrid, in most layers."""
    delta_rule = False
    """True if layers without softmax attention have a gated delta rule."""
    joint_qk_norm = False
    """True if a norm takes the queries, or the keys, of all heads at once."""
    softmax_type = "vanilla"
    """Divisor of softmax attention's weights, which ``model.parts.settings.WindowedConfig`` makes a
    setting."""

    def __post_init__(self) -> None:
        family = type(self).model_type
        require(
            self,
            self.model_type == family,
            "model_type",
            f"the settings are those of model_type {family}",
        )
        self.check()
        self.adapted_linears()

    def check(self) -> None:
        """Check the settings; a family checks its own after these. Raises UserError."""
        heads = self.num_attention_heads
        at_least(self, 1, "num_layers", "hidden_size", "num_attention_heads")
        self.check_counts("ffn_hidden_size", "num_query_groups", "kv_channels", "vocab_size")
        for name in ("norm_epsilon", "init_method_std"):
            require(self, 0 < getattr(self, name) < math.inf, name, "it must be a number above 0")
        must = f"it must be a multiple of num_attention_heads {heads}; change either, or set kv_channels"
        require(
            self, self.kv_channels is not None or self.hidden_size % heads == 0, "hidden_size", must
        )
        require(
            self,
            heads % self.query_groups == 0,
            "num_query_groups",
            f"it must divide num_attention_heads {heads}",
        )

    def check_counts(self, *names: str) -> None:
        """Check settings that are 1 or more, or left out. Raises UserError."""
        for name in names:
            value = getattr(self, name)
            require(
                self,
                value is None or value >= 1,
                name,
                "it must be 1 or more, or left out for its default",
            )

    def is_default(self, name: str) -> bool:
        """Return whether a setting has its default."""
        return bool(getattr(self, name) == getattr(type(self), name))

    @property
    def max_position_embeddings(self) -> int | None:
        """Positions that the model is meant for, or has in a table."""
        return None

    @property
    def learned_positions(self) -> bool:
        """Return whether positions are learned embeddings."""
        return False

    @property
    def rope(self) -> RopeConfig | None:
        """Rope of softmax attention; None if nothing turns."""
        return None

    @property
    def reach(self) -> int:
        """Positions that the model is meant for or its scaling of rope reaches; 0 if it says
        neither."""
        return self.max_position_embeddings or 0

    def with_rope_length(self: C, length: int) -> C:
        """Return the configuration with a length for dynamic scaling of rope, if it needs one and
        has none."""
        return self

    @property
    def local_rope(self) -> RopeConfig | None:
        """Rope of the layers with a window, if it is not that of the others."""
        return None

    @property
    def softmax_period(self) -> int | None:
        """Layers from one with softmax attention to the next; None if all have the same
        attention."""
        return None

    @property
    def own_softmax_layout(self) -> bool:
        """Return whether layers of softmax attention may lie in another layout than those of linear
        attention."""
        return False

    def norm(self, width: int | None = None) -> nn.Module:
        """Build a norm, by default of the residual stream."""
        return RMSNorm(width or self.hidden_size, eps=self.norm_epsilon)

    def head_norm(self, heads: int) -> nn.Module:
        """Build the norm of each of so many heads of queries or keys."""
        return self.norm(self.head_dim)

    def joint_norm(self, heads: int) -> nn.Module:
        """Build the norm of so many heads of queries or keys at once."""
        return JointRMSNorm(heads * self.head_dim, eps=self.norm_epsilon)

    def attention(self, layer: int, attend: Attend, **settings: Any) -> Attention:
        """Build the softmax attention of a layer; ``settings`` are those of ``Attention`` that the
        family chooses."""
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
        """Return both cores of attention, of which a model that is no hybrid needs one; by default
        of one device."""
        if attend is None:
            return HybridAttention()
        if isinstance(attend, HybridAttention):
            return attend
        core: Any = attend
        return (
            HybridAttention(linear=core) if self.linear_attention else HybridAttention(softmax=core)
        )

    def embedding_scale(self, dtype: torch.dtype) -> float | None:
        """Return the factor of embeddings of this dtype; None is 1."""
        return None

    @property
    def logits_scale(self) -> float | None:
        """Factor of the logits, applied to what the output projection takes; None is 1."""
        return None

    def added_positions(self) -> nn.Module | None:
        """Build the function of positions that is added to embeddings; None if there is none."""
        return None

    @property
    def recurrent(self) -> bool:
        """Return whether some layers keep a state of constant size, not keys and values."""
        return self.linear_attention or self.delta_rule

    @property
    def some_softmax(self) -> bool:
        """Return whether some layer has softmax attention."""
        return any(map(self.has_softmax, range(self.num_layers)))

    def has_softmax(self, layer: int) -> bool:
        """Return whether this layer, counted from 0, has softmax attention."""
        return True

    def window(self, layer: int) -> Window | None:
        """Return the window of this layer, counted from 0; None if it sees all earlier tokens, or
        is linear."""
        return None

    @property
    def windows(self) -> tuple[Window | None, ...]:
        """Return the window of each layer, as ``window``."""
        return tuple(map(self.window, range(self.num_layers)))

    @property
    def alternating(self) -> dict[str, Any]:
        """Settings with which layers of two kinds take turns; none if all layers are of one
        kind."""
        return {}

    @property
    def linears(self) -> tuple[str, ...]:
        """The linear layers of a layer that may get an adapter, by their names."""
        return ("wq", "wk", "wv", "wo", "gate", "up", "down")

    def adapted_linears(self) -> tuple[str, ...]:
        """Return the linear layers that get an adapter, by their names in a layer; none without
        lora_rank."""
        return self.adapted(self.linears, self.hidden_size)

    @property
    def position_table(self) -> int | None:
        """Entries in the table of learned positions; None without one."""
        return self.max_position_embeddings if self.learned_positions else None

    @cached_property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that rope turns."""
        return self.head_dim

    @property
    def query_groups(self) -> int:
        """Key and value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """Width inside the feed-forward; 8/3 of hidden_size gives SwiGLU's three matrices the size
        of a GELU's two."""
        return self.ffn_hidden_size or 64 * math.ceil(8 * self.hidden_size / 3 / 64)

    @property
    def shared_sizes(self) -> dict[str, int]:
        """Sizes of a layer that tensor parallelism divides, by their settings."""
        return {"num_attention_heads": self.num_attention_heads, "ffn_hidden_size": self.ffn_size}

    @property
    def vocabulary(self) -> int:
        """Vocabulary entries; raises UserError if not set."""
        if self.vocab_size is None:
            raise UserError("vocab_size is not set; give it, or a tokenizer to take it from")
        return self.vocab_size

    @property
    def recurrent_layers(self) -> int:
        """Layers that keep a state of constant size."""
        return sum(not self.has_softmax(layer) for layer in range(self.num_layers))

    @property
    def state_elements(self) -> int:
        """Elements of the states of all layers, per sequence."""
        return 0

    def architecture(self) -> Architecture:
        """Return all that decides the model's shapes and function, defaults resolved; if equal,
        checkpoints fit.

        An entry that older checkpoints lack is left out where it has its old meaning.
        """
        names = (
            *("model_type", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"),
            *(
                "num_query_groups",
                "kv_channels",
                "vocab_size",
                "norm_epsilon",
                "untie_embeddings_and_output_weights",
            ),
        )
        entries = self.resolved(*names)
        entries |= {
            "position_embedding_type": self.positions,
            "max_position_embeddings": self.position_table,
        }
        entries["rotary_base"] = (
            RopeConfig.rotary_base
        )  # in every checkpoint, also of families without rope
        if self.lora_rank is not None:
            targets = ",".join(self.adapted_linears())
            entries |= {
                "lora_rank": self.lora_rank,
                "lora_scale": self.lora_scale,
                "lora_target": targets,
            }
        return entries

    def resolved(self, *names: str) -> Architecture:
        """Return the values of settings, those that may be left out resolved."""
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
