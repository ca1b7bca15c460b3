"""Small language models of every kind, and their weights as training leaves them, for the tests of these."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from model.base import LanguageModel
from model.config import ModelConfig
from model.registry import build_model

LLAMA = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, vocab_size=40)
GPT = replace(LLAMA, model_type="gpt", max_position_embeddings=100, num_query_groups=None)
TRANSNORMER = replace(LLAMA, model_type="transnormer", num_query_groups=None)
LINEAR = replace(LLAMA, model_type="linear_transformer", num_query_groups=None)
HYBRID = replace(TRANSNORMER, softmax_every=2)
KINDS = [LLAMA, GPT, TRANSNORMER, LINEAR]


def tied(config: ModelConfig) -> ModelConfig:
    return replace(config, untie_embeddings_and_output_weights=False)


def built(config: ModelConfig, seed: int = 1, attend: Any = None) -> LanguageModel:
    model = build_model(config, attend)
    model.init_weights(seed)
    return model


def used(config: ModelConfig, attend: Any = None, dtype: torch.dtype = torch.float32) -> LanguageModel:
    """Biases and norms as training leaves them: not 0 and 1."""
    model, generator = built(config, attend=attend), torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.to(dtype)


def tokens(length: int = 12, vocabulary: int = 40) -> Tensor:
    return torch.randint(vocabulary, (2, length), generator=torch.Generator().manual_seed(3))
