"""Hugging Face's LlamaForCausalLM <-> ours: configurations, state dicts and safetensors folders.

Both keep rotary pairs in the half-split convention and weights as [out, in], so that only names change.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.llama import Llama, LlamaConfig

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

# What our model computes, for the keys of config.json that could ask for something else; a missing key means this.
SUPPORTED = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "quantization_config": None,
}
TOP_NAMES = {"embedding": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
# Old checkpoints carry the rotary frequencies, which follow from the configuration.
DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def config_from_hf(hf: Mapping[str, Any]) -> LlamaConfig:
    """LlamaConfig of a config.json's contents; keys that change nothing we compute are passed over.

    ValueError names the key that is missing or asks for what we do not support (rope_scaling, biases, ...).
    """
    for key, supported in SUPPORTED.items():
        if hf.get(key, supported) != supported:
            raise ValueError(f"{CONFIG}: {key} = {hf[key]!r} is not supported; only {supported!r} is")
    for key in ("rope_parameters", "rope_scaling"):
        if not _is_plain_rope(hf.get(key)):
            raise ValueError(f"{CONFIG}: {key} = {hf[key]!r} is not supported; only unscaled rotation is")
    rope = hf.get("rope_parameters") or {}  # transformers 5 keeps rope_theta in here
    try:
        return LlamaConfig(
            num_layers=hf["num_hidden_layers"],
            hidden_size=hf["hidden_size"],
            ffn_hidden_size=hf["intermediate_size"],
            num_attention_heads=hf["num_attention_heads"],
            num_query_groups=hf.get("num_key_value_heads"),
            kv_channels=hf.get("head_dim"),
            vocab_size=hf["vocab_size"],
            rotary_base=rope.get("rope_theta") or hf.get("rope_theta", 10000.0),
            norm_epsilon=hf.get("rms_norm_eps", 1e-6),
            init_method_std=hf.get("initializer_range", 0.02),
            untie_embeddings_and_output_weights=not hf.get("tie_word_embeddings", False),
        )
    except KeyError as missing:
        raise ValueError(f"{CONFIG}: {missing.args[0]} is missing; this is no LLaMA's configuration") from None


def _is_plain_rope(rope: Any) -> bool:
    """Whether these rope parameters ask for nothing beyond the unscaled rotation of all channels."""
    if rope is None:
        return True
    kind = rope.get("rope_type", rope.get("type", "default"))
    return kind == "default" and rope.get("partial_rotary_factor", 1.0) == 1.0


def config_to_hf(config: LlamaConfig, max_position_embeddings: int = 2048) -> dict[str, Any]:
    """The contents of a config.json that transformers 4 and 5 read as the same model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        **{key: value for key, value in SUPPORTED.items() if value is not None},
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.query_groups,
        "head_dim": config.head_dim,
        "vocab_size": config.vocabulary,
        "max_position_embeddings": max_position_embeddings,
        "rope_theta": config.rotary_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rotary_base},
        "rms_norm_eps": config.norm_epsilon,
        "initializer_range": config.init_method_std,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
    }


def from_hf(state: Mapping[str, Tensor], config: LlamaConfig) -> dict[str, Tensor]:
    """Our state dict, holding the same tensors. ValueError for missing, unknown, misshapen or wrongly tied weights."""
    state = {name: weight for name, weight in state.items() if not DERIVED.fullmatch(name)}
    if not config.untie_embeddings_and_output_weights and "lm_head.weight" in state:
        output, embedding = state.pop("lm_head.weight"), state.get("model.embed_tokens.weight")
        if embedding is not None and not torch.equal(output, embedding):
            raise ValueError("lm_head.weight differs from model.embed_tokens.weight, yet tie_word_embeddings is true")
    shapes = _shapes(config)
    _check(state, {_hf_name(name): shape for name, shape in shapes.items()})
    return {name: state[_hf_name(name)] for name in shapes}


