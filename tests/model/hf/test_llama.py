"""Folders of LLaMA in the ways in which they differ from other families'."""

import dataclasses

import pytest
import torch

from model.hf import config_from_hf, config_to_hf, from_hf, to_hf
from tests.model.hf.hugging_face import CONFIGS, LLAMA, TOKENS, hugging_face, ours


def test_old_and_sparse_configurations():
    """A config.json of transformers 4 has rope_theta at the top, and leaves may be missing."""
    sparse = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 100,
        "rope_theta": 7000.0,
        "rope_scaling": None,
    }
    config = config_from_hf(sparse)
    assert (config.rotary_base, config.norm_epsilon, config.query_groups) == (7000.0, 1e-6, 4)
    assert config.untie_embeddings_and_output_weights
    del sparse["intermediate_size"]
    with pytest.raises(ValueError, match="intermediate_size is missing"):
        config_from_hf(sparse)


def test_state_dicts_that_do_not_fit():
    state = hugging_face(LLAMA).state_dict()
    with pytest.raises(ValueError, match=r"lacks lm_head\.weight"):
        from_hf({name: w for name, w in state.items() if name != "lm_head.weight"}, LLAMA)
    with pytest.raises(ValueError, match=r"unknown model\.layers\.0\.self_attn\.q_proj\.bias"):
        from_hf(state | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}, LLAMA)
    with pytest.raises(ValueError, match=r"k_proj\.weight has shape \(16, 48\); .* \(48, 48\)"):
        from_hf(state, CONFIGS["llama, mha"])
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        from_hf(state, CONFIGS["llama, tied"])
    with pytest.raises(ValueError, match=r"lacks layers\.1\.mlp"):
        to_hf({name: w for name, w in from_hf(state, LLAMA).items() if "1.mlp." not in name}, LLAMA)
    derived = {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    assert from_hf(state | derived, LLAMA).keys() == from_hf(state, LLAMA).keys()


@pytest.mark.parametrize("name", ["llama, dynamic", "llama, wide heads"])
def test_dynamic_rope_of_a_run_is_plain_rope_of_another_base(name):
    """A run fixes the length that the base is for, and a text of any other length must have the same base."""
    scaling = {**dataclasses.asdict(CONFIGS["llama, dynamic"]), "kv_channels": CONFIGS[name].kv_channels}
    config = dataclasses.replace(LLAMA, **scaling | {"rope_scaling_seq_length": 33})
    theirs = hugging_face(config)
    model = ours(theirs, config)
    assert theirs.config.max_position_embeddings == 33
    for length in (7, 16, 33, 40):
        assert (model(TOKENS[:, :length]) - theirs(TOKENS[:, :length]).logits).abs().max() < 1e-5
    again = config_from_hf(config_to_hf(config))
    assert (again.rope_scaling_type, again.rotary_base) == (None, theirs.config.rope_parameters["rope_theta"])
    open_length = ours(theirs, dataclasses.replace(config, rope_scaling_seq_length=None))  # negative control
    assert (open_length(TOKENS[:, :16]) - theirs(TOKENS[:, :16]).logits).abs().max() > 1e-3
