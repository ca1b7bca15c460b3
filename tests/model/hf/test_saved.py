"""Folders that transformers saves of models made from its own configurations.

Ours has their logits.
"""

import json

import pytest
import torch

from model.hf import load_hf
from model.registry import build_model
from tests.model.hf.hugging_face import TOKENS, transformers

SHAPES = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3}
SHAPES |= {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 50}
SHAPES |= {"initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PLAIN = {"rope_type": "default", "rope_theta": 5e3}
SCALED = {"rope_theta": 5e3, "factor": 8.0, "original_max_position_embeddings": 16}
YARN = SCALED | {"rope_type": "yarn", "attention_factor": 1.2, "beta_fast": 32.0, "beta_slow": 1.0}
LLAMA3 = SCALED | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
WINDOWS = {"sliding_window": 7, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}
LINEAR = {"layer_types": ["linear_attention"] * 2 + ["full_attention"]}
LINEAR |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6}
LINEAR |= {"linear_value_head_dim": 10, "num_attention_heads": 3, "num_key_value_heads": 1}
OF_BOTH = {"full_attention": YARN, "sliding_attention": PLAIN}
CASES = {
    "llama": ("Llama", {}),
    "llama, llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama, yarn": ("Llama", {"rope_parameters": YARN}),
    "llama, rope_scaling": ("Llama", {"rope_theta": 5e3, "rope_scaling": LLAMA3}),
    "llama, tied, wide heads": ("Llama", {"tie_word_embeddings": True, "head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "mistral, no window": ("Mistral", {"sliding_window": None}),
    "ministral": ("Ministral", {**WINDOWS, "head_dim": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen2, windows": ("Qwen2", {**WINDOWS, "use_sliding_window": True}),
    "qwen2, yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma3": ("Gemma3", {**WINDOWS, "head_dim": 16}),
    "gemma3, flat": ("Gemma3", {**WINDOWS, "head_dim": 16, "rope_parameters": dict(PLAIN)}),
    "olmo3": ("Olmo3", WINDOWS),
    "olmo3, rope_scaling": ("Olmo3", {**WINDOWS, "rope_theta": 5e5, "rope_scaling": YARN}),
    "olmo3, tables": ("Olmo3", {**WINDOWS, "rope_parameters": OF_BOTH}),
    "olmo3, flat": ("Olmo3", {**WINDOWS, "rope_parameters": PLAIN}),
    "olmo3, flat yarn": ("Olmo3", {**WINDOWS, "rope_parameters": YARN}),
    "olmo3, flat beside tables": (
        "Olmo3",
        {**WINDOWS, "rope_parameters": {**PLAIN, "rope_theta": 7.0, **OF_BOTH}},
    ),
    "qwen3_5": ("Qwen3_5", LINEAR),
    "olmo hybrid": ("OlmoHybrid", {**LINEAR, "rope_parameters": {"rope_theta": None}}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "smollm3, a pattern": ("SmolLM3", {"no_rope_layers": [0, 1, 0], "rope_parameters": YARN}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 1.5,
        },
    ),
    "gpt2": ("GPT2", {}),
}
"""Classes of models, and what their configurations are made from."""


def saved(kind, changes, folder):
    """A model of transformers, and the folder that it writes."""
    suffix = "TextConfig" if kind in ("Gemma3", "Qwen3_5") else "Config"
    config_class = getattr(transformers, kind + suffix)
    shapes = {
        name: value for name, value in SHAPES.items() if hasattr(config_class(), name)
    }  # a GPT-2 has fewer
    torch.manual_seed(1)
    config = config_class(**{**shapes, **json.loads(json.dumps(changes))})
    model = getattr(transformers, f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(
        config
    ).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", CASES)
def test_a_folder_that_transformers_saves_has_its_logits(name, tmp_path):
    saved(*CASES[name], tmp_path)
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)(TOKENS).logits
    config, state, _ = load_hf(tmp_path)
    model = build_model(config)
    model.load_state_dict(state)
    bound = 1e-4 if config.recurrent else 1e-5  # float32 in both
    assert (model(TOKENS) - expected).abs().max() < bound * expected.abs().max()
