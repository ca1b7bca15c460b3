"""Build models, count their parameters, FLOPs and states, and name what checkpoints must share."""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from model.config import Architecture, DecoderConfig
from model.decoder import Decoder
from model.dit import DiT
from model.dit_config import DiTConfig
from model.parts.attention import Attend, HybridAttention, LinearAttend
from model.parts.delta import Taps
from model.parts.lora import add_adapters
from model.parts.weights import Beginning, initial_value
from model.parts.windows import Window
from runtime.tensors import Part


def build_model(
    config: DecoderConfig, attend: Attend | LinearAttend | HybridAttention | None = None
) -> Decoder:
    """Build a model on torch's default device, with uninitialised weights and its adapters; attend
    as in the class."""
    model = Decoder(config, attend)
    if config.lora_rank is not None:
        add_adapters(model, config.adapted_linears(), config.lora_rank, config.lora_scale)
    return model


def meta_state(config: DecoderConfig) -> dict[str, Tensor]:
    """Return the state dict on the meta device: every parameter's name and shape."""
    return _on_meta(config).state_dict()


def initial_weight(
    config: DecoderConfig | DiTConfig, name: str, shape: Sequence[int], seed: int, part: Part = ()
) -> Tensor:
    """Return the initial value (float32, on the CPU) of a part of the parameter ``name``, of the
    whole ``shape``.

    The part of the model that has the parameter states it (``model.parts.weights``). Raises
    ValueError if none does.
    """
    return initial_value(_cached_on_meta(config), Beginning(name, shape, seed, part))


@lru_cache(maxsize=8)
def _cached_on_meta(config: DecoderConfig | DiTConfig) -> nn.Module:
    build: Any = DiT if type(config) is DiTConfig else build_model
    with torch.device("meta"):
        return build(config)


def num_parameters(config: DecoderConfig) -> int:
    """Count the parameters, embeddings included and tied output weights once."""
    return sum(weight.numel() for weight in meta_state(config).values())


def num_trained(config: DecoderConfig) -> int:
    """Count the parameters that training changes: all, or the adapters'."""
    return sum(weight.numel() for weight in _on_meta(config).parameters() if weight.requires_grad)


def flops_per_token(config: DecoderConfig, seq_length: int) -> float:
    """Return the FLOPs of training on one token, forward and backward, without recomputation.

    Counts 6 per weight of every matrix product, including the output projection but not embedding
    lookups, as PaLM does (Chowdhery et al. 2022, appendix B), and 4 per frozen one, which has no
    gradient. Attention adds 12 * layers * heads
    * head width * seq_length for a full mask; the causal mask needs half, and half is counted, as
    in Megatron-LM's num_floating_point_operations. PaLM and nanoGPT count the full square and so
    report a higher utilisation. Under a window a token has the keys that it sees in the place of
    that half. Linear attention adds 12 per element of a layer's state, which each token writes and
    reads, and a delta rule 18: a token reads the state at its key, writes there, and reads it at
    its query (Yang, Kautz and Hatamizadeh 2024, equation 10); the convolution before it adds 6 per
    tap. Each layer of a hybrid counts as its kind. Sinks add nothing that counts.
    """
    fixed, windows = _counted(config)
    keys = sum(layers * mean_keys(window, seq_length) for window, layers in windows)
    return fixed + 12 * keys * config.num_attention_heads * config.head_dim


@lru_cache(maxsize=64)
def _counted(config: DecoderConfig) -> tuple[float, tuple[tuple[Window | None, int], ...]]:
    """Return a token's FLOPs besides scores, and how many layers of softmax attention have each
    window."""
    model = _on_meta(config)
    matrices = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    if model.output is None:
        matrices.append(model.output_weight)
    products = sum((6 if weight.requires_grad else 4) * weight.numel() for weight in matrices)
    windows = Counter(map(config.window, softmax_layers(config)))
    taps = sum(module.weight.numel() for module in model.modules() if isinstance(module, Taps))
    state = (18 if config.delta_rule else 12) * config.state_elements
    return products + state + 6 * taps, tuple(windows.items())


def mean_keys(window: Window | None, seq_length: int) -> float:
    """Return how many keys a token sees on average, those of the diagonal as halves: seq_length / 2
    without a window.

    A window of w keys, a token's own among them, hides (seq_length - w)^2 / 2 of seq_length^2 / 2
    pairs.
    """
    keys = seq_length if window is None else min(window[0] + 1, seq_length)
    return keys - keys**2 / (2 * seq_length) if seq_length else 0.0


def softmax_layers(config: DecoderConfig) -> list[int]:
    """Return the layers with softmax attention, counted from 0."""
    return list(filter(config.has_softmax, range(config.num_layers)))


def attention_title(config: DecoderConfig) -> str | None:
    """Describe windows and sinks in a few words; None if there are none."""
    windows = list(filter(None, config.windows))
    words = []
    if windows:
        words.append(
            f"{len(windows)} of {config.num_layers} layers see {windows[0][0]:,} tokens back"
        )
    if config.softmax_type != "vanilla":
        words.append(f"{config.softmax_type} softmax")
    return ", ".join(words) or None


def _on_meta(config: DecoderConfig) -> Decoder:
    with torch.device("meta"):
        return build_model(config)


def architecture_of(config: DecoderConfig | DiTConfig) -> Architecture:
    """Return all that decides the model's shapes and function, defaults resolved; if equal,
    checkpoints fit."""
    return config.architecture()
