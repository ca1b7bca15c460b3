"""Settings of the optimizer, the curves of its learning rate, which weights decay, and the norm of a gradient."""

import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile

from bench.memory import events
from model.language import LanguageModel
from runtime.ranks import run_ranks
from tests.model.models import model_config
from train.optim import NORM_CHUNK, OptimizerConfig, build_optimizer, clip_gradients, gradient_norm, schedule_of
from train.resume import shortened


@pytest.mark.parametrize(
    ("field", "value"),
    [("lr", 0.0), ("adam_eps", 0.0), ("min_lr", -1.0), ("min_lr", 1.0), ("weight_decay", -0.1), ("clip_grad", -1.0),
     ("lr_warmup_iters", -1), ("adam_beta1", 1.0), ("adam_beta2", -0.1), ("lr_decay_iters", 0),
     ("lr_wsd_decay_iters", 0), ("lr_warmup_init", 1.0), ("lr_warmup_fraction", 1.0), ("lr_decay_style", "stepwise")],
)  # fmt: skip
def test_a_wrong_setting_is_named(field, value):
    with pytest.raises(ValueError, match=rf"^{field} is {value}; it must"):
        OptimizerConfig(**{field: value})


def test_two_warm_ups_and_two_choices_of_a_schedule_contradict_themselves():
    with pytest.raises(ValueError, match=r"^lr_warmup_iters is 3; and lr_warmup_fraction 0.1"):
        OptimizerConfig(lr_warmup_iters=3, lr_warmup_fraction=0.1)
    with pytest.raises(ValueError, match="override_opt_param_scheduler and use_checkpoint_opt_param_scheduler are set"):
        OptimizerConfig(override_opt_param_scheduler=True, use_checkpoint_opt_param_scheduler=True)


def test_matrices_decay_and_norms_do_not():
    model = LanguageModel(model_config(num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=11))
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


def test_a_step_is_adamw_by_its_definition():
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


def gradients():
    generator = torch.Generator().manual_seed(3)
    return [1e-3 + 1e-3 * torch.randn(shape, generator=generator) for shape in SHAPES]


def exact_norm():
    return math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients()))


def laid_out(mesh, *placements):
    """Return parameters with the gradients on a mesh."""
    parameters = []
    for gradient in gradients():
        parameter = nn.Parameter(distribute_tensor(torch.zeros_like(gradient), mesh, placements))
        parameter.grad = distribute_tensor(gradient, mesh, placements)
        parameters.append(parameter)
    return parameters


def norms_of_shards(rank, world_size):
    """The norm, the same with float32 sums, and the norm once it is clipped."""
    mesh = init_device_mesh("cpu", (world_size,))
    parameters = [*laid_out(mesh, Shard(0)), nn.Parameter(torch.zeros(3))]  # the last without a gradient
    norm = gradient_norm(parameters, mesh.get_group()).item()
    squares = torch.stack([torch.linalg.vector_norm(p.grad.to_local()) for p in parameters[:-1]]).square().sum()
    torch.distributed.all_reduce(squares)
    clip_gradients(parameters, norm, 0.5)
    return norm, squares.sqrt().item(), gradient_norm(parameters, mesh.get_group()).item()


def test_norm_over_shards_is_the_whole_gradients_and_counts_what_several_ranks_hold_once():
    exact = exact_norm()
    for size in (1, 3):
        for norm, single, clipped in run_ranks(norms_of_shards, size):
            assert norm == pytest.approx(exact, rel=1e-12)
            assert clipped == pytest.approx(0.5, rel=1e-6)
            # Why it is summed in float64: in float32 the norm would depend on the number of ranks.
            assert abs(single - exact) / exact > 1e-6
    assert run_ranks(norm_over_two_dimensions, 4) == pytest.approx([exact_norm()] * 4, rel=1e-12)


def norm_over_two_dimensions(rank, world_size):
    """Two shards, each on two ranks."""
    return gradient_norm(laid_out(init_device_mesh("cpu", (2, 2)), Shard(0), Replicate())).item()


def largest_allocation(run):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    return max(allocated for _, allocated in events(recorded))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_copies_no_gradient_and_is_exact(dtype, monkeypatch):
    """A gradient of 4096 x 4096, 67 MB in float32, of which a copy in float64 is 134 MB."""
    gradient = torch.randn(4096, 4096, generator=torch.Generator().manual_seed(4)).to(dtype)
    small = [torch.full((3, 5), 1e3), torch.zeros(0, 7), torch.randn(5, 7).T]
    exact = sum(torch.linalg.vector_norm(x, dtype=torch.float64).square() for x in (gradient, *small)).sqrt()
    parameters = [nn.Parameter(torch.empty_like(x)) for x in (gradient, *small)]
    for parameter, x in zip(parameters, (gradient, *small), strict=True):
        parameter.grad = x
    found = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    assert largest_allocation(lambda: found.append(gradient_norm(parameters))) <= 8 * NORM_CHUNK
    torch.testing.assert_close(found[0], exact, rtol=1e-12, atol=0)
    # What it was made by before, and why not in float32: the control of both.
    assert largest_allocation(lambda: torch.linalg.vector_norm(gradient, dtype=torch.float64)) == 8 * gradient.numel()
    alone = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    assert abs(torch._foreach_norm([gradient], 2, torch.float32)[0] / alone - 1) > 1e-4


