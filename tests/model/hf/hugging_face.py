"""Hugging Face's LLaMA and GPT-2 with random weights, and ours with the same, for the tests that compare the two."""

import dataclasses

import pytest
import torch
from torch import nn

from model.config import ModelConfig
from model.hf import config_to_hf, from_hf
from model.registry import build_model

transformers = pytest.importorskip("transformers", reason="compares with Hugging Face's models")

LLAMA = ModelConfig(
    num_layers=2,
    hidden_size=48,
    ffn_hidden_size=80,
    num_attention_heads=6,
    num_query_groups=2,
    vocab_size=61,
    rotary_base=5000.0,
    norm_epsilon=1e-6,
    init_method_std=0.2,  # ten times the usual, so that softmax and logits are far from flat
)
GPT2 = ModelConfig(
    model_type="gpt",
    num_layers=2,
    hidden_size=48,
    num_attention_heads=6,
    vocab_size=61,
    position_embedding_type="learned_absolute",
    max_position_embeddings=50,
    norm_epsilon=1e-6,
    init_method_std=0.2,
    untie_embeddings_and_output_weights=False,
)
CONFIGS = {
    "llama": LLAMA,
    "llama, mha": dataclasses.replace(LLAMA, num_query_groups=6),
    "llama, tied": dataclasses.replace(LLAMA, untie_embeddings_and_output_weights=False),
    "llama, wide heads": dataclasses.replace(LLAMA, kv_channels=14),
    "gpt2": GPT2,
    "gpt2, untied": dataclasses.replace(GPT2, untie_embeddings_and_output_weights=True),
    "gpt2, narrow feed-forward": dataclasses.replace(GPT2, ffn_hidden_size=80),
}
TOKENS = torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(0))


class ExactRotary(nn.Module):
    """Hugging Face's rotary embedding with float64 angles."""

    def __init__(self, config):
        super().__init__()
        self.frequencies = config.rotary_base ** (-torch.arange(0, config.head_dim, 2).double() / config.head_dim)

    def forward(self, x, position_ids):
        angles = position_ids[..., None].double() * self.frequencies.repeat(2)
        return angles.cos(), angles.sin()


def hugging_face(config, dtype=torch.float32):
    """Random weights, norms and biases included; in float64, LLaMA's float32 islands (norms, angles) too."""
    torch.manual_seed(0)
    of_family, shape = {
        "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig),
        "gpt": (transformers.GPT2LMHeadModel, transformers.GPT2Config),
    }[config.model_type]
    theirs = of_family(shape(**config_to_hf(config), attn_implementation="sdpa"))
    for parameter in theirs.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.5 * torch.rand(parameter.shape)
    theirs.to(dtype)
    if config.model_type == "llama" and dtype == torch.float64:
        theirs.model.rotary_emb = ExactRotary(config)
        for name, module in list(theirs.named_modules()):
            if "norm" in name:
                exact = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon, dtype=dtype)
                exact.weight = module.weight
                theirs.set_submodule(name, exact)
    return theirs


def ours(theirs, config, dtype=torch.float32):
    model = build_model(config).to(dtype)
    model.load_state_dict(from_hf(theirs.state_dict(), config))
    return model
