import dataclasses

import pytest
import torch

from model.base import initial_weight
from model.config import ModelConfig
from model.registry import build_model

LLAMA = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, vocab_size=40)
KINDS = [LLAMA, dataclasses.replace(LLAMA, model_type="gpt", max_position_embeddings=100)]


def built(config, seed=1):
    model = build_model(config)
    model.init_weights(seed)
    return model


@pytest.mark.parametrize("config", KINDS)
def test_initial_weights_are_a_function_of_the_seed_alone(config):
    torch.manual_seed(0)
    one = built(config, seed=5).state_dict()
    torch.manual_seed(1)
    torch.randn(7)
    with torch.device("meta"):
        model = build_model(config)
    model.to_empty(device="cpu")
    model.init_weights(5)
    other = model.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    deeper = built(dataclasses.replace(config, num_layers=3), seed=5).state_dict()
    assert torch.equal(one["layers.1.attention.wq.weight"], deeper["layers.1.attention.wq.weight"])
    assert not torch.equal(one["embedding.weight"], built(config, seed=6).embedding.weight)
    matrices = [one[f"layers.{i}.attention.{w}.weight"] for i in (0, 1) for w in ("wk", "wv")]
    assert not any(torch.equal(a, b) for i, a in enumerate(matrices) for b in matrices[:i])
    name = "layers.0.mlp.up.weight"
    assert torch.equal(one[name], initial_weight(config, name, one[name].shape, 5))


@pytest.mark.parametrize("kind", KINDS)
def test_initial_weights_have_their_deviations(kind):
    config = dataclasses.replace(kind, num_layers=8, hidden_size=128, vocab_size=300, init_method_std=0.05)
    for name, weight in built(config).named_parameters():
        if "norm" in name or name.endswith("bias"):
            assert (weight == (0 if name.endswith("bias") else 1)).all()
            continue
        expected = 0.05 / 4 if name.endswith(("wo.weight", "down.weight")) else 0.05
        assert weight.std().item() == pytest.approx(expected, rel=0.03), name
        assert abs(weight.mean().item()) < 4 * expected / weight.numel() ** 0.5, name


def test_weights_on_the_meta_device_are_not_initialised_silently():
    with torch.device("meta"):
        model = build_model(KINDS[1])
    with pytest.raises(ValueError, match="to_empty"):
        model.init_weights(0)
