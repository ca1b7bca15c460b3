"""Folders of LLaMA in the ways in which they differ from other families'."""

import dataclasses

import pytest

from model.hf import config_from_hf, config_to_hf
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
