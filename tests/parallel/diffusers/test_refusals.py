"""Refusals before a step, by the layer and the reason, of all that cannot be right."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parallel.diffusers import shard
from parallel.diffusers.noise import epsilon, flow_matching, noise_like, uniform, v_prediction
from runtime.errors import UserError
from runtime.ranks import run_ranks
from tests.parallel.diffusers.cases import CASES, inputs_of, loss_of, model_of
from tests.parallel.diffusers.image_models import dit
from tests.parallel.diffusers.video_models import wan_clip

diffusers = pytest.importorskip("diffusers", reason="shards the models of diffusers")


def refusal(call):
    with pytest.raises(UserError) as error:
        call()
    return str(error.value)


def test_settings_are_refused_at_once():
    model = model_of(CASES["wan"])
    assert "Linear is none of the supported classes" in refusal(lambda: shard(nn.Linear(2, 2)))
    assert "leave out causal: the attention of these models is full" in refusal(
        lambda: shard(model, causal=True)
    )
    assert "softmax attention" in refusal(lambda: shard(model, method="lasp"))

    model.set_attn_processor(model.blocks[0].attn1.processor)
    model.blocks[1].compile()
    assert "blocks.1 is compiled" in refusal(lambda: shard(model))

    cached = model_of(CASES["flux"])
    cached.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.1))
    assert "cache" in refusal(lambda: shard(cached))

    plain = model_of(CASES["wan"])
    cp = shard(plain)
    assert "is sharded already" in refusal(lambda: shard(plain))
    assert "call gather after a forward" in refusal(lambda: cp.gather(torch.zeros(1, 2, 3)))
    with cp.paused():
        assert "within paused()" in refusal(lambda: cp.check(plain, {}, loss_of))
    assert "not the one that shard was called with" in refusal(
        lambda: cp.check(cached, {}, loss_of)
    )


def test_forwards_are_refused_by_the_layer():
    model = model_of(CASES["flux"])
    shard(model)
    inputs = inputs_of(CASES["flux"])
    residuals = [torch.zeros(2, 45, 96)]
    assert "controlnet_block_samples is given" in refusal(
        lambda: model(**inputs, controlnet_block_samples=residuals)
    )

    model = model_of(CASES["qwen"])
    shard(model)
    inputs = inputs_of(CASES["qwen"])
    inputs["encoder_hidden_states_mask"] = inputs["encoder_hidden_states_mask"].flip(1)
    assert "has padding before text tokens" in refusal(lambda: model(**inputs))

    pixart = model_of(CASES["pixart"])
    shard(pixart)
    inputs = {**inputs_of(CASES["pixart"]), "attention_mask": torch.ones(2, 25)}
    assert "transformer_blocks.0.attn1: its attention has a mask" in refusal(
        lambda: pixart(**inputs)
    )

    labels = dit().train()
    shard(labels)
    message = refusal(lambda: labels(**inputs_of(CASES["dit"])))
    assert "class_embedder" in message
    assert "dropout 0.1" in message


def test_an_attention_that_bypasses_sdpa_is_refused():
    model = model_of(CASES["wan"])
    shard(model)
    model.blocks[1].attn1.set_processor(lambda attention, hidden_states, *args: hidden_states)
    assert "blocks.1.attn1: it did not call torch's scaled_dot_product_attention" in refusal(
        lambda: model(**inputs_of(CASES["wan"]))
    )


def messages(rank, world_size):
    """Messages on each of three ranks."""
    model = model_of(CASES["wan"])
    results = [refusal(lambda: shard(model_of(CASES["wan"]), dist.group.WORLD, ulysses_degree=2))]
    shard(model, dist.group.WORLD, method="ulysses")
    inputs = inputs_of(CASES["wan"])
    inputs["hidden_states"] = inputs["hidden_states"] + (rank == 2)
    inputs["timestep"] = inputs["timestep"] + (rank == 1)
    results.append(refusal(lambda: model(**inputs)))

    loss = loss_of(model, wan_clip(2, 2, 4))  # the model is in order after a refused forward
    gradients = torch.autograd.grad(loss, model.proj_out.weight)
    assert bool(gradients[0].isfinite().all())

    model.train()
    model.enable_gradient_checkpointing(
        lambda block, *args: torch.utils.checkpoint.checkpoint(block, *args, use_reentrant=True)
    )
    latents = wan_clip(2, 2, 4)
    latents["hidden_states"].requires_grad_()
    results.append(refusal(lambda: loss_of(model, latents).backward()))
    return results


def test_ranks_with_other_inputs_are_named_on_every_rank():
    results = run_ranks(messages, 3)
    assert results[0] == results[1] == results[2]
    degree, other, copies = results[0]
    assert "ulysses_degree" in degree
    assert other.startswith(
        "inputs ['hidden_states'], ['timestep'] of the group's ranks [1, 2] differ from those of "
        "its rank 0"
    )
    assert "use_reentrant=False" in copies


def test_draws_depend_on_the_seed_and_the_sample_alone():
    latents = torch.zeros(3, 2, 4)
    noise = noise_like(latents, (5, 6, 7), seed=1)
    assert torch.equal(noise[1:2], noise_like(latents[:1], (6,), seed=1))
    assert not torch.equal(noise[:1], noise_like(latents[:1], (5,), seed=2))
    assert torch.equal(uniform((5, 6))[1:], uniform((6,)))
    many = noise_like(torch.zeros(400, 50), range(400))
    assert abs(float(many.mean())) < 0.03
    assert abs(float(many.std()) - 1) < 0.03


def test_objectives_are_those_of_diffusers_schedulers():
    latents, noise = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    steps = torch.tensor([10, 700])
    scheduler = diffusers.DDPMScheduler(prediction_type="v_prediction")
    alphas = scheduler.alphas_cumprod[steps]
    noisy, target = epsilon(latents, noise, alphas)
    assert torch.allclose(noisy, scheduler.add_noise(latents, noise, steps), atol=1e-6)
    assert target is noise
    _, velocity = v_prediction(latents, noise, alphas)
    assert torch.allclose(velocity, scheduler.get_velocity(latents, noise, steps), atol=1e-6)

    flow = diffusers.FlowMatchEulerDiscreteScheduler()
    sigma = flow.sigmas[torch.tensor([3, 800])]
    noisy, target = flow_matching(latents, noise, sigma)
    assert torch.allclose(noisy, flow.scale_noise(latents, flow.timesteps[[3, 800]], noise))
    assert torch.allclose(latents + target, noise)
