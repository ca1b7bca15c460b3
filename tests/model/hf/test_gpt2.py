"""Folders of GPT-2 in the ways in which they differ from other families'."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.hf import config_from_hf, config_to_hf, from_hf, load_hf, save_hf, to_hf
from model.language import LanguageModel
from tests.model.hf.hugging_face import GPT2, hugging_face


def test_reads_the_bare_model_with_its_mask(tmp_path):
    """As the hub's "gpt2" is stored: without the prefix, with the mask."""
    theirs = hugging_face(GPT2)
    expected = from_hf(theirs.state_dict(), GPT2)
    theirs.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    bare = {name.removeprefix("transformer."): weight for name, weight in load_file(weights).items()}
    bare |= {"h.0.attn.bias": torch.ones(1, 1, 50, 50).tril(), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    save_file(bare, weights)
    config, state, _ = load_hf(tmp_path)
    assert config.max_position_embeddings == 50
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_published_configurations_are_read():
    """The hub's GPT-2 names dropout, and leaves n_inner and what was added later out."""
    hub = {
        "activation_function": "gelu_new",
        "attn_pdrop": 0.1,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
    }
    config = config_from_hf(hub)
    assert (config.ffn_size, config.max_position_embeddings, config.norm_epsilon) == (3072, 1024, 1e-5)
    assert not config.untie_embeddings_and_output_weights
    del hub["n_positions"]
    with pytest.raises(ValueError, match="n_positions is missing; this is no gpt2's configuration"):
        config_from_hf(hub)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"position_embedding_type": "rope", "max_position_embeddings": None}, "position_embedding_type is rope"),
        ({"num_query_groups": 2}, "num_query_groups is 2"),
        ({"kv_channels": 10}, "kv_channels is 10"),
    ],
)
def test_a_gpt_that_theirs_cannot_be_is_not_written(tmp_path, change, words):
    config = dataclasses.replace(GPT2, **change)
    for write in (
        lambda: config_to_hf(config),
        lambda: to_hf(LanguageModel(config).state_dict(), config),
        lambda: save_hf(tmp_path / "out", config, LanguageModel(config).state_dict()),
    ):
        with pytest.raises(ValueError, match=f"^{words}, and Hugging Face's GPT-2 has only .*; keep it in"):
            write()
    assert not (tmp_path / "out").exists()


def test_the_table_of_positions_has_one_length(tmp_path):
    assert config_to_hf(GPT2, {"max_position_embeddings": 50})["n_positions"] == 50
    with pytest.raises(ValueError, match="max_position_embeddings is 60 and the model's table of positions has 50"):
        save_hf(tmp_path / "out", GPT2, LanguageModel(GPT2).state_dict(), {"max_position_embeddings": 60})
    assert not (tmp_path / "out").exists()