def to_hf(state: Mapping[str, Tensor], config: LlamaConfig) -> dict[str, Tensor]:
    """What LlamaForCausalLM.state_dict() holds for our state dict: the same tensors, a tied lm_head.weight included.

    ValueError for missing, unknown or misshapen weights.
    """
    _check(state, _shapes(config))
    theirs = {_hf_name(name): weight for name, weight in state.items()}
    if not config.untie_embeddings_and_output_weights:
        theirs["lm_head.weight"] = theirs["model.embed_tokens.weight"]
    return theirs


def _shapes(config: LlamaConfig) -> dict[str, torch.Size]:
    """The shape of every weight of our model."""
    with torch.device("meta"):
        return {name: weight.shape for name, weight in Llama(config).state_dict().items()}


def _hf_name(name: str) -> str:
    """Hugging Face's name of our parameter."""
    module = name.removesuffix(".weight")
    if module.startswith("layers."):
        _, layer, module = module.split(".", 2)
        return f"model.layers.{layer}.{LAYER_NAMES[module]}.weight"
    return f"{TOP_NAMES[module]}.weight"


def _check(state: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
    missing, unknown = sorted(shapes.keys() - state.keys()), sorted(state.keys() - shapes.keys())
    for problem, names in (("lacks", missing), ("has the unknown", unknown)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ValueError(f"The state dict {problem} {names[0]}{more}; it is not of this configuration")
    for name, shape in shapes.items():
        if state[name].shape != shape:
            raise ValueError(f"{name} has shape {tuple(state[name].shape)}; the configuration makes it {tuple(shape)}")


def load_hf(folder: str | Path) -> tuple[LlamaConfig, dict[str, Tensor]]:
    """Configuration and our state dict (CPU, dtypes as stored) of a Hugging Face folder, sharded or not.

    Only safetensors are read, never pickles, and only files directly in the folder, whatever an index names.
    ValueError names the file and what is wrong with it.
    """
    folder = Path(folder)
    config = config_from_hf(_read_json(folder / CONFIG))
    if not (folder / INDEX).exists():
        return config, from_hf(_read_weights(folder / WEIGHTS), config)
    index = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
        raise ValueError(f"{folder / INDEX}: weight_map is missing or not a table of file names; download it again")
    state: dict[str, Tensor] = {}
    for file in sorted(set(index.values())):
        if file != Path(file).name or not file.endswith(".safetensors"):
            raise ValueError(f"{folder / INDEX}: names {file!r}, which is no safetensors file directly in this folder")
        shard = _read_weights(folder / file)
        lacking = [name for name, where in index.items() if where == file and name not in shard]
        if lacking:
            raise ValueError(f"{folder / file}: lacks {lacking[0]}, which {INDEX} places there; download it again")
        state |= {name: shard[name] for name in shard if index.get(name) == file}
    return config, from_hf(state, config)


def save_hf(
    folder: str | Path, config: LlamaConfig, state: Mapping[str, Tensor], max_position_embeddings: int = 2048
) -> None:
    """Write config.json and model.safetensors of our state dict; transformers' from_pretrained reads the folder.

    max_position_embeddings is the longest sequence that readers should feed the model; nothing here depends on it.
    The folder is made; ValueError where it holds a model already.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    for file in (CONFIG, WEIGHTS, INDEX):
        if (folder / file).exists():
            raise ValueError(f"{folder / file} exists; choose a new folder, nothing is written over")
    theirs = {name: weight.detach().contiguous() for name, weight in to_hf(state, config).items()}
    if not config.untie_embeddings_and_output_weights:
        del theirs["lm_head.weight"]  # transformers ties it again
    folder.mkdir(parents=True, exist_ok=True)
    save_file(theirs, folder / WEIGHTS, metadata={"format": "pt"})
    dtype = str(theirs["model.norm.weight"].dtype).removeprefix("torch.")
    contents = config_to_hf(config, max_position_embeddings) | {"torch_dtype": dtype}
    (folder / CONFIG).write_text(json.dumps(contents, indent=2) + "\n")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        contents = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; give the folder of a Hugging Face model") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); download it again") from None
    if not isinstance(contents, dict):
        raise ValueError(f"{path} holds no JSON object; download it again")
    return contents


def _read_weights(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; only safetensors are read, and all shards are needed") from None
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}); download it again") from None
