"""SmolLM3 (Hugging Face, July 2025): a LLaMA without rope in every fourth layer.

In those layers only the causal mask tells the order of tokens (NoPE, arXiv:2501.18795).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from model.config import Architecture, Footprint
from model.families.family import ModelFamily
from model.hf.common import NAMES, SILU, fields
from model.hf.entries import entry, unsupported
from model.hf.family import TOKEN_IDS, Contents, Family, KeyGroup, Need
from model.hf.parts import LISTED, ROPE, WHOLE, rope_from_hf, rope_to_hf
from model.parts.attention import HybridAttention
from model.parts.blocks import PreNormLayer
from model.parts.feed_forward import SwiGLU
from model.parts.settings import RopePositionsConfig, WindowedConfig
from model.parts.windows import Pattern, layers_of
from runtime.errors import require

WITHOUT_ROPE = Pattern(
    name="no_rope_freq",
    nth="has no rope",
    listed="no rope",
    example="([0]*3+[1]*1)*9 for 36 layers",
    nth_is_one=True,
    lacking="rope",
    otherwise="left out for 4",
)


@dataclass(frozen=True, kw_only=True)
class SmolLM3Config(WindowedConfig, RopePositionsConfig):
    """A SmolLM3: a LLaMA without rope in every fourth layer."""

    model_type: str = "smollm3"
    no_rope_freq: str = "4"
    """Layers without rope: a number N means every N-th layer; a pattern has a 1 for each layer
    without rope and a 0 for each layer with it, such as `([0]*3+[1]*1)*9` for 36 layers."""

    title = "SmolLM3"
    footprint = Footprint(fused_residual=4.0, gated=True)

    def check(self) -> None:
        """Check that some layer has rope."""
        super().check()
        has_rope = any(self.layers_with_rope)
        require(self, has_rope, "no_rope_freq", "it leaves no layer with rope; give some layer a 0")

    @property
    def layers_with_rope(self) -> list[bool]:
        """For each layer, True if it rotates queries and keys."""
        without_rope = layers_of(self.no_rope_freq, self.num_layers, WITHOUT_ROPE)
        return [not skips for skips in without_rope]

    @property
    def alternating(self) -> dict[str, Any]:
        """Settings that take rope from every other layer, or from none if all layers have it."""
        every = 2
        if all(self.layers_with_rope):
            every = self.num_layers + 1  # no layer has this number
        return {"no_rope_freq": str(every)}

    def block(self, layer: int, cores: HybridAttention) -> nn.Module:
        attention = self.attention(layer, cores.softmax, rotates=self.layers_with_rope[layer])
        return PreNormLayer(self.norm, attention, SwiGLU(self.hidden_size, self.ffn_size))

    def architecture(self) -> Architecture:
        """Return the base class's entries, and the layers without rope."""
        flags = ",".join("0" if has_rope else "1" for has_rope in self.layers_with_rope)
        return super().architecture() | {"no_rope_freq": f"[{flags}]"}


def _layers_from_hf(hf: Contents, settings: dict[str, Any]) -> dict[str, Any]:
    """Return Longmesh's setting no_rope_freq, which selects the layers without rope.

    transformers has an interval or a list no_rope_layers, which despite its name has a 1 for each
    layer with rope. A list that selects the same layers as the interval becomes the interval.
    """
    count = settings["num_layers"]
    layers = min(count, LISTED)
    interval = entry(hf, "no_rope_layer_interval", int, 4)
    kinds = hf.get("layer_types")
    if kinds is not None and kinds != [WHOLE] * layers:
        raise unsupported("layer_types", kinds, f"; only {WHOLE} for each layer is")

    flags = hf.get("no_rope_layers")
    if flags is None:
        if interval < 2:
            rest = "; only 2 or more is, since some layers must have rope"
            raise unsupported("no_rope_layer_interval", interval, rest)
        return {"no_rope_freq": str(interval)}

    are_flags = isinstance(flags, list) and all(
        type(flag) is int and flag in (0, 1) for flag in flags
    )
    if not are_flags or len(flags) < count or not any(flags[:layers]):
        rest = f"; it must be a list with a 1 or a 0 for each of {count} layers, and some 1"
        raise unsupported("no_rope_layers", flags, rest)
    flags = flags[:layers]
    if interval >= 2:
        flags_of_interval = [int(number % interval != 0) for number in range(1, layers + 1)]
        if flags == flags_of_interval:
            return {"no_rope_freq": str(interval)}
    inverted = ",".join(str(1 - flag) for flag in flags)
    return {"no_rope_freq": f"[{inverted}]"}


def _layers_to_hf(config: SmolLM3Config) -> dict[str, Any]:
    entries: dict[str, Any] = {
        "no_rope_layers": [int(has_rope) for has_rope in config.layers_with_rope],
        "layer_types": [WHOLE] * config.num_layers,
    }
    if config.no_rope_freq.isdecimal():
        entries["no_rope_layer_interval"] = int(config.no_rope_freq)
    return entries


SMOLLM3 = Family(
    kind="smollm3",
    title="a SmolLM3",
    architecture="SmolLM3ForCausalLM",
    ours=SmolLM3Config,
    # These are transformers' defaults; published files leave out keys with these values.
    fields=fields(
        num_hidden_layers=36,
        hidden_size=2048,
        intermediate_size=11008,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=128256,
        max_position_embeddings=32768,
    ),
    tied=True,
    groups=(
        KeyGroup(ROPE, partial(rope_from_hf, theta=2e6), rope_to_hf),
        KeyGroup(
            ("no_rope_layers", "no_rope_layer_interval", "layer_types"),
            _layers_from_hf,
            _layers_to_hf,
        ),
    ),
    only={**SILU, "mlp_bias": (False,), "use_sliding_window": (False,)},
    rates=("attention_dropout",),
    ids=TOKEN_IDS,
    ignored=frozenset({"sliding_window", "max_window_layers", "pretraining_tp"}),
    needs=(Need("window_size", lambda config: not any(config.windows), "left out"),),
    names=NAMES,
)

FAMILY = ModelFamily(
    SmolLM3Config,
    tiny={
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "vocab_size": 40,
        "no_rope_freq": "2",
    },
    hugging_face=(SMOLLM3,),
)
