"""The architecture of a model, which its checkpoints name: all that decides its shapes and function."""

from model.config import RESOLVED, ModelConfig
from model.dit_config import DiTConfig
from model.traits import SIZES

Architecture = dict[str, int | float | bool | str | None]
SHAPE = (
    *("model_type", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
    *("kv_channels", "vocab_size"),
)
DIT = (
    *("num_layers", "hidden_size", "num_attention_heads", "patch_size", "patch_size_t", "num_classes"),
    *("learn_sigma", "norm_epsilon"),
)


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
    windows = [config.window(layer) for layer in range(config.num_layers)]
    if any(windows):
        left, right = next(window for window in windows if window)
        found["window_size"] = f"{left},{right}"
        found["window_attn_skip_freq"] = f"[{','.join(str(int(window is not None)) for window in windows)}]"
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