@pytest.mark.parametrize(
    ("norm", "largest", "factor"),
    [(5.0, 1.0, 0.2), (5.0, 5.0, 1.0), (5.0, 6.0, 1.0), (5.0, 0.0, 1.0), (math.inf, 1.0, 1.0), (math.nan, 1.0, 1.0)],
)
def test_clipping_scales_what_is_too_long_and_leaves_the_rest(norm, largest, factor):
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0, 0.0])
    clip_gradients(parameters, norm, largest)
    assert parameters[0].grad.tolist() == pytest.approx([3 * factor, 0.0])
    assert parameters[1].grad.tolist() == pytest.approx([0.0, 4 * factor, 0.0])
    assert parameters[2].grad is None


def rates(train_iters, *iterations, **config):
    schedule = schedule_of(OptimizerConfig(lr=1.0, **config), train_iters)
    return [schedule.rate(iteration) for iteration in iterations]


def test_curves_begin_with_a_warm_up_and_end_with_the_decay():
    """Nothing but the iteration counts, so a resumed or stopped run is on the same curve."""
    for style in ("cosine", "WSD", "constant"):
        found = rates(100, 1, 2, 3, 4, lr_decay_style=style, lr_warmup_iters=4, min_lr=0.1)
        assert found == [0.25, 0.5, 0.75, 1.0]
    assert rates(100, 10, 20, 21, 100, lr_decay_iters=20) == pytest.approx([0.5, 0.0, 0.0, 0.0], abs=1e-12)
    assert rates(100, 10, lr_decay_iters=40) == rates(40, 10)
    late = {"lr_decay_style": "WSD", "lr_warmup_iters": 95, "lr_decay_iters": 100}
    assert rates(100, 95, 96, 97, 100, **late) == pytest.approx([1.0, 0.8, 0.6, 0.0])
    assert rates(100, 400, lr_decay_style="inverse-square-root", lr_warmup_iters=4) == [0.1]


STYLES = [
    ("constant", "linear"),
    ("linear", "linear"),
    ("cosine", "linear"),
    ("inverse-square-root", "linear"),
    *(("WSD", shape) for shape in ("linear", "cosine", "exponential", "minus_sqrt")),
]


def megatrons(schedule, batch):
    """The rates of Megatron's first 60 iterations, as its training loop steps the schedule: after each, by its batch.

    Without a warm-up its inverse square root is that of the samples, here of the iterations: alike for a batch of 1.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.core\..*")
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    group = {"params": []}
    scheduler = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),
        init_lr=schedule.lr_warmup_init,
        max_lr=schedule.lr,
        min_lr=schedule.min_lr,
        lr_warmup_steps=schedule.lr_warmup_iters * batch,
        lr_decay_steps=(schedule.lr_decay_iters or 50) * batch,
        lr_decay_style=schedule.lr_decay_style,
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=50 * batch,
        wd_incr_style="constant",
        wsd_decay_steps=(schedule.lr_wsd_decay_iters or 1) * batch,
        lr_wsd_decay_style=schedule.lr_wsd_decay_style,
    )
    found = []
    for _ in range(60):
        found.append(group["lr"])
        scheduler.step(batch)
    return found


@pytest.mark.parametrize(("style", "wsd"), STYLES)
@pytest.mark.parametrize("warmup", [0, 7])
def test_every_style_is_megatrons_one_iteration_earlier(style, wsd, warmup):
    config = OptimizerConfig(
        lr=2e-3, min_lr=1e-5, lr_decay_style=style, lr_wsd_decay_style=wsd, lr_warmup_iters=warmup,
        lr_warmup_init=3e-4, lr_decay_iters=50, lr_wsd_decay_iters=20,
    )  # fmt: skip
    schedule = schedule_of(config, 60)
    assert [schedule.rate(n) for n in range(1, 60)] == pytest.approx(
        megatrons(schedule, batch=4 if warmup else 1)[1:], rel=1e-12
    )


def test_a_fraction_of_the_decay_is_megatrons_warm_up():
    schedule = schedule_of(OptimizerConfig(lr=1.0, lr_warmup_fraction=0.1, lr_decay_iters=50), 100)
    assert schedule.lr_warmup_iters == 5
    assert schedule_of(OptimizerConfig(lr_warmup_fraction=0.99), 10).lr_warmup_iters == 9


def test_a_run_too_short_for_its_warm_up_and_final_decay_takes_less_and_says_so():
    config = OptimizerConfig(lr_warmup_iters=10)
    taken = {length: schedule_of(config, length).lr_warmup_iters for length in (1, 2, 5, 10, 11, 1000)}
    assert taken == {1: 0, 2: 1, 5: 1, 10: 1, 11: 10, 1000: 10}
    assert shortened(config, 11) == []
    (note,) = shortened(config, 5)
    assert note.startswith("note: lr_warmup_iters is 10, too many for train_iters 5: it is 1 in this run")
    config = OptimizerConfig(lr_decay_style="WSD", lr_warmup_iters=10, lr_wsd_decay_iters=20)
    assert schedule_of(config, 5).lr_wsd_decay_iters == 4
    assert [note.split()[1] for note in shortened(config, 5)] == ["lr_warmup_iters", "lr_wsd_decay_iters"]
    assert schedule_of(config, 5).rate(5) == config.min_lr


def test_a_schedule_taken_over_gives_the_same_rates_in_a_run_of_any_length():
    for style, wsd in STYLES:
        config = OptimizerConfig(lr_decay_style=style, lr_wsd_decay_style=wsd, lr_warmup_fraction=0.1)
        schedule = schedule_of(config, 40)
        assert schedule_of(schedule.taken_by(OptimizerConfig(lr=7.0)), 300) == schedule
