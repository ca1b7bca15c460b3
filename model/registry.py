"""Build models, and count their parameters and FLOPs."""

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
from model.parts.gates import Taps
from model.parts.lora import add_adapters
from model.parts.weights import Beginning, initial_value
from model.parts.windows import Window
from runtime.tensors import Part


def build_model(
    config: DecoderConfig, attend: Attend | LinearAttend | HybridAttention | None = None
) -> Decoder:
    """Build a model, with adapters if lora_rank is set, on torch's default device.

    The weights are uninitialised. ``attend`` is as in `Decoder`.
    """
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
    """Return the initial value of a slice of a parameter, float32 on the CPU.

    Args:
        name: name of the parameter.
        shape: shape of the whole parameter.
        part: the slice; by default all of it.

    Raises:
        ValueError: no module defines an initial value for the parameter (``model.parts.weights``).
    """
    return initial_value(meta_model(config), Beginning(name, shape, seed, part))


@lru_cache(maxsize=8)
def meta_model(config: DecoderConfig | DiTConfig) -> nn.Module:
    """Return the model on the meta device; cached, so do not change it."""
    build: Any = DiT if type(config) is DiTConfig else build_model
    with torch.device("meta"):
        return build(config)


def num_parameters(config: DecoderConfig) -> int:
    """Count the parameters, including embeddings; tied output weights count once."""
    return sum(weight.numel() for weight in meta_state(config).values())


def num_trained(config: DecoderConfig) -> int:
    """Count the parameters that training changes: all, or only those of adapters."""
    return sum(weight.numel() for weight in _on_meta(config).parameters() if weight.requires_grad)


def flops_per_token(config: DecoderConfig, seq_length: int) -> float:
    """Return the training FLOPs per token, forward and backward, without recomputation.

    * Matmuls: 6 per weight, including the output projection but not embedding lookups, as PaLM
      counts (Chowdhery et al. 2022, appendix B); 4 per frozen weight, which has no gradient.
    * Softmax attention: 12 * layers * heads * head width * keys. The number of keys is the mean
      that a token sees under the causal mask and the layer's window: seq_length / 2 without a
      window, as in Megatron-LM's num_floating_point_operations. PaLM and nanoGPT count seq_length
      keys and so report a higher utilisation.
    * Linear attention: 12 per element of a layer's state, since each token writes and reads the
      state.
    * A delta rule: 18 per element of a layer's state, since a token reads the state at its key,
      writes there, and reads it at its query (Yang, Kautz and Hatamizadeh 2024, equation 10); the
      convolution before it adds 6 per tap.

    In a hybrid, each layer is counted by its own kind. Attention sinks are negligible.
    """
    fixed, layers_by_window = _count_products(config)
    keys = sum(layers * mean_keys(window, seq_length) for window, layers in layers_by_window)
    return fixed + 12 * keys * config.num_attention_heads * config.head_dim


@lru_cache(maxsize=64)
def _count_products(config: DecoderConfig) -> tuple[float, tuple[tuple[Window | None, int], ...]]:
    """Return a token's FLOPs except softmax scores, and the number of layers with each window.

    Cached, since training needs the FLOPs of every document and this part is the same for all
    lengths.
    """
    model = _on_meta(config)
    matrices: list[Tensor] = []
    taps = 0
    for module in model.modules():
        if isinstance(module, nn.Linear):
            matrices.append(module.weight)
        elif isinstance(module, Taps):
            taps += module.weight.numel()
    if model.output is None:
        matrices.append(model.output_weight)

    products = 0
    for weight in matrices:
        products += (6 if weight.requires_grad else 4) * weight.numel()
    state = (18 if config.delta_rule else 12) * config.state_elements
    layers_by_window = Counter(map(config.window, softmax_layers(config)))
    return products + state + 6 * taps, tuple(layers_by_window.items())


def mean_keys(window: Window | None, seq_length: int) -> float:
    """Return the mean number of keys that a token sees; its own key counts as half.

    Without a window this is seq_length / 2. A window of w keys, including a token's own, hides
    (seq_length - w)^2 / 2 of seq_length^2 / 2 pairs.
    """
    if seq_length == 0:
        return 0.0
    keys = seq_length if window is None else min(window[0] + 1, seq_length)
    return keys - keys**2 / (2 * seq_length)


def softmax_layers(config: DecoderConfig) -> list[int]:
    """Return the layers with softmax attention, counted from 0."""
    return list(filter(config.has_softmax, range(config.num_layers)))


def attention_title(config: DecoderConfig) -> str | None:
    """Describe windows and sinks in a few words; return None if there are none."""
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
    """Return all settings that decide the model's shapes and computation, defaults resolved.

    A checkpoint can be loaded if its entries are equal to these.
    """
    return config.architecture()
