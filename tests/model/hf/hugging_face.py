"""Hugging Face's models with random weights, and ours with the same.

They are for the tests that compare the two.
"""

import dataclasses
import sys

import pytest
import torch
from torch import nn

from model.hf import config_to_hf, from_hf
from model.parts.rope import frequencies
from model.registry import build_model
from tests.model.models import as_family, model_config, without_float32

transformers = pytest.importorskip("transformers", reason="compares with Hugging Face's models")

SHAPE = {"num_layers": 2, "hidden_size": 48, "num_attention_heads": 6, "vocab_size": 61}
SHAPE |= {"norm_epsilon": 1e-6, "init_method_std": 0.2}
"""Weights ten times the usual, so that softmax and logits are far from flat."""
LLAMA = model_config(**SHAPE, ffn_hidden_size=80, num_query_groups=2, rotary_base=5000.0)
GPT2 = model_config(
    **SHAPE,
    model_type="gpt",
    position_embedding_type="learned_absolute",
    max_position_embeddings=50,
    untie_embeddings_and_output_weights=False,
)
ODD = dataclasses.replace(LLAMA, num_attention_heads=10, num_query_groups=5, kv_channels=8)
"""Heads wider than hidden_size / heads, which is no whole number."""


def odd(**changes):
    return dataclasses.replace(ODD, **changes)


def llama(scaling=None, **changes):
    if scaling is not None:
        changes |= {"rope_scaling_type": scaling, "rope_scaling_factor": 8.0}
    return dataclasses.replace(LLAMA, **changes)


TIED = {"untie_embeddings_and_output_weights": False}
WINDOW = {"window_size": "7,0", "window_attn_skip_freq": "[0,1]"}
TRAINED = "rope_scaling_original_max_position_embeddings"
BANDS = {"rope_scaling_low_freq_factor": 1.0, "rope_scaling_high_freq_factor": 4.0}
YARN = {"rope_scaling_type": "yarn", "rope_scaling_factor": 8.0, TRAINED: 16}
DELTA = {
    "num_layers": 3,
    "softmax_every": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
DELTA |= {"linear_key_head_dim": 6, "linear_value_head_dim": 10}
QWEN3_5 = as_family(
    LLAMA,
    "qwen3_5",
    num_attention_heads=3,
    num_query_groups=1,
    kv_channels=16,
    rotary_percent=0.25,
    **DELTA,
)
OLMO_HYBRID = as_family(LLAMA, "olmo_hybrid", **DELTA)
LOCAL = {"window_size": "7,0", "window_attn_skip_freq": "[1,1,0]", "num_layers": 3}
GEMMA3 = as_family(
    LLAMA,
    "gemma3",
    kv_channels=16,
    query_pre_attn_scalar=21,
    rotary_base_local=300.0,
    **LOCAL,
    **TIED,
)
SMOLLM3 = as_family(LLAMA, "smollm3", num_layers=4, no_rope_freq="2", **TIED)
GRANITE = as_family(
    LLAMA,
    "granite",
    embedding_multiplier=3.0,
    attention_multiplier=0.2,
    residual_multiplier=0.4,
    logits_scaling=1.5,
)
OLMO3 = as_family(LLAMA, "olmo3", rotary_base_local=5000.0, **LOCAL, **YARN)
CONFIGS = {
    "llama": LLAMA,
    "llama, mha": llama(num_query_groups=6),
    "llama, tied": llama(**TIED),
    "llama, wide heads": llama(kv_channels=14),
    "llama, llama3": llama("llama3", **BANDS, **{TRAINED: 32}, max_position_embeddings=128),
    "llama, dynamic": llama("dynamic", **{TRAINED: 16}, max_position_embeddings=16),
    "llama, linear": llama("linear"),
    "mistral": odd(window_size="7,0"),
    "mistral, no window": ODD,
    "ministral": odd(**WINDOW),
    "qwen2, yarn": odd(add_qkv_bias=True, **YARN),
    "qwen2, tied, a window": odd(add_qkv_bias=True, **WINDOW, **TIED),
    "qwen3": odd(qk_layernorm=True),
    "qwen3, tied": odd(qk_layernorm=True, **TIED),
    "gemma3": GEMMA3,
    "gemma3, linear": dataclasses.replace(
        GEMMA3, rope_scaling_type="linear", rope_scaling_factor=8.0
    ),
    "olmo3": OLMO3,
    "olmo3, mha, a base of its own": dataclasses.replace(
        OLMO3, num_query_groups=6, rotary_base_local=90.0
    ),
    "qwen3_5": QWEN3_5,
    "qwen3_5, tied, yarn": dataclasses.replace(QWEN3_5, **TIED, **YARN),
    "olmo_hybrid": OLMO_HYBRID,
    "olmo_hybrid, tied, defaults": dataclasses.replace(
        OLMO_HYBRID,
        **TIED,
        linear_num_key_heads=6,
        linear_num_value_heads=6,
        linear_value_head_dim=12,
        linear_conv_kernel_dim=3,
    ),
    "smollm3": SMOLLM3,
    "smollm3, untied, a pattern, yarn": dataclasses.replace(
        SMOLLM3,
        num_layers=3,
        no_rope_freq="[0,1,1]",
        untie_embeddings_and_output_weights=True,
        **YARN,
    ),
    "granite": GRANITE,
    "granite, tied, mha": dataclasses.replace(
        GRANITE, num_query_groups=6, logits_scaling=2.0, **TIED
    ),
    "gpt2": GPT2,
    "gpt2, untied": dataclasses.replace(GPT2, untie_embeddings_and_output_weights=True),
    "gpt2, narrow feed-forward": dataclasses.replace(GPT2, ffn_hidden_size=80),
}
TOKENS = torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(0))


