"""GPT (Radford et al. 2019): LayerNorm, GELU, biases, and learned positions or rope."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from model.config import DecoderConfig, Footprint
from model.families.family import ModelFamily
from model.hf.family import ConfigKey, Family, Fused, KeyGroup, Names, Need
from model.parts.attention import HybridAttention
from model.parts.blocks import PreNormLayer
from model.parts.feed_forward import MLP
from model.parts.norms import LayerNorm
from model.parts.rope import RopeConfig
from model.parts.settings import LengthConfig, RotaryConfig, WindowedConfig
from runtime.errors import require


@dataclass(frozen=True, kw_only=True)
class GPTConfig(WindowedConfig, RotaryConfig, LengthConfig):
    """A GPT: LayerNorm, GELU, biases."""

    model_type: str = "gpt"
    position_embedding_type: Literal["rope", "learned_absolute"] | None = None
    """Source of token positions; by default learned_absolute in a gpt and rope in other
    families."""

    title = "GPT"
    footprint = Footprint(fused_residual=4.0, gated=False)
    linears = ("wq", "wk", "wv", "wo", "up", "down")

    def block(self, layer: int, cores: HybridAttention) -> nn.Module:
        attention = self.attention(layer, cores.softmax, bias=True)
        return PreNormLayer(self.norm, attention, MLP(self.hidden_size, self.ffn_size))

    def norm(self, width: int | None = None) -> nn.Module:
        return LayerNorm(width or self.hidden_size, eps=self.norm_epsilon)

    def check(self) -> None:
        """Check that learned positions have a table length and no rotary_base."""
        super().check()
        if not self.learned_positions:
            return
        must = (
            "it is the length of the table of learned_absolute positions, so it must be set; set "
            "it to the longest sequence, or set position_embedding_type to rope"
        )
        require(self, self.max_position_embeddings is not None, "max_position_embeddings", must)

        must = (
            "learned_absolute positions use no rope; leave rotary_base out, or set "
            "position_embedding_type to rope"
        )
        require(self, self.is_default("rotary_base"), "rotary_base", must)

    @property
    def positions(self) -> str:
        return self.position_embedding_type or "learned_absolute"

    @property
    def learned_positions(self) -> bool:
        return self.positions == "learned_absolute"

    @property
    def rope(self) -> RopeConfig | None:
        """Rope of attention; None with learned positions."""
        return None if self.learned_positions else self

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size


_UNUSED = """
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    summary_last_dropout reorder_and_upcast_attn gradient_checkpointing
    n_special predict_special_tokens output_past
"""


def _transposed(config: DecoderConfig, name: str, weight: Tensor) -> Tensor:
    if name.startswith("layers.") and weight.ndim == 2:
        return weight.T.contiguous()  # transformers' Conv1D has weights [in, out]
    return weight


GPT2 = Family(
    kind="gpt2",
    title="Hugging Face's GPT-2",
    architecture="GPT2LMHeadModel",
    ours=GPTConfig,
    fields={
        "n_layer": ConfigKey("num_layers", int),
        "n_embd": ConfigKey("hidden_size", int),
        "n_inner": ConfigKey("ffn_hidden_size", int, None),
        "n_head": ConfigKey("num_attention_heads", int),
        "n_positions": ConfigKey("max_position_embeddings", int),
        "vocab_size": ConfigKey("vocab_size", int),
        "layer_norm_epsilon": ConfigKey("norm_epsilon", float, 1e-5),
        "initializer_range": ConfigKey("init_method_std", float, 0.02),
    },
    tied=True,
    # Old files also have n_ctx, which equals n_positions.
    groups=(KeyGroup(("n_ctx",), lambda hf, settings: {}, lambda config: {}),),
    fixed={"position_embedding_type": "learned_absolute"},
    only={
        # These three are names of the same function.
        "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    rates=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    ignored=frozenset(_UNUSED.split()),
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    needs=(
        Need(
            "num_query_groups",
            lambda config: config.query_groups == config.num_attention_heads,
            "num_attention_heads {config.num_attention_heads}",
        ),
        Need(
            "kv_channels",
            lambda config: config.head_dim * config.num_attention_heads == config.hidden_size,
            "hidden_size / num_attention_heads",
        ),
    ),
    names=Names(
        top={
            "embedding": "transformer.wte",
            "position_embedding": "transformer.wpe",
            "norm": "transformer.ln_f",
            "output": "lm_head",
        },
        layers="transformer.h",
        layer={
            "attention_norm": "ln_1",
            "attention.wo": "attn.c_proj",
            "mlp_norm": "ln_2",
            "mlp.up": "mlp.c_fc",
            "mlp.down": "mlp.c_proj",
        },
        fused={"attn.c_attn": Fused(("attention.wq", "attention.wk", "attention.wv"), dim=-1)},
        ours_of=_transposed,
        theirs_of=_transposed,
    ),
    # Old checkpoints include the causal mask; checkpoints of the bare GPT2Model omit the prefix.
    derived=r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",
    prefix="transformer.",
)

FAMILY = ModelFamily(
    GPTConfig,
    tiny={
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "vocab_size": 40,
        "max_position_embeddings": 100,
    },
    hugging_face=(GPT2,),
)
