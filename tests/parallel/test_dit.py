"""A diffusion transformer split over tensor-, context- and data-parallel ranks is the whole one."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from model.dit import DiT, initial_dit_weight, patchify
from model.dit_config import DiTConfig
from parallel.context import context_parallel
from parallel.data import finish_gradients, init_parameters, shard_model
from parallel.mesh import distributed_mesh
from parallel.recompute import RecomputeConfig, recompute_layers
from parallel.tensor.split import split_dit
from runtime.ranks import run_ranks
from tests.parallel.split import GRADIENT, LOSS, Step, check_step, difference, mesh_config, partly_redistributed, summed
from tests.parallel.tiny import full, gradients_of, weights_of
from tools.common.cases import case_of

IMAGE = DiTConfig(
    num_layers=2,
    hidden_size=24,
    num_attention_heads=4,
    latent_shape=(3, 6, 10),  # 15 patches, which no number of ranks divides
    num_classes=5,
    learn_sigma=True,
)
VIDEO = DiTConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, latent_shape=(3, 6, 4, 6), patch_size_t=2, num_classes=5
)
CONFIGS = [IMAGE, VIDEO]
BATCH, SEED = 4, 5


def weight_of(config, name, shape, part=()):
    """Return initial weights, random instead of zero where zeros would let no gradient through."""
    weight = initial_dit_weight(config, name, shape, SEED)
    if not weight.any():
        weight.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(name) + shape.numel()))
    return weight[part]


def data(config):
    """Noisy patches [B, T, P], times and labels [B], and what the output [B, T, P'] is to be."""
    generator = torch.Generator().manual_seed(SEED)
    x = patchify(torch.randn(BATCH, *config.latent_shape, generator=generator), config)
    target = torch.randn(BATCH, config.num_patches, config.out_width, generator=generator)
    return x, torch.tensor([0.0, 999.0, 3.5, 250.0]), torch.tensor([0, 4, 5, 1]), target


def whole_step(config):
    model = DiT(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weight_of(config, name, parameter.shape))
    x, times, labels, target = data(config)
    out = model(x, torch.arange(config.num_patches), times, labels)
    loss = (out - target).square().mean()
    loss.backward()
    return Step(loss.item(), weights_of(model), gradients_of(model))


def split_step(mesh, config, recompute, method):
    tokens = config.num_patches
    cp = context_parallel(method, seq_len=tokens, group=mesh.cp.get_group(), multiple=mesh.tp.size(), causal=False)
    with torch.device("meta"):
        model = DiT(config, cp.attend)
    split_dit(model, mesh.tp)
    assert mesh.tp.size() == 1 or all(isinstance(parameter, DTensor) for parameter in model.parameters())
    recompute_layers(model.layers, recompute)
    shard_model(model, model.layers, mesh.dp_cp, bf16=False)
    init_parameters(model, mesh.device, lambda name, shape, part: weight_of(config, name, shape, part))
    x, times, labels, target = (part.chunk(mesh.dp.size())[mesh.dp.get_local_rank()] for part in data(config))
    out = model(cp.shard(x, 1), cp.positions, times, labels)
    assert type(out) is Tensor
    off = (out - cp.shard(target, 1))[:, cp.positions < tokens]
    loss = off.square().sum() / (BATCH * tokens * config.out_width)
    loss.backward()
    finish_gradients(model, mesh.dp_cp, "zero3")
    return Step(summed(loss, mesh), weights_of(model), gradients_of(model))


def steps(rank, world_size, tp, cp, recompute, method):
    with distributed_mesh(mesh_config(tp, cp)) as mesh:
        return [split_step(mesh, config, recompute, method) for config in CONFIGS]


def check(mesh, recompute, method):
    case = case_of(mesh)
    results = run_ranks(steps, case.ranks, case.tp, case.cp, recompute, method)
    for index, config in enumerate(CONFIGS):
        want = whole_step(config)
        assert all(want.gradients[name].any() for name in want.weights)
        for result in results:
            check_step(result[index], want, config)


@pytest.mark.parametrize(
    "mesh", ["tp=2", *(pytest.param(m, marks=pytest.mark.slow) for m in ("tp=4", "tp=2 dp=2", "tp=2 cp=2"))]
)
def test_one_step_is_that_of_one_process(mesh):
    check(mesh, RecomputeConfig(), "ring")


def test_recomputed_layers_and_another_method_are_the_same_step():
    check("tp=2 cp=2", RecomputeConfig(recompute_granularity="attention_boundary", ffn_chunk_size=3), "ulysses")


def without_the_sum(rank, world_size):
    DTensor.redistribute = partly_redistributed(DTensor.redistribute)
    with distributed_mesh(mesh_config(tp=2)) as mesh:
        return split_step(mesh, IMAGE, RecomputeConfig(), "ring")


def test_parts_that_are_not_summed_are_noticed():
    step, want = run_ranks(without_the_sum, 2)[0], whole_step(IMAGE)
    for name in ("layers.0.adaLN_modulation.1.weight", "t_embedder.mlp.0.weight", "y_embedder.weight"):
        assert (step.gradients[name] - want.gradients[name]).abs().max() > 100 * GRADIENT, name


def parts_in_sequence(rank, world_size):
    """Two parts of the model with one layer each, as pipeline stages are, in one process per tp rank."""
    with distributed_mesh(mesh_config(tp=2)) as mesh:
        cp = context_parallel("ring", seq_len=VIDEO.num_patches, multiple=2, causal=False)
        parts = []
        for layer in range(2):
            with torch.device("meta"):
                part = DiT(VIDEO, cp.attend)
            part.keep(range(layer, layer + 1))
            split_dit(part, mesh.tp)
            init_parameters(part, mesh.device, lambda name, shape, part: weight_of(VIDEO, name, shape, part))
            parts.append(part)
        x, times, labels, target = data(VIDEO)
        sent = parts[0](x, cp.positions, times, labels)
        assert type(sent) is Tensor
        assert sent.shape == (BATCH, VIDEO.num_patches // 2, VIDEO.hidden_size)
        loss = (parts[1](sent, cp.positions, times, labels) - target).square().mean()
        loss.backward()
        gradients = {}
        for part in parts:
            for name, p in part.named_parameters():
                gradients[name] = gradients.get(name, torch.zeros(p.shape)) + full(p.grad)
        return Step(loss.item(), {}, gradients)


def test_parts_hand_on_plain_tensors_and_share_the_embedders_gradients():
    want = whole_step(VIDEO)
    for step in run_ranks(parts_in_sequence, 2):
        assert abs(step.loss - want.loss) < LOSS
        assert difference(step, want) < GRADIENT


def in_bfloat16(rank, world_size):
    """Return how far rounding the times to bfloat16 moves the output; zero would mean that they are rounded."""
    model = DiT(IMAGE)
    mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    shard_model(model, model.layers, mesh, bf16=True)
    init_parameters(model, torch.device("cpu"), lambda name, shape, part: weight_of(IMAGE, name, shape, part))
    x, times, labels, _ = data(IMAGE)
    outs = [model(x, torch.arange(15), t, labels) for t in (times, times.bfloat16().float())]
    assert outs[0].dtype == torch.bfloat16
    return (outs[0] - outs[1]).abs().max().item()


def test_times_are_not_rounded_with_the_weights():
    assert all(found > 0 for found in run_ranks(in_bfloat16, 2))
