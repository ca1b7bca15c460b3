"""Build language models, count their parameters, FLOPs and states, and name what decides their shapes and function."""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn

from model.config import RESOLVED, ModelConfig
from model.dit import DiT
from model.dit_config import DiTConfig
from model.language import LanguageModel
from model.parts.attention import Attend, HybridAttention, LinearAttend
from model.parts.delta import Taps
from model.parts.lora import add_adapters
from model.parts.weights import Beginning, initial_value
from model.parts.windows import Window
from model.traits import SIZES
from runtime.tensors import Part

Architecture = dict[str, int | float | bool | str | None]
SHAPE = (
    *("model_type", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
    *("kv_channels", "vocab_size"),
)
DIT = (
    *("num_layers", "hidden_size", "num_attention_heads", "patch_size", "patch_size_t", "num_classes"),
    *("learn_sigma", "norm_epsilon"),
)


def build_model(config: ModelConfig, attend: Attend | LinearAttend | HybridAttention | None = None) -> LanguageModel:
    """Build a model on torch's default device, with uninitialised weights and its adapters; attend as in the class."""
    model = LanguageModel(config, attend)
    if config.lora_rank is not None:
        add_adapters(model, config.adapted_linears(), config.lora_rank, config.lora_scale)
    return model


def meta_state(config: ModelConfig) -> dict[str, Tensor]:
    """Return the state dict on the meta device: every parameter's name and shape."""
    return _on_meta(config).state_dict()


def initial_weight(
    config: ModelConfig | DiTConfig, name: str, shape: Sequence[int], seed: int, part: Part = ()
) -> Tensor:
    """Return the initial value (float32, on the CPU) of a part of the parameter ``name``, of the
    whole ``shape``.

    The part of the model that has the parameter states it (``model.parts.weights``). Raises
    ValueError if none does.
    """
    return initial_value(_cached_on_meta(config), Beginning(name, shape, seed, part))


@lru_cache(maxsize=8)
def _cached_on_meta(config: ModelConfig | DiTConfig) -> nn.Module:
    if isinstance(config, ModelConfig):
        return _on_meta(config)
    with torch.device("meta"):
        return DiT(config)


def num_parameters(config: ModelConfig) -> int:
    """Count the parameters, embeddings included and tied output weights once."""
    return sum(weight.numel() for weight in meta_state(config).values())


def num_trained(config: ModelConfig) -> int:
    """Count the parameters that training changes: all, or the adapters'."""
    return sum(weight.numel() for weight in _on_meta(config).parameters() if weight.requires_grad)


def flops_per_token(config: ModelConfig, seq_length: int) -> float:
    """Return the FLOPs of training on one token, forward and backward, without recomputation.

    Counts 6 per weight of every matrix product, including the output projection but not embedding lookups, as PaLM does
    (Chowdhery et al. 2022, appendix B), and 4 per frozen one, which has no gradient. Attention adds 12 * layers * heads
    * head width * seq_length for a full mask; the causal mask needs half, and half is counted, as in Megatron-LM's
    num_floating_point_operations. PaLM and nanoGPT count the full square and so report a higher utilisation. Under a
    window a token has the keys that it sees in the place of that half. Linear attention adds 12 per element of a
    layer's state, which each token writes and reads, and a delta rule 18: a token reads the state at its key, writes
    there, and reads it at its query (Yang, Kautz and Hatamizadeh 2024, equation 10); the convolution before it adds 6
    per tap. Each layer of a hybrid counts as its kind. Sinks add nothing that counts.
    """
    fixed, windows = _counted(config)
    keys = sum(layers * mean_keys(window, seq_length) for window, layers in windows)
    return fixed + 12 * keys * config.num_attention_heads * config.head_dim


@lru_cache(maxsize=64)
def _counted(config: ModelConfig) -> tuple[float, tuple[tuple[Window | None, int], ...]]:
    """Return a token's FLOPs besides scores, and how many layers of softmax attention have each window."""
    model = _on_meta(config)
    matrices = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    if model.output is None:
        matrices.append(model.output_weight)
    products = sum((6 if weight.requires_grad else 4) * weight.numel() for weight in matrices)
    windows = Counter(map(config.window, softmax_layers(config)))
    taps = sum(module.weight.numel() for module in model.modules() if isinstance(module, Taps))
    state = (18 if config.traits.delta else 12) * state_elements(config)
    return products + state + 6 * taps, tuple(windows.items())


def mean_keys(window: Window | None, seq_length: int) -> float:
    """Return how many keys a token sees on average, those of the diagonal as halves: seq_length / 2 without a window.

    A window of w keys, a token's own among them, hides (seq_length - w)^2 / 2 of seq_length^2 / 2 pairs.
    """
    keys = seq_length if window is None else min(window[0] + 1, seq_length)
    return keys - keys**2 / (2 * seq_length) if seq_length else 0.0


def softmax_layers(config: ModelConfig) -> list[int]:
    """Return the layers with softmax attention, counted from 0."""
    return list(filter(config.has_softmax, range(config.num_layers)))


def attention_title(config: ModelConfig) -> str | None:
    """Describe windows and sinks in a few words; None if there are none."""
    windows = list(filter(None, config.windows))
    words = []
    if windows:
        words.append(f"{len(windows)} of {config.num_layers} layers see {windows[0][0]:,} tokens back")
    if config.softmax_type != "vanilla":
        words.append(f"{config.softmax_type} softmax")
    return ", ".join(words) or None


def state_elements(config: ModelConfig) -> int:
    """Count the state elements of all layers of linear attention or a delta rule, per sequence."""
    heads, layers = config.num_attention_heads, config.num_layers - len(softmax_layers(config))
    if config.traits.delta:
        return layers * config.value_heads * config.key_dim * config.value_dim
    one = heads * config.head_dim**2
    if config.traits.positions == "lrpe":
        return one * (layers + (not config.has_softmax(0)))  # LRPE doubles the first layer's keys
    return (one + heads * config.head_dim) * layers  # and the normaliser


def _on_meta(config: ModelConfig) -> LanguageModel:
    with torch.device("meta"):
        return build_model(config)


def _resolved(config: ModelConfig, *names: str) -> Architecture:
    return {name: getattr(config, RESOLVED.get(name, name)) for name in names}


def architecture_of(config: ModelConfig | DiTConfig) -> Architecture:
    """Return all that decides the model's shapes and function, defaults resolved; if equal, checkpoints fit."""
    if isinstance(config, DiTConfig):
        shape = "x".join(map(str, config.latent_shape))
        own: Architecture = {"model_type": "dit", "ffn_hidden_size": config.ffn_size, "latent_shape": shape}
        return {name: getattr(config, name) for name in DIT} | own
    found = _resolved(config, *SHAPE)
    found["position_embedding_type"] = config.position_embedding_type or config.traits.positions
    found["max_position_embeddings"] = config.position_table
    found |= _resolved(config, "rotary_base", "norm_epsilon", "untie_embeddings_and_output_weights")
    if config.linear_attention:
        found["linear_decay"] = config.linear_decay or ("released" if config.model_type == "transnormer" else None)
        found["no_scale_embedding"] = config.no_scale_embedding
    # Without an entry where older checkpoints have none.
    if config.softmax_period is not None:
        found |= _resolved(config, "softmax_every")
    if config.traits.delta:
        found |= _resolved(config, *SIZES, "linear_conv_kernel_dim", "linear_gate", "rotary_percent")
    if window := next(filter(None, config.windows), None):
        found["window_size"] = f"{window[0]},{window[1]}"
        found["window_attn_skip_freq"] = f"[{','.join(str(int(one is not None)) for one in config.windows)}]"
    if config.local_rope is not None:
        found["rotary_base_local"] = config.local_rope.rotary_base
    if config.model_type == "gemma3":
        found |= _resolved(config, "query_pre_attn_scalar")
    if config.softmax_type != "vanilla":
        found |= _resolved(config, "softmax_type")
    found |= {name: True for name in ("add_qkv_bias", "qk_layernorm") if getattr(config, name)}
    if config.lora_rank is not None:
        targets = ",".join(config.adapted_linears())
        found |= {"lora_rank": config.lora_rank, "lora_scale": config.lora_scale, "lora_target": targets}
    return found | config.scaling()