class ExactRotary(nn.Module):
    """Hugging Face's rotary embedding with float64 angles."""

    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, x, position_ids, layer_type="full_attention"):
        rope = self.config.local_rope if layer_type == "sliding_attention" else self.config
        position_ids = position_ids.view(-1, *position_ids.shape[-2:])[
            0
        ]  # of text, whose rows are alike
        turns, scale = frequencies(
            rope, self.config.rotary_dim, position_ids
        )  # tests/model/parts/test_rope.py
        angles = position_ids[..., None].double() * turns.repeat(2)
        return scale * angles.cos(), scale * angles.sin()


def hugging_face(config, dtype=torch.float32):
    """Random weights, norms and biases included.

    In float64, float32 islands (norms, angles, delta rules) too.

    Models with a delta rule are always in float64: in float32 the sums of their gates lose digits.
    """
    torch.manual_seed(0)
    shape = transformers.AutoConfig.for_model(**config_to_hf(config))
    theirs = transformers.AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa")
    for parameter in theirs.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.5 * torch.rand(parameter.shape)
    theirs.to(torch.float64 if config.recurrent else dtype)
    if config.model_type == "gemma3":
        theirs.model.embed_tokens.embed_scale = torch.tensor(config.hidden_size**0.5, dtype=dtype)
    if config.recurrent or (hasattr(config, "rotary_base_local") and dtype == torch.float64):
        forward, module = theirs.forward, sys.modules[type(theirs).__module__]
        if config.rope is not None:
            theirs.model.rotary_emb = ExactRotary(config)

        def wide(*inputs, **settings):
            with without_float32(module):
                return forward(*inputs, **settings)

        theirs.forward = wide
    plain = (
        config.rope is not None
        and not config.recurrent
        and not hasattr(config, "rotary_base_local")
    )
    if plain and dtype == torch.float64:
        theirs.model.rotary_emb = ExactRotary(config)
        for name, module in list(theirs.named_modules()):
            if "norm" in name:
                exact = nn.RMSNorm(len(module.weight), eps=config.norm_epsilon, dtype=dtype)
                exact.weight = module.weight
                theirs.set_submodule(name, exact)
    return theirs


def ours(theirs, config, dtype=torch.float32):
    model = build_model(config).to(dtype)
    model.load_state_dict(from_hf(theirs.state_dict(), config))
    return model
