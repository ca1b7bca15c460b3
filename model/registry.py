"""Models by model_type, and what is counted of any of them."""

import torch
from torch import nn

from model.attention import Attend, Attends, LinearAttend
from model.base import LanguageModel
from model.config import ModelConfig
from model.gpt import GPT
from model.linear_transformer import LinearTransformer
from model.llama import Llama
from model.transnormer import TransNormer

MODELS: dict[str, type[LanguageModel]] = {
    "llama": Llama,
    "gpt": GPT,
    "transnormer": TransNormer,
    "linear_transformer": LinearTransformer,
}
TITLES = {
    "llama": "LLaMA",
    "gpt": "GPT",
    "transnormer": "TransNormer",
    "linear_transformer": "Linear Transformer",
}


def build_model(config: ModelConfig, attend: Attend | LinearAttend | Attends | None = None) -> LanguageModel:
    """The module that config.model_type names, on torch's default device, weights not yet meaningful.

    attend is the core of its attention, linear where the model's is, both in a hybrid, by default those of one device.
    """
    kind = MODELS[config.model_type]
    return kind(config) if attend is None else kind(config, attend)


def shapes_of(config: ModelConfig) -> dict[str, torch.Size]:
    """The shape of every parameter by its name in the state dict."""
    return {name: weight.shape for name, weight in _on_meta(config).state_dict().items()}


def num_parameters(config: ModelConfig) -> int:
    """Trainable parameters, embeddings included; tied output weights are counted once."""
    return sum(shape.numel() for shape in shapes_of(config).values())


def flops_per_token(config: ModelConfig, seq_length: int) -> float:
    """Floating-point operations that training one token takes, forward and backward, without recomputation.

    6 per weight of every matrix product, the output projection included and the embeddings' lookups not (they multiply
    nothing), as PaLM counts (Chowdhery et al. 2022, appendix B). Attention adds 12 * layers * heads * head width *
    seq_length for a full mask; the causal mask needs half, and half is counted, as Megatron-LM's
    num_floating_point_operations does. PaLM and nanoGPT count the full square and so report a higher utilisation.
    Linear attention adds 12 per element of a layer's state, into which each token writes and from which it reads. In a
    hybrid each layer counts as its kind.
    """
    model = _on_meta(config)
    matrices = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    if model.output is None:
        matrices += model.output_weight.numel()
    scores = softmax_layers(config) * config.num_attention_heads * config.head_dim * seq_length / 2
    return 6 * matrices + 12 * (state_elements(config) + scores)


def softmax_layers(config: ModelConfig) -> int:
    """Layers with softmax attention."""
    return sum(map(config.has_softmax, range(config.num_layers)))


def state_elements(config: ModelConfig) -> int:
    """Numbers in the states of all layers of linear attention, per sequence: what the past comes to."""
    one, layers = config.num_attention_heads * config.head_dim**2, config.num_layers - softmax_layers(config)
    if config.model_type == "transnormer":
        return one * (layers + (not config.has_softmax(0)))  # LRPE doubles the first layer's keys
    return (one + config.num_attention_heads * config.head_dim) * layers  # and the normaliser


def _on_meta(config: ModelConfig) -> LanguageModel:
    with torch.device("meta"):
        return build_model(config)
