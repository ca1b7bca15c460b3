"""A step of AdamW equals its definition, and each group has its settings."""

import torch
from torch import nn

from model.decoder import Decoder
from tests.model.models import model_config
from train.optimizers.config import OptimizerConfig, build_optimizer


def test_matrices_decay_and_norms_do_not():
    model = Decoder(
        model_config(num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=11)
    )
    model.layers[0].mlp.down.weight.requires_grad_(False)
    optimizer = build_optimizer(
        OptimizerConfig(weight_decay=0.3, adam_beta1=0.8, adam_eps=1e-6), model
    )
    decaying, others = optimizer.param_groups
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert (decaying["betas"], decaying["eps"], decaying["fused"]) == ((0.8, 0.95), 1e-6, True)
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert {names[p] for p in others["params"]} == {
        n for n in names.values() if n.endswith("norm.weight")
    }
    assert {names[p] for p in decaying["params"]} == {
        n
        for n in names.values()
        if not n.endswith("norm.weight") and n != "layers.0.mlp.down.weight"
    }


def test_a_step_is_adamw_by_its_definition():
    """Loshchilov and Hutter 2019, algorithm 2, the decay scaled by the learning rate.

    torch and Megatron have it so.
    """
    model = nn.Linear(2, 1)
    weight, bias = (p.detach().double().clone() for p in (model.weight, model.bias))
    optimizer = build_optimizer(OptimizerConfig(lr=0.01, weight_decay=0.5), model)
    model(torch.ones(1, 2)).backward()  # every gradient is 1
    optimizer.step()
    # In the first step both moments, corrected for their start, are the gradient and its square.
    torch.testing.assert_close(
        model.weight.double(), weight * (1 - 0.01 * 0.5) - 0.01, rtol=1e-6, atol=1e-7
    )
    torch.testing.assert_close(model.bias.double(), bias - 0.01, rtol=1e-6, atol=1e-7)
