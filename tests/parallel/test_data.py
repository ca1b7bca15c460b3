"""Sharded weights are the whole model's, and sharded gradients the sum over ranks."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from model.parts.weights import Beginning, initial_value
from model.registry import build_model, num_parameters
from parallel.data import init_parameters, set_gradient_sync, shard_model
from parallel.mesh import distributed_mesh
from parallel.tensor.split import split_model
from planner.rehearsal import fake_process_group
from runtime import tensors
from runtime.ranks import run_ranks
from tests.parallel import split
from tests.parallel.tiny import gradients_of, weights_of
from tests.parallel.unequal import VALID, difference, loss_sum, sharded, whole_model
from tests.parity.bugs import alike_shards
from train.config.language import parse_args

LLAMA3_8B = parse_args(
    [
        "--config",
        "configs/models/llama3_8b.toml",
        "--data-path",
        "x",
        "--tokenizer-model",
        "x",
        "--save",
        "x",
    ]
)


def in_tiles(rank, world_size, tp):
    """Gather a model whose weights are drawn in small tiles.

    Then again, as if every rank were the first.
    """
    tensors.WHOLE, tensors.TILE = 16, (4, 5)
    with distributed_mesh(split.mesh_config(tp)) as mesh:
        right = weights_of(split.build(mesh, split.config())[0])
        alike_shards()
        return [right, weights_of(split.build(mesh, split.config())[0])]


@pytest.mark.parametrize(("ranks", "tp"), [(3, 1), (4, 2)])
def test_drawn_in_tiles_the_weights_are_the_whole_models(ranks, tp, monkeypatch):
    """Sharded by FSDP unevenly.

    By tensor parallelism along either dimension, by FSDP along the first.
    """
    monkeypatch.setattr(tensors, "WHOLE", 16)
    monkeypatch.setattr(tensors, "TILE", (4, 5))
    want = weights_of(split.plain(split.config()))
    for right, alike in run_ranks(in_tiles, ranks, tp):
        assert right.keys() == want.keys()
        assert all(torch.equal(right[name], want[name]) for name in want)
        assert all(torch.equal(alike[name], want[name]) == ("norm" in name) for name in want)


@pytest.mark.parametrize(("tp", "max_ratio"), [(1, 1.01), (2, 1.01), (8, 1.02)])
def test_one_rank_of_eight_draws_about_an_eighth(tp, max_ratio, monkeypatch):
    """The model is Llama 3 8B with two layers."""
    count, config = 0, replace(LLAMA3_8B.model, num_layers=2)
    total = num_parameters(config)

    def normal(tile, mean, std, generator):
        nonlocal count
        count += tile.numel()
        return tile

    with (
        fake_process_group(5, 8, 8),
        distributed_mesh(split.mesh_config(tp)) as mesh,
        torch.device("meta"),
    ):
        model = build_model(config)
        split_model(model, mesh.tp)
        shard_model(model, model.layers, mesh.dp_cp, bf16=True)
        monkeypatch.setattr(torch.Tensor, "normal_", normal)  # the modules' own is for nothing

        def weight_of(name, shape, part):
            return initial_value(model, Beginning(name, shape, 1, part))

        init_parameters(model, torch.device("meta"), weight_of)
    assert 0.99 / 8 < count / total < max_ratio / 8


def reference(world_size):
    """One process' gradient of all ranks' tokens."""
    model = whole_model()
    (sum(loss_sum(model, rank) for rank in range(world_size)) / sum(VALID[:world_size])).backward()
    return gradients_of(model)


def with_weights_on_their_way(rank, world_size, prefetch):
    """True for each layer that is computed while the next one's weights are being gathered.

    Return the gradients too.
    """
    model, posted = sharded(world_size, prefetch=prefetch), list[bool]()
    for layer, following in pairwise(model.layers):
        group = following._get_fsdp_state()._fsdp_param_group
        layer.mlp.register_forward_hook(
            lambda *_, group=group: posted.append(
                group.is_unsharded or group._all_gather_result is not None
            )
        )
    (loss_sum(model, rank) / sum(VALID[:world_size])).backward()
    return posted, gradients_of(model)


def test_a_layers_weights_are_gathered_while_the_layer_before_is_computed():
    for (with_it, got), (without, want) in zip(
        run_ranks(with_weights_on_their_way, 2, True),
        run_ranks(with_weights_on_their_way, 2, False),
        strict=True,
    ):
        assert with_it == [True]
        assert without == [False]
        assert all(torch.equal(got[name], want[name]) for name in want)


def averaged(rank, world_size):
    """As FSDP does unless it is told otherwise."""
    model = sharded(world_size)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(float(world_size))
    (loss_sum(model, rank) / sum(VALID[:world_size])).backward()
    return gradients_of(model)


def test_an_average_over_ranks_would_be_seen():
    assert difference(run_ranks(averaged, 2)[0], reference(2)) == pytest.approx(0.5, rel=1e-3)


def a_plain_model(rank, world_size):
    model = whole_model()
    set_gradient_sync(model, False)  # for a model that nothing shards there is nothing to hold back
    loss_sum(model, rank).backward()
    return dist.is_initialized() and all(p.grad is not None for p in model.parameters())


def test_a_plain_model_is_left_alone():
    assert a_plain_model(0, 1) is False  # no process group here
    assert run_ranks(a_plain_model, 1) == [True]
