"""Convert between transformers' LLaMA, Mistral, Qwen2 and Qwen3 and our LLaMA: configurations and state dicts.

All are our LLaMA with some settings: a window (Mistral), biases of q, k and v (Qwen2), norms of q and k (Qwen3). All
use half-split rotary pairs and weights [out, in], so only names change.
"""
# ruff: noqa: RUF012 - the classes' tables are read alone

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from model.config import ModelConfig
from model.hf.folder import entry, shown
from model.hf.names import Names, Read
from model.hf.rope import rope_from_hf, rope_to_hf
from model.windows import Window
from runtime.errors import UserError

NAMES = Names(
    top={"embedding": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"},
    layers="model.layers",
    layer={
        "attention_norm": "input_layernorm",
        "attention.wq": "self_attn.q_proj",
        "attention.wk": "self_attn.k_proj",
        "attention.wv": "self_attn.v_proj",
        "attention.wo": "self_attn.o_proj",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    },
)
WHOLE, SLIDING = "full_attention", "sliding_attention"


class Llama:
    """LlamaForCausalLM: LLaMA 1 to 3.3."""

    OURS = "llama"
    NAME = "LLaMA"
    # Supported values of the keys of config.json that may ask for something else; a missing key means the first.
    # Dropout is not listed: a trained model does not use it.
    SUPPORTED: dict[str, tuple[Any, ...]] = {
        "model_type": ("llama",),
        "hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "mlp_bias": (False,),
    }
    UNSAID: dict[str, Any] = {"attention_dropout": 0.0, "max_position_embeddings": 2048}
    REPLACED = {"rope_scaling", "partial_rotary_factor"}
    EMBEDDING = "model.embed_tokens.weight"
    # Old checkpoints include the rotary frequencies, which follow from the configuration.
    DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
    PREFIX = ""
    ARCHITECTURE = "LlamaForCausalLM"
    OWN: dict[str, Any] = {"add_qkv_bias": False, "qk_layernorm": False}
    """Settings of ours that all of its models have alike."""
    GROUPS: int | None = None
    """Key heads where config.json does not say; None is one per query head."""
    HEAD_DIM: int | None = None
    """Width of a head where it does not say; None is hidden_size / heads."""

    def check(self, config: ModelConfig) -> None:
        """Raise UserError if this model of transformers cannot express ours."""
        for name, only in self.OWN.items():
            if (value := getattr(config, name)) != only:
                raise UserError(f"{name} is {value}, and in a {self.NAME} it is {only}")
        self._check_windows(config)
        self._check_sizes(config)

    def _check_sizes(self, config: ModelConfig) -> None:
        if config.hidden_size % config.num_attention_heads:
            raise UserError(
                f"hidden_size is {config.hidden_size}, which transformers takes for a LLaMA only as a multiple of "
                f"num_attention_heads {config.num_attention_heads}, whatever kv_channels is"
            )
        if config.init_method_std > 1:
            raise UserError(
                f"init_method_std is {config.init_method_std}, and transformers takes 1 at most for a LLaMA"
            )

    def _check_windows(self, config: ModelConfig) -> None:
        if any(_windows(config)):
            raise UserError(f"window_size is {config.window_size}, and a {self.NAME} has no windows")

    def config_from_hf(self, hf: Mapping[str, Any]) -> ModelConfig:
        """Build a ModelConfig from a config.json's contents. Raises KeyError if missing, UserError if unsupported."""
        longest = entry(hf, "max_position_embeddings", int, None) or self.UNSAID["max_position_embeddings"]
        layers = entry(hf, "num_hidden_layers", int)
        return ModelConfig(
            model_type="llama",
            num_layers=layers,
            hidden_size=entry(hf, "hidden_size", int),
            ffn_hidden_size=entry(hf, "intermediate_size", int),
            num_attention_heads=entry(hf, "num_attention_heads", int),
            num_query_groups=entry(hf, "num_key_value_heads", int, self.GROUPS),
            kv_channels=entry(hf, "head_dim", int, self.HEAD_DIM),
            vocab_size=entry(hf, "vocab_size", int),
            max_position_embeddings=longest,
            norm_epsilon=entry(hf, "rms_norm_eps", float, 1e-6),
            init_method_std=entry(hf, "initializer_range", float, 0.02),
            untie_embeddings_and_output_weights=not entry(hf, "tie_word_embeddings", bool, False),
            **self.OWN,
            **rope_from_hf(hf, longest),
            **self._windows_from_hf(hf, layers),
        )

    def _windows_from_hf(self, hf: Mapping[str, Any], layers: int) -> dict[str, Any]:
        return {}

    def config_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        """Return the entries of a config.json, for transformers 4 and 5, that our fields determine."""
        longest = config.max_position_embeddings or config.scaled_length
        if config.rope_scaling_seq_length is not None:  # dynamic, and theirs is plain
            longest = max(config.max_position_embeddings or 0, config.rope_scaling_seq_length)
        elif config.rope_scaling_type == "dynamic":
            longest = config.rope_scaling_original_max_position_embeddings or 0  # what theirs scales from
        return {
            "architectures": [self.ARCHITECTURE],
            "num_hidden_layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.ffn_size,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.query_groups,
            "head_dim": config.head_dim,
            "vocab_size": config.vocabulary,
            **rope_to_hf(config),
            **({"max_position_embeddings": longest} if longest else {}),
            "rms_norm_eps": float(config.norm_epsilon),
            "initializer_range": float(config.init_method_std),
            "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
            **self._windows_to_hf(_windows(config)),
        }

    def _windows_to_hf(self, windows: list[Window | None]) -> dict[str, Any]:
        return {}

    def to_ours(self, theirs: Read, names: Iterable[str]) -> dict[str, Tensor]:
        """Return our state dict of `names`, with the same tensors."""
        return NAMES.to_ours(theirs, names)

    def to_theirs(self, ours: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
        """Return their state dict, with the same tensors."""
        return NAMES.to_theirs(ours)


class Mistral(Llama):
    """MistralForCausalLM: a LLaMA with one window in all layers, or none."""

    NAME = "Mistral"
    SUPPORTED = {"model_type": ("mistral",), "hidden_act": ("silu", "swish")}
    UNSAID = {"attention_dropout": 0.0, "max_position_embeddings": 131072}
    ARCHITECTURE = "MistralForCausalLM"
    GROUPS = 8

    def _check_sizes(self, config: ModelConfig) -> None:
        pass

    def _check_windows(self, config: ModelConfig) -> None:
        if None in (windows := _windows(config)) and any(windows):
            raise UserError(f"window_attn_skip_freq is {config.window_attn_skip_freq}, and in a Mistral it is none")

    def _windows_from_hf(self, hf: Mapping[str, Any], layers: int) -> dict[str, Any]:
        return _window_from_hf(hf)

    def _windows_to_hf(self, windows: list[Window | None]) -> dict[str, Any]:
        return {"sliding_window": None if windows[0] is None else windows[0][0] + 1}


class Qwen2(Mistral):
    """Qwen2ForCausalLM: Qwen 2 and 2.5, with biases of q, k and v; each layer has the window or none."""

    NAME = "Qwen2"
    SUPPORTED = {"model_type": ("qwen2",), "hidden_act": ("silu", "swish")}
    UNSAID = {"attention_dropout": 0.0, "max_position_embeddings": 32768}
    ARCHITECTURE = "Qwen2ForCausalLM"
    OWN = {"add_qkv_bias": True, "qk_layernorm": False}
    GROUPS = 32

    def _check_windows(self, config: ModelConfig) -> None:
        pass

    def _windows_from_hf(self, hf: Mapping[str, Any], layers: int) -> dict[str, Any]:
        if not entry(hf, "use_sliding_window", bool, False) or not (window := _window_from_hf(hf)):
            return {}
        if (kinds := hf.get("layer_types")) is None:
            first = entry(hf, "max_window_layers", int, 28)
            kinds = [SLIDING if layer >= first else WHOLE for layer in range(min(layers, 10**5))]
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (WHOLE, SLIDING) for kind in kinds):
            raise UserError(
                f"config.json: layer_types = {shown(kinds)} is not supported; only {WHOLE} or {SLIDING} per layer is"
            )
        if SLIDING not in kinds:
            return {}
        pattern = f"[{','.join(str(int(kind == SLIDING)) for kind in kinds)}]"
        return window | {"window_attn_skip_freq": pattern if WHOLE in kinds else None}

    def _windows_to_hf(self, windows: list[Window | None]) -> dict[str, Any]:
        widths = [window[0] + 1 for window in windows if window]
        if not widths:
            return {"use_sliding_window": False, "layer_types": [WHOLE] * len(windows)}
        kinds = [WHOLE if window is None else SLIDING for window in windows]
        # Old versions of transformers know the number of whole layers before the others alone.
        return {
            "use_sliding_window": True,
            "sliding_window": widths[0],
            "max_window_layers": kinds.index(SLIDING),
            "layer_types": kinds,
        }


class Qwen3(Qwen2):
    """Qwen3ForCausalLM, the dense ones, with norms of q and k."""

    NAME = "Qwen3"
    SUPPORTED = {"model_type": ("qwen3",), "hidden_act": ("silu", "swish"), "attention_bias": (False,)}
    ARCHITECTURE = "Qwen3ForCausalLM"
    OWN = {"add_qkv_bias": False, "qk_layernorm": True}
    HEAD_DIM = 128


def _windows(config: ModelConfig) -> list[Window | None]:
    return [config.window(layer) for layer in range(config.num_layers)]


def _window_from_hf(hf: Mapping[str, Any]) -> dict[str, str]:
    """Return our window; theirs counts a token's own key."""
    width = entry(hf, "sliding_window", int, None) if "sliding_window" in hf else 4096
    if width is None:
        return {}
    if width < 2:
        raise UserError(f"config.json: sliding_window = {width} is not supported; only 2 or more is")
    return {"window_size": f"{width - 1},0"}
