"""SmolLM3 (Hugging Face, July 2025): a LLaMA without rope in every fourth layer.

Those layers know the order of tokens by the causal mask alone (NoPE, arXiv:2501.18795).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from model.config import Architecture, Footprint
from model.families.family import ModelFamily
from model.hf.common import NAMES, SILU, fields
from model.hf.family import TOKEN_IDS, Contents, Family, Need, Part
from model.hf.folder import entry, unsupported
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
    example="([0]*3+[1]*1)*9 for 36",
    nth_is_one=True,
    lacking="rope",
    otherwise="left out for 4",
)


@dataclass(frozen=True, kw_only=True)
class SmolLM3Config(WindowedConfig, RopePositionsConfig):
    """A SmolLM3: a LLaMA without rope in every fourth layer."""

    model_type: str = "smollm3"
    no_rope_freq: str = "4"
    """Layers without rope: N is every N-th one; a pattern has a 1 for each layer without it and a 0
    for each with it, such as ([0]*3+[1]*1)*9 for 36."""

    title = "SmolLM3"
    footprint = Footprint(fused_residual=4.0, gated=True)

    def check(self) -> None:
        """Check that some layer has rope."""
        super().check()
        must = "it leaves no layer with rope; give one of them a 0"
        require(
            self,
            not all(layers_of(self.no_rope_freq, self.num_layers, WITHOUT_ROPE)),
            "no_rope_freq",
            must,
        )

    @property
    def layers_with_rope(self) -> list[bool]:
        """Return for each layer whether it turns queries and keys by their positions."""
        return [
            not without for without in layers_of(self.no_rope_freq, self.num_layers, WITHOUT_ROPE)
        ]

    @property
    def alternating(self) -> dict[str, Any]:
        """Settings with which layers with and without rope take turns in any number of layers."""
        every = (
            2 if not all(self.layers_with_rope) else self.num_layers + 1
        )  # which no layer reaches
        return {"no_rope_freq": str(every)}

    def block(self, layer: int, attends: HybridAttention) -> nn.Module:
        """Build a layer, counted from 0."""
        attention = self.attention(layer, attends.softmax, rotates=self.layers_with_rope[layer])
        return PreNormLayer(self.norm, attention, SwiGLU(self.hidden_size, self.ffn_size))

    def architecture(self) -> Architecture:
        """Return that of ``DecoderConfig``, with the layers that have no rope."""
        without = ",".join(str(int(not rotates)) for rotates in self.layers_with_rope)
        return super().architecture() | {"no_rope_freq": f"[{without}]"}


def _layers_from_hf(hf: Contents, settings: dict[str, Any]) -> dict[str, Any]:
    """Return our layers without rope; theirs are a list with a 1 for each layer with it, or an
    interval."""
    count = settings["num_layers"]
    layers, interval = min(count, LISTED), entry(hf, "no_rope_layer_interval", int, 4)
    kinds = hf.get("layer_types")
    if kinds is not None and kinds != [WHOLE] * layers:
        raise unsupported("layer_types", kinds, f"; only {WHOLE} for each layer is")
    rotates = hf.get("no_rope_layers")
    if rotates is None:
        if interval < 2:
            raise unsupported(
                "no_rope_layer_interval", interval, "; only 2 or more is, with rope in some layers"
            )
        return {"no_rope_freq": str(interval)}
    numbers = isinstance(rotates, list) and all(
        type(value) is int and value in (0, 1) for value in rotates
    )
    if not numbers or len(rotates) < count or not any(rotates[:layers]):
        must = f"; only a 1 or a 0 for each of {count} layers is, with a 1 for some of them"
        raise unsupported("no_rope_layers", rotates, must)
    rotates = rotates[:layers]
    if interval >= 2 and rotates == [int(layer % interval != 0) for layer in range(1, layers + 1)]:
        return {"no_rope_freq": str(interval)}
    return {"no_rope_freq": f"[{','.join(str(1 - value) for value in rotates)}]"}


def _layers_to_hf(config: SmolLM3Config) -> dict[str, Any]:
    rotates = [int(has_rope) for has_rope in config.layers_with_rope]
    interval = (
        {"no_rope_layer_interval": int(config.no_rope_freq)}
        if config.no_rope_freq.isdecimal()
        else {}
    )
    return {"no_rope_layers": rotates, "layer_types": [WHOLE] * config.num_layers, **interval}


SMOLLM3 = Family(
    kind="smollm3",
    title="a SmolLM3",
    architecture="SmolLM3ForCausalLM",
    ours=SmolLM3Config,
    # Published files leave out what is transformers' default.
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
    parts=(
        Part(ROPE, partial(rope_from_hf, theta=2e6), rope_to_hf),
        Part(
            ("no_rope_layers", "no_rope_layer_interval", "layer_types"),
            _layers_from_hf,
            _layers_to_hf,
        ),
    ),
    only={**SILU, "mlp_bias": (False,), "use_sliding_window": (False,)},
    rates=("attention_dropout",),
    ids=TOKEN_IDS,
    ignored=frozenset({"sliding_window", "max_window_layers", "pretraining_tp"}),
    needs=(Need("window_size", lambda config: not any(config.windows), "none"),),
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
