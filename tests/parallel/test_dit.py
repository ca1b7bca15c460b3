"""A sharded diffusion transformer does not round its times; tests/test_dit.py has all meshes."""

import torch
from torch.distributed.device_mesh import init_device_mesh

from model.dit import DiT, patchify
from model.dit_config import DiTConfig
from model.registry import initial_weight
from parallel.data import init_parameters, shard_model
from runtime.ranks import run_ranks

CONFIG = DiTConfig(
    num_layers=2, hidden_size=24, num_attention_heads=4, latent_shape=(3, 6, 10), num_classes=5
)


def weight_of(name, shape, part):
    """Return initial weights, random instead of zero where zeros would let nothing through."""
    weight = initial_weight(CONFIG, name, shape, 5)
    if not weight.any():
        weight.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(name) + shape.numel()))
    return weight[part]


def in_bfloat16(rank, world_size):
    """Return how far rounding the times to bfloat16 moves the output.

    Zero would mean that they are rounded.
    """
    model = DiT(CONFIG)
    shard_model(
        model,
        model.layers,
        init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",)),
        bf16=True,
    )
    init_parameters(model, torch.device("cpu"), weight_of)
    x = patchify(
        torch.randn(4, *CONFIG.latent_shape, generator=torch.Generator().manual_seed(5)), CONFIG
    )
    times, labels = torch.tensor([0.0, 999.0, 3.5, 250.0]), torch.tensor([0, 4, 5, 1])
    outs = [
        model(x, torch.arange(CONFIG.num_patches), t, labels)
        for t in (times, times.bfloat16().float())
    ]
    assert outs[0].dtype == torch.bfloat16
    return (outs[0] - outs[1]).abs().max().item()


def test_times_are_not_rounded_with_the_weights():
    assert all(difference > 0 for difference in run_ranks(in_bfloat16, 2))
