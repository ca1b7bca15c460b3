"""The configuration of language models of every kind, with Megatron-LM's names.

model/registry.py maps each model_type to its module.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from model.parts.lora import LoraConfig
from model.parts.rope import RopeConfig
from model.parts.windows import Window, WindowConfig, window_of, windows_of
from model.traits import EVERY, HYBRIDS, SIZES, TRAITS, DeltaConfig, Traits
from runtime.errors import UserError, at_least, require, wrong

OWN = {
    "linear_decay": (("transnormer",), "has no decay; leave it out, or set model_type to transnormer"),
    "no_scale_embedding": (("transnormer", "linear_transformer"), "scales no embeddings; leave it out"),
    "add_qkv_bias": (("llama",), "has none of its own; leave it out"),
    "qk_layernorm": (("llama",), "has none of its own; leave it out"),
    "softmax_every": (
        ("transnormer", *HYBRIDS),
        "has one kind of attention; leave it out, or set model_type to transnormer, qwen3_5 or olmo_hybrid",
    ),
    "rotary_percent": (("qwen3_5",), "turns all channels of a head, or none; leave it out"),
    "rotary_base_local": (("gemma3", "olmo3"), "has one rope for all layers; leave it out"),
    "query_pre_attn_scalar": (("gemma3",), "scales by the width of a head; leave it out"),
}
OWN |= dict.fromkeys(
    (*SIZES, "linear_conv_kernel_dim", "linear_gate"),
    (HYBRIDS, "has no delta rule; leave it out, or set model_type to qwen3_5 or olmo_hybrid"),
)
"""Settings of some kinds of model alone: these, and the words for the others."""
COUNTS = (
    *("ffn_hidden_size", "num_query_groups", "kv_channels", "vocab_size", "max_position_embeddings"),
    "query_pre_attn_scalar",
)
"""Settings that are 1 or more, or left out."""
LINEARS = ("wq", "wk", "wv", "wu", "wb", "wa", "wo", "gate", "up", "down")
"""Linear layers of a layer, of which a kind of model may lack some."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(RopeConfig, LoraConfig, DeltaConfig, WindowConfig):
    """Kind and shape of the model."""

    model_type: Literal[
        "llama", "gpt", "transnormer", "linear_transformer", "gemma3", "olmo3", "qwen3_5", "olmo_hybrid"
    ] = "llama"
    """llama: RMSNorm, SwiGLU, no biases; gpt: LayerNorm, GELU, biases; transnormer: TransNormerLLM, and
    linear_transformer: a gpt with elu + 1 features, both with linear attention in the place of softmax attention;
    gemma3 and olmo3: LLaMAs with other norms, whose layers with a window have rope of their own; qwen3_5 and
    olmo_hybrid: LLaMAs in which three layers of four have a gated delta rule."""
    num_layers: int = 4
    """Transformer layers."""
    hidden_size: int = 256
    """Width of the residual stream."""
    ffn_hidden_size: int | None = None
    """Width inside the feed-forward; by default 8/3 of hidden_size, rounded up to a multiple of 64; 4 x in a gpt and
    a linear_transformer."""
    num_attention_heads: int = 8
    """Query heads."""
    num_query_groups: int | None = None
    """Key and value heads (grouped-query attention); by default one per query head."""
    kv_channels: int | None = None
    """Width of one head; by default hidden_size / num_attention_heads."""
    vocab_size: int | None = None
    """Vocabulary entries; by default the tokenizer's."""
    position_embedding_type: Literal["rope", "learned_absolute"] | None = None
    """Source of tokens' places; by default rope, and learned_absolute in a gpt, which alone has it."""
    max_position_embeddings: int | None = None
    """Entries in the table of learned_absolute positions, and so the longest sequence; with rope the longest that the
    model is meant for, beyond which a run begins with a note."""
    add_qkv_bias: bool = False
    """Give the projections of queries, keys and values biases in a llama, as Qwen2 has them."""
    query_pre_attn_scalar: int | None = None
    """Number by whose root the scores of a gemma3's attention are divided; by default the width of a head."""
    qk_layernorm: bool = False
    """Normalise each head's queries and keys by an RMS norm in a llama, as Qwen3 does."""
    softmax_every: int | None = None
    """Give every so many-th layer of a transnormer softmax attention with rope (a hybrid: 8 is seven linear layers,
    then one of softmax); by default none has it, and in a qwen3_5 or olmo_hybrid every fourth."""
    linear_decay: Literal["released", "paper"] | None = None
    """Decay of a transnormer's heads: as its released models do, the default, or as its paper writes."""
    no_scale_embedding: bool = False
    """Leave the embeddings of a model with linear attention as they are, not times the root of hidden_size."""
    norm_epsilon: float = 1e-5
    """Epsilon of the norms."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights."""
    untie_embeddings_and_output_weights: bool = True
    """Give the output projection weights of its own, not the embedding's."""

    def __post_init__(self) -> None:
        heads = self.num_attention_heads
        at_least(self, 1, "num_layers", "hidden_size", "num_attention_heads")
        self._check_counts(*COUNTS)
        for name in ("rotary_base", "norm_epsilon", "init_method_std"):
            require(self, 0 < getattr(self, name) < math.inf, name, "it must be a number above 0")
        require(self, 0 < self.rotary_percent <= 1, "rotary_percent", "it must be above 0, and 1 (all) at most")
        must = f"it must be a multiple of num_attention_heads {heads}; change either, or set kv_channels"
        require(self, self.kv_channels is not None or self.hidden_size % heads == 0, "hidden_size", must)
        require(self, heads % self.query_groups == 0, "num_query_groups", f"it must divide num_attention_heads {heads}")
        self._check_kind()
        self._check_softmax()
        self._check_positions()
        self.check_rope(self.rotary_dim, rotates=self.rotates)
        self.adapted_linears()

    def _check_kind(self) -> None:
        """Check settings that need linear attention, and those that it excludes."""
        kind, every, heads = self.model_type, self.softmax_period, self.num_attention_heads
        for name, (kinds, why) in OWN.items():
            require(self, kind in kinds or self._is_default(name), name, f"model_type {kind} {why}")
        if self.softmax_every is None and every is not None:
            must = f"{kind} has softmax attention in every {EVERY}th layer, and needs as many; or set softmax_every"
            require(self, every <= self.num_layers, "num_layers", must)
        elif every is not None and not 2 <= every <= self.num_layers:
            raise wrong(
                self,
                "softmax_every",
                f"it must be from 2 (every other layer) to num_layers {self.num_layers} (the last one alone), or left "
                f"out{f' for {EVERY}' * self.traits.delta}; softmax attention in every layer is model_type llama",
            )
        if self.traits.delta:
            self._check_delta()
        if not self.linear_attention:
            return
        must = f"linear attention has one key head per query head, {heads} here; leave it out"
        require(self, self.query_groups == heads, "num_query_groups", must)
        own = "LRPE" if kind == "transnormer" else "sinusoidal"
        settings = ("position_embedding_type", "max_position_embeddings", "rotary_base")
        for name in settings if every is None else settings[:2]:
            must = f"model_type {kind} has {own} positions, which take no settings; leave it out"
            require(self, self._is_default(name), name, must)
        even = kind != "linear_transformer" or self.hidden_size % 2 == 0
        require(self, even, "hidden_size", "it must be even: sinusoidal positions come in pairs")

    def _check_delta(self) -> None:
        """Check the heads of layers with a gated delta rule."""
        self._check_counts(*SIZES)
        at_least(self, 1, "linear_conv_kernel_dim")
        keys, values = self.key_heads, self.value_heads
        must = f"it must be a multiple of linear_num_key_heads {keys}"
        require(self, values % keys == 0, "linear_num_value_heads", must)
        must = f"a gate per channel takes one key head per value head, {values} here and {keys}; leave it out"
        require(self, values == keys or self.linear_gate == "per_head", "linear_gate", must)
        if self.traits.positions == "none":
            for name in ("position_embedding_type", "rotary_base"):
                must = f"model_type {self.model_type} has no positions but the order of its tokens; leave it out"
                require(self, self._is_default(name), name, must)

    def _check_counts(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            require(self, value is None or value >= 1, name, "it must be 1 or more, or left out for its default")

    def _check_softmax(self) -> None:
        """Check windows and sinks, which layers of softmax attention alone have."""
        must = (
            f"model_type {self.model_type} has linear attention, which divides by no softmax and keeps no keys; leave "
            "it out, or give a transnormer layers of softmax attention by softmax_every"
        )
        for name in ("window_size", "softmax_type"):
            require(self, self.some_softmax or self._is_default(name), name, must)
        has = any(map(self.window, range(len(self._windows)))) or window_of(self.window_size) is None
        must = "it leaves no layer of softmax attention with the window; give one of them a 1, or leave window_size out"
        require(self, has, "window_attn_skip_freq", must)

    def _check_positions(self) -> None:
        """Check the settings of positions that softmax attention has: a table of learned ones, or rope."""
        local = self.rotary_base_local
        must = "it must be a number above 0, or left out for rotary_base"
        require(self, local is None or 0 < local < math.inf, "rotary_base_local", must)
        must = "no layer has a window, which alone takes it; leave it out, or give --window-size"
        require(self, local is None or any(self._windows), "rotary_base_local", must)
        if self.rotates:
            width = self.rotary_dim
            must = f"{width} of {self.head_dim} channels would turn, which must be an even number above 0"
            require(self, width > 0 and (self.rotary_percent == 1 or width % 2 == 0), "rotary_percent", must)
            width, name = self.head_dim, "hidden_size" if self.kv_channels is None else "kv_channels"
            heads = f"the {self.num_attention_heads} heads are {width} wide"
            must = f"{heads}, which must be even: rotary positions turn channels in pairs"
            require(self, self.rotary_percent < 1 or width % 2 == 0, name, must)
        if not self.learned_positions:
            return
        must = f"model_type {self.model_type} has rope alone; leave it out, or set model_type to gpt"
        require(self, self.model_type == "gpt", "position_embedding_type", must)
        must = (
            "learned_absolute positions need the length of their table; set it to the longest sequence, or "
            "position_embedding_type to rope"
        )
        require(self, self.max_position_embeddings is not None, "max_position_embeddings", must)
        must = "learned_absolute positions turn nothing; leave it out, or set position_embedding_type to rope"
        require(self, self._is_default("rotary_base"), "rotary_base", must)

    def _is_default(self, name: str) -> bool:
        return bool(getattr(self, name) == getattr(type(self), name))

    @property
    def linear_attention(self) -> bool:
        """Return whether attention is linear, with a state instead of keys and values; in a hybrid, in most layers."""
        return self.traits.positions in ("lrpe", "sinusoidal")

    @property
    def traits(self) -> Traits:
        """Properties that the kind of model fixes."""
        return TRAITS[self.model_type]

    @property
    def softmax_period(self) -> int | None:
        """Layers from one with softmax attention to the next; None if all have the same attention."""
        if self.softmax_every is not None:
            return self.softmax_every
        return EVERY if self.traits.delta else None

    @property
    def own_softmax_layout(self) -> bool:
        """Return whether layers of softmax attention may lie in another layout than those of linear attention."""
        return self.linear_attention and self.softmax_every is not None

    @property
    def recurrent(self) -> bool:
        """Return whether some layers keep a state of constant size, not keys and values."""
        return self.linear_attention or self.traits.delta

    @property
    def some_softmax(self) -> bool:
        """Return whether some layer has softmax attention."""
        return not self.linear_attention or self.softmax_every is not None

    def has_softmax(self, layer: int) -> bool:
        """Return whether this layer, counted from 0, has softmax attention."""
        every = self.softmax_period
        return not self.linear_attention if every is None else (layer + 1) % every == 0

    def window(self, layer: int) -> Window | None:
        """Return the window of this layer, counted from 0; None if it sees all earlier tokens, or is linear."""
        return self._windows[layer] if self.has_softmax(layer) else None

    @property
    def windows(self) -> tuple[Window | None, ...]:
        """Return the window of each layer, as ``window``."""
        return tuple(map(self.window, range(self.num_layers)))

    @property
    def _windows(self) -> tuple[Window | None, ...]:
        return windows_of(self.window_size, self.window_attn_skip_freq, self.num_layers)

    def adapted_linears(self) -> tuple[str, ...]:
        """Return the linear layers that get an adapter, by their names in a layer; none without lora_rank."""
        traits = self.traits
        has = {
            "wu": traits.delta or traits.positions == "lrpe",
            "wb": traits.delta,
            "wa": traits.delta and self.linear_gate == "per_head",  # per channel through a bottleneck
            "gate": traits.feed_forward != "gelu",
        }
        return self.adapted(tuple(name for name in LINEARS if has.get(name, True)), self.hidden_size)

    @property
    def learned_positions(self) -> bool:
        """Return whether positions are learned embeddings, not rotary."""
        return (self.position_embedding_type or self.traits.positions) == "learned_absolute"

    @property
    def rotates(self) -> bool:
        """Return whether queries and keys of softmax attention are turned by their positions."""
        return self.some_softmax and not self.learned_positions and self.traits.positions != "none"

    @cached_property
    def local_rope(self) -> RopeConfig | None:
        """Rope of the layers with a window, where it is not that of the others."""
        if not self.traits.local_rope or not any(self._windows):
            return None
        return RopeConfig(rotary_base=self.rotary_base_local or self.rotary_base)

    @property
    def query_scalar(self) -> int:
        """Number by whose root attention's scores are divided."""
        return self.query_pre_attn_scalar or self.head_dim

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
        return int(self.head_dim * self.rotary_percent)

    @property
    def key_heads(self) -> int:
        """Key heads of a delta rule."""
        return self.linear_num_key_heads or self.num_attention_heads

    @property
    def value_heads(self) -> int:
        """Value heads of a delta rule."""
        return self.linear_num_value_heads or self.key_heads

    @property
    def key_dim(self) -> int:
        """Width of a delta rule's key head."""
        return self.linear_key_head_dim or self.head_dim

    @property
    def value_dim(self) -> int:
        """Width of a delta rule's value head."""
        return self.linear_value_head_dim or self.key_dim

    @property
    def query_groups(self) -> int:
        """Key and value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """Width inside the feed-forward; 8/3 of hidden_size gives SwiGLU's three matrices the size of a GELU's two."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        wide = self.traits.feed_forward == "gelu"
        return 4 * self.hidden_size if wide else 64 * math.ceil(8 * self.hidden_size / 3 / 64)

    @property
    def vocabulary(self) -> int:
        """Vocabulary entries; raises UserError if not set."""
        if self.vocab_size is None:
            raise UserError("vocab_size is not set; give it, or a tokenizer to take it from")
        return self.vocab_size


RESOLVED = {
    "ffn_hidden_size": "ffn_size",
    "num_query_groups": "query_groups",
    "kv_channels": "head_dim",
    "vocab_size": "vocabulary",
    "softmax_every": "softmax_period",
    "query_pre_attn_scalar": "query_scalar",
    **dict(zip(SIZES, ("key_heads", "value_heads", "key_dim", "value_dim"), strict=True)),
}
"""Fields that may be left out, and the properties that resolve them."""
