"""Schedules by hand, who decays, and the norm of a gradient that lies in shards."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from model.config import ModelConfig
from model.llama import Llama
from tests.ranks import run_ranks
from train.optim import OptimizerConfig, build_optimizer, clip_gradients, gradient_norm, learning_rate


def rates(train_iters: int, *iterations: int, **config: object) -> list[float]:
    settings = OptimizerConfig(lr=1.0, **config)  # type: ignore[arg-type]
    return [learning_rate(settings, iteration, train_iters) for iteration in iterations]


def test_warm_up_is_linear_and_its_first_iteration_learns() -> None:
    for style in ("cosine", "WSD", "constant"):
        found = rates(100, 1, 2, 3, 4, lr_decay_style=style, lr_warmup_iters=4, min_lr=0.1)
        assert found == [0.25, 0.5, 0.75, 1.0]


def test_cosine() -> None:
    """From lr at the warm-up's end over the middle of lr and min_lr to min_lr at the end, and there it stays."""
    found = rates(110, 10, 35, 60, 85, 110, 500, lr_warmup_iters=10, min_lr=0.2)
    half = math.sqrt(0.5) / 2
    assert found == pytest.approx([1.0, 0.6 + 0.8 * half, 0.6, 0.6 - 0.8 * half, 0.2, 0.2], rel=1e-12)


def test_cosine_ends_at_lr_decay_iters() -> None:
    assert rates(100, 10, 20, 21, 100, lr_decay_iters=20) == pytest.approx([0.5, 0.0, 0.0, 0.0], abs=1e-12)
    # A resumed or stopped run is on the same curve: nothing but the iteration counts.
    assert rates(100, 10, lr_decay_iters=40) == rates(40, 10)


def test_wsd_is_stable_and_then_falls_in_a_line() -> None:
    found = rates(100, 5, 6, 80, 85, 90, 99, 100, lr_decay_style="WSD", lr_warmup_iters=5, lr_wsd_decay_iters=20)
    assert found == pytest.approx([1.0, 1.0, 1.0, 0.75, 0.5, 0.05, 0.0], abs=1e-12)
    assert rates(100, 85, 90, 95, lr_decay_style="WSD", min_lr=0.5) == pytest.approx([1.0, 1.0, 0.75])  # a tenth
    assert rates(5, 4, 5, lr_decay_style="WSD") == [1.0, 0.0]  # a tenth of 5 is one iteration


def test_constant_stays_past_the_end() -> None:
    assert rates(10, 3, 10, 99, lr_decay_style="constant", lr_warmup_iters=2, min_lr=0.5) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("style", ["cosine", "WSD"])
def test_rates_rise_and_then_never_rise_again(style: str) -> None:
    found = rates(200, *range(1, 201), lr_decay_style=style, lr_warmup_iters=20, min_lr=0.01)
    assert found[:20] == sorted(found[:20])
    assert found[19:] == sorted(found[19:], reverse=True)
    assert min(found) == 0.01
    assert max(found) == 1.0


@pytest.mark.parametrize(
    ("field", "value"),
    [("lr", 0.0), ("adam_eps", 0.0), ("min_lr", -1.0), ("min_lr", 1.0), ("weight_decay", -0.1), ("clip_grad", -1.0),
     ("lr_warmup_iters", -1), ("adam_beta1", 1.0), ("adam_beta2", -0.1), ("lr_decay_iters", 0),
     ("lr_wsd_decay_iters", 0)],
)  # fmt: skip
def test_a_wrong_setting_is_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"^{field} is {value}; it must"):
        OptimizerConfig(**{field: value})


def test_matrices_decay_and_norms_do_not() -> None:
    model = Llama(ModelConfig(num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=11))
    model.layers[0].mlp.down.weight.requires_grad_(False)
    optimizer = build_optimizer(OptimizerConfig(weight_decay=0.3, adam_beta1=0.8, adam_eps=1e-6), model)
    decaying, others = optimizer.param_groups
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert (decaying["betas"], decaying["eps"], decaying["fused"]) == ((0.8, 0.95), 1e-6, True)
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert {names[p] for p in others["params"]} == {n for n in names.values() if n.endswith("norm.weight")}
    assert {names[p] for p in decaying["params"]} == {
        n for n in names.values() if not n.endswith("norm.weight") and n != "layers.0.mlp.down.weight"
    }


