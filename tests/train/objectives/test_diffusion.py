"""The denoising objective.

What is drawn for a sample, how it is shared out, and the loss of one process.
"""

import pytest
import torch

from model.diffusion import Diffusion, DiffusionConfig
from model.dit import DiT, Modulation, patchify
from model.dit_config import DiTConfig
from parallel.context import context_parallel
from runtime.ranks import run_ranks
from train.objectives.diffusion import Denoising

MODEL = DiTConfig(
    num_layers=1,
    hidden_size=16,
    num_attention_heads=2,
    latent_shape=(3, 6, 6),
    num_classes=5,
    class_dropout_prob=0.5,
)
CPU = torch.device("cpu")


def batch(*samples):
    latents = torch.randn(
        len(samples), *MODEL.latent_shape, generator=torch.Generator().manual_seed(0)
    )
    labels = torch.arange(len(samples)) % MODEL.num_classes
    return {"latents": latents, "labels": labels, "sample": torch.tensor(samples)}


def objective(seed=1, group=None, kind="ddpm"):
    cp = context_parallel("ring", seq_len=MODEL.num_patches, group=group, causal=False)
    diffusion = Diffusion(DiffusionConfig(objective=kind), channels=3)
    return Denoising(cp, CPU, MODEL, diffusion, seed)


def test_what_is_drawn_depends_on_seed_and_sample_alone():
    together, alone = objective().local(batch(7, 8, 9)), objective().local(batch(8))
    for name in ("noise", "times"):
        assert torch.equal(together[name][1:2], alone[name])
        assert not torch.equal(together[name][0], together[name][1])
        assert not torch.equal(objective(2).local(batch(8))[name], alone[name])


def test_noise_times_and_dropped_labels_have_their_distributions():
    local = objective().local(batch(*range(400)))
    assert local["noise"].mean().abs() < 0.02
    assert abs(local["noise"].std() - 1) < 0.02
    assert abs(local["times"].mean() - 499.5) < 50
    dropped = local["labels"] == MODEL.num_classes
    assert 150 < dropped.sum() < 250
    labels = batch(*range(400))["labels"]
    assert torch.equal(local["labels"][~dropped], labels[~dropped])


@pytest.mark.parametrize("kind", ["ddpm", "v_prediction", "rectified_flow"])
def test_the_loss_is_the_naive_one_without_fillers(kind):
    model, trained, samples = DiT(MODEL), objective(kind=kind), batch(3, -1, 5)
    model.init_weights(0)
    local = trained.local(samples)
    x0, noise, times = patchify(samples["latents"], MODEL), local["noise"], local["times"]
    assert int(local["count"]) == 2 * MODEL.num_patches
    diffusion = Diffusion(DiffusionConfig(objective=kind))
    output = model(
        diffusion.noised(x0, noise, times), torch.arange(MODEL.num_patches), times, local["labels"]
    )
    elements = (output - diffusion.target(x0, noise, times)).square()
    want = elements[[0, 2]].mean() * 2 * MODEL.num_patches
    torch.testing.assert_close(trained.loss_sum(model, local), want)


@pytest.mark.parametrize("kind", ["ddpm", "rectified_flow"])
def test_joined_samples_have_the_loss_that_they_have_apart(kind):
    samples, patches = batch(3, -1, 5, 8), MODEL.num_patches
    alone = objective(kind=kind)
    whole = context_parallel("ring", seq_len=4 * patches, causal=False)
    bounded = whole.under(documents=tuple(range(0, 4 * patches + 1, patches)))
    losses = {}
    for name, cp in (("apart", None), ("joined", bounded), ("one document", whole)):
        trained = (
            alone if cp is None else Denoising(cp, CPU, MODEL, alone._diffusion, 1, joined=True)
        )
        model = DiT(MODEL) if cp is None else DiT(MODEL, cp.attend)
        generator = torch.Generator().manual_seed(0)
        for weight in model.parameters():
            torch.nn.init.normal_(weight, 0, 0.3, generator=generator)
        local = trained.local(samples)
        assert int(local["count"]) == 3 * patches
        losses[name] = trained.loss_sum(model, local).item()
    assert losses["joined"] == pytest.approx(losses["apart"], rel=2e-6)
    assert losses["one document"] != pytest.approx(losses["apart"], rel=1e-3), (
        "negative control: bounds ignored"
    )


def test_joined_samples_have_their_gradients_in_bfloat16_too():
    """A row of the modulation sums the gradients of all its patches.

    In bfloat16 a sum of thousands would stop.
    """
    apart, joined = (torch.nn.Sequential(Modulation(16, 2)) for _ in range(2))
    joined.load_state_dict(apart.state_dict())
    gradients = []
    for form, sample in ((apart, None), (joined, torch.arange(4).repeat_interleave(4096))):
        module = form.bfloat16()[0]
        conditions = torch.ones(4, 16, dtype=torch.bfloat16)
        shift, _ = module(conditions, sample)
        x = shift.expand(4, 4096, 16) if sample is None else shift
        (gradient,) = torch.autograd.grad(x.float().sum(), module[1].bias)
        gradients.append(gradient.float())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0.01, atol=0)


def shared(rank, world_size, folder):
    world_objective = objective(group=torch.distributed.group.WORLD)
    local = world_objective.local(batch(4, 5))
    return local, int(local["count"])


def test_ranks_have_their_patches_of_the_same_noise_and_no_loss_of_padding(tmp_path):
    """Nine patches on two ranks: the second has one of padding."""
    want = objective().local(batch(4, 5))
    (first, count), (second, rest) = run_ranks(shared, 2, tmp_path)
    assert (count, rest) == (2 * 5, 2 * 4)
    for name in ("noise", "latents", "patches"):
        assert torch.equal(torch.cat([first[name], second[name][:, :4]], dim=1), want[name])
    for name in ("times", "labels"):
        assert torch.equal(first[name], want[name])
        assert torch.equal(second[name], want[name])
