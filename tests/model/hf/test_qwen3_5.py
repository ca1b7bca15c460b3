"""Folders of Qwen3.5 with a vision part, names of released OLMo Hybrids, and entries that these models do not have."""

import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.hf import config_from_hf, config_to_hf, load_hf, save_hf, to_hf
from model.hf.api import open_hf
from model.registry import build_model
from runtime.errors import UserError
from tests.model.hf.hugging_face import OLMO_HYBRID, QWEN3_5, TIED, TOKENS, hugging_face, transformers
from tests.model.models import built


@pytest.fixture
def folder(tmp_path):
    """A tiny model of text and images, as transformers writes it, and a layer that predicts two tokens ahead."""
    text = config_to_hf(QWEN3_5) | {"mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32", "attn_output_gate": True}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    torch.manual_seed(0)
    transformers.Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path / "both")
    path = tmp_path / "both" / "model.safetensors"
    save_file(load_file(path) | {"mtp.fc.weight": torch.ones(3, 4)}, path, {"format": "pt"})
    return tmp_path / "both"


def test_the_text_part_of_a_model_of_images_is_read(folder, tmp_path):
    said = []
    config, _, _ = open_hf(folder, said.append)
    assert said == [line for line in said if re.match(r"note: \d+ weights of model.visual, mtp are passed over", line)]
    assert len(said) == 1
    assert config.model_type == "qwen3_5"
    with pytest.warns(UserWarning, match="passed over"):
        config, state, contents = load_hf(folder)
    assert contents["model_type"] == "qwen3_5"
    model = build_model(config)
    model.load_state_dict(state)
    theirs = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(folder)
    want = theirs(TOKENS).logits
    assert (model(TOKENS) - want).norm() < 1e-5 * want.norm()
    save_hf(tmp_path / "out", config, state, contents)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(again).__name__ == "Qwen3_5ForCausalLM"
    assert (again(TOKENS).logits - want).norm() < 1e-5 * want.norm()


def test_rope_of_all_channels_is_written_where_a_missing_key_is_a_quarter():
    whole = replace(QWEN3_5, rotary_percent=1.0)
    assert config_from_hf(config_to_hf(whole)).rotary_percent == 1.0


def test_only_known_parts_are_passed_over(folder):
    path = folder / "model.safetensors"
    save_file(load_file(path) | {"model.audio.weight": torch.ones(3, 4)}, path, {"format": "pt"})
    with pytest.raises(UserError, match=r"has the unknown model\.audio\.weight"):
        open_hf(folder, print)


def test_a_released_olmo_hybrid_has_other_names(tmp_path):
    theirs = hugging_face(OLMO_HYBRID)
    theirs.float().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights, softmax = load_file(path), "model.layers.2.feedforward_layer_norm.weight"
    assert "model.layers.0.linear_attn.q_conv1d.weight" in weights
    assert "model.layers.0.attention_layer_norm.weight" in weights
    released = weights | {"model.layers.2.post_attention_layernorm.weight": weights[softmax]}
    del released[softmax]
    for one in (weights, released):
        save_file(one, path, {"format": "pt"})
        config, state, _ = load_hf(tmp_path)
        assert all(torch.equal(to_hf(state, config)[name], weight) for name, weight in theirs.state_dict().items())


@pytest.mark.parametrize(
    ("config", "change", "words"),
    [
        (QWEN3_5, {"layer_types": ["linear_attention"] * 3}, "layer_types = .* is not supported; only full_attention"),
        (QWEN3_5, {"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "layer_types = "),
        (QWEN3_5, {"attn_output_gate": False}, "attn_output_gate = false is not supported"),
        (QWEN3_5, {"output_gate_type": "sigmoid"}, "output_gate_type = "),
        (OLMO_HYBRID, {"linear_allow_neg_eigval": False}, "linear_allow_neg_eigval = false"),
        (OLMO_HYBRID, {"rope_parameters": None}, "rope_parameters = null is not supported: transformers turns"),
        (OLMO_HYBRID, {"rope_parameters": {"rope_type": "default"}}, "rope_parameters = "),
        (OLMO_HYBRID, {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, "rope_parameters = "),
    ],
)
def test_what_is_no_such_model_is_refused(config, change, words):
    contents = config_to_hf(config)
    assert config_from_hf(contents).model_type == config.model_type
    with pytest.raises(UserError, match=words):
        config_from_hf(contents | change)


def test_null_rope_parameters_are_a_base_to_transformers():
    """Why they are refused."""
    shape = transformers.OlmoHybridConfig(**config_to_hf(OLMO_HYBRID) | {"rope_parameters": None})
    assert shape.rope_parameters["rope_theta"] == 10000.0


def test_kimis_gates_are_in_no_model_of_theirs():
    from dataclasses import replace

    config = replace(QWEN3_5, linear_gate="per_channel", linear_num_value_heads=2)
    with pytest.raises(UserError, match=r"linear_gate is per_channel, and a Qwen3\.5 has only per_head"):
        to_hf(built(config).state_dict(), config)


def test_outer_entries_say_whether_embeddings_are_tied(folder):
    path = folder / "config.json"
    contents = json.loads(path.read_text())
    assert not TIED["untie_embeddings_and_output_weights"]
    assert config_from_hf(contents | {"tie_word_embeddings": True}).untie_embeddings_and_output_weights is False
    assert config_from_hf(contents).untie_embeddings_and_output_weights is True
    with pytest.raises(UserError, match="text_config = 3 is not supported; only a table is"):
        config_from_hf(contents | {"text_config": 3})