def test_a_step_is_adamw_by_its_definition() -> None:
    """Loshchilov and Hutter 2019, algorithm 2, the decay scaled by the learning rate, as torch and Megatron have it."""
    model = nn.Linear(2, 1)
    weight, bias = (p.detach().double().clone() for p in (model.weight, model.bias))
    optimizer = build_optimizer(OptimizerConfig(lr=0.01, weight_decay=0.5), model)
    model(torch.ones(1, 2)).backward()  # every gradient is 1
    optimizer.step()
    # In the first step both moments, corrected for their start, are the gradient and its square.
    torch.testing.assert_close(model.weight.double(), weight * (1 - 0.01 * 0.5) - 0.01, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(model.bias.double(), bias - 0.01, rtol=1e-6, atol=1e-7)


SHAPES = [(3001, 1401), (7,), (2, 5), (1,)]
"""Large enough for float32 sums to be off; neither size divides by two, and one rank's share of the last is empty."""


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [1e-3 + 1e-3 * torch.randn(shape, generator=generator) for shape in SHAPES]


def exact_norm() -> float:
    return math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients()))


def norms_of_shards(rank: int, world_size: int) -> tuple[float, float, float]:
    """The norm, the same with float32 sums, and the norm once it is clipped."""
    mesh = init_device_mesh("cpu", (world_size,))
    parameters = []
    for gradient in gradients():
        parameter = nn.Parameter(distribute_tensor(torch.zeros_like(gradient), mesh, [Shard(0)]))
        parameter.grad = distribute_tensor(gradient, mesh, [Shard(0)])
        parameters.append(parameter)
    parameters.append(nn.Parameter(torch.zeros(3)))  # without a gradient
    norm = gradient_norm(parameters, mesh.get_group())
    squares = torch.stack([torch.linalg.vector_norm(p.grad.to_local()) for p in parameters[:-1]]).square().sum()
    torch.distributed.all_reduce(squares)
    clip_gradients(parameters, norm, 0.5)
    return norm, squares.sqrt().item(), gradient_norm(parameters, mesh.get_group())


def test_norm_over_shards_is_the_whole_gradients() -> None:
    exact = exact_norm()
    for size in (1, 2, 3):
        for norm, single, clipped in run_ranks(norms_of_shards, size):
            assert norm == pytest.approx(exact, rel=1e-12)
            assert clipped == pytest.approx(0.5, rel=1e-6)
            # Why it is summed in float64: in float32 the norm would depend on the number of ranks.
            assert abs(single - exact) / exact > 1e-6


def norm_over_two_dimensions(rank: int, world_size: int) -> float:
    """Two shards, each on two ranks."""
    mesh = init_device_mesh("cpu", (2, 2))
    parameters = []
    for gradient in gradients():
        parameter = nn.Parameter(distribute_tensor(torch.zeros_like(gradient), mesh, [Shard(0), Replicate()]))
        parameter.grad = distribute_tensor(gradient, mesh, [Shard(0), Replicate()])
        parameters.append(parameter)
    return gradient_norm(parameters)


def test_what_several_ranks_hold_counts_once() -> None:
    assert run_ranks(norm_over_two_dimensions, 4) == pytest.approx([exact_norm()] * 4, rel=1e-12)


@pytest.mark.parametrize(
    ("norm", "largest", "factor"),
    [(5.0, 1.0, 0.2), (5.0, 5.0, 1.0), (5.0, 6.0, 1.0), (5.0, 0.0, 1.0), (math.inf, 1.0, 1.0), (math.nan, 1.0, 1.0)],
)
def test_clipping_scales_what_is_too_long_and_leaves_the_rest(norm: float, largest: float, factor: float) -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0, 0.0])
    clip_gradients(parameters, norm, largest)
    assert parameters[0].grad.tolist() == pytest.approx([3 * factor, 0.0])
    assert parameters[1].grad.tolist() == pytest.approx([0.0, 4 * factor, 0.0])
    assert parameters[2].grad is None
