"""A small LLaMA under any data-parallel strategy, its ranks with unequal numbers of tokens.

It is for the tests of these.
"""

import math

import torch
from torch.distributed.device_mesh import init_device_mesh

from kernels.loss import cross_entropy_sum
from model.decoder import Decoder
from model.registry import build_model, initial_weight
from parallel.data import DataParallelConfig, init_parameters, shard_model, sharding_mesh
from parallel.recompute import RecomputeConfig, recompute_layers
from tests.model.models import model_config

CONFIG = model_config(
    num_layers=2, hidden_size=24, num_attention_heads=2, num_query_groups=1, vocab_size=37
)
SEED, LENGTH = 7, 10
VALID = (LENGTH, 2, 5, 0)
"""Tokens that carry loss on each rank."""


def whole_model():
    model = Decoder(CONFIG)
    model.init_weights(SEED)
    return model


def sharded(
    world_size,
    bf16=False,
    strategy="zero3",
    copies=1,
    prefetch=False,
    config=CONFIG,
    granularity="none",
):
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_cp",))
    dp_config = DataParallelConfig(
        data_parallel_sharding_strategy=strategy, num_distributed_optimizer_instances=copies
    )
    with torch.device("meta"):
        model = build_model(config)
    recompute_layers(model.layers, RecomputeConfig(recompute_granularity=granularity))
    shards = sharding_mesh(mesh, dp_config)
    shard_model(model, model.layers, shards, bf16=bf16, strategy=strategy, prefetch=prefetch)
    init_parameters(
        model,
        torch.device("cpu"),
        lambda name, shape, part: initial_weight(config, name, shape, SEED, part),
    )
    return model


def batch(rank, micro=0):
    """Tokens and labels [1, S] of a rank, some without loss."""
    generator = torch.Generator().manual_seed(100 * micro + rank)
    tokens = torch.randint(CONFIG.vocabulary, (1, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[:, VALID[rank] :] = -100
    return tokens[:, :-1], labels


def loss_sum(model, rank, micro=0):
    tokens, labels = batch(rank, micro)
    return cross_entropy_sum(model(tokens), labels)[0]


def gradient_norm_of(gradients):
    return math.sqrt(
        sum(gradient.double().square().sum().item() for gradient in gradients.values())
    )


def difference(got, want):
    """Largest over the parameters, relative to the parameter's gradient."""
    assert got.keys() == want.keys()
    return max(((got[name] - want[name]).norm() / want[name].norm()).item() for name in want)
