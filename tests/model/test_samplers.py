import warnings

import pytest
import torch

from model.diffusion import Diffusion, DiffusionConfig
from model.samplers import chosen_times, draw, guided
from tests.model.test_diffusion import drawn, of

SHAPE = (2, 3, 4)
METHODS = [
    ("ddpm", "ddim"),
    ("ddpm", "ddpm"),
    ("v_prediction", "ddim"),
    ("v_prediction", "ddpm"),
    ("rectified_flow", "euler"),
]


def unruly(width):
    """A stand-in for a model: any smooth function of both inputs."""
    mix = drawn(SHAPE[-1], width, seed=7) / 2

    def denoise(x, times):
        return torch.sin(x @ mix + times.double().view(-1, 1, 1) / 300)

    return denoise


@pytest.mark.parametrize("objective", ["ddpm", "v_prediction"])
@pytest.mark.parametrize("method", ["ddim", "ddpm", "learned"])
def test_equals_diffusers_step_by_step(objective, method):
    """Over all 1,000 times, where the two agree on which are visited."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        diffusers = pytest.importorskip("diffusers")
    learned = method == "learned"
    settings = {"beta_start": 1e-4, "beta_end": 0.02, "clip_sample": False}
    settings["prediction_type"] = "epsilon" if objective == "ddpm" else objective
    if method == "ddim":
        scheduler = diffusers.DDIMScheduler(**settings, set_alpha_to_one=True)
    else:
        scheduler = diffusers.DDPMScheduler(
            **settings, variance_type="learned_range" if learned else "fixed_small"
        )
    scheduler.set_timesteps(1000)
    start, denoise = drawn(*SHAPE), unruly(SHAPE[-1] * (2 if learned else 1))
    diffusion = Diffusion(DiffusionConfig(objective=objective), learned, channels=SHAPE[-1])
    generator, twin_generator = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    x, noises = start, {}
    for time in scheduler.timesteps.tolist():
        output = denoise(x, torch.full((SHAPE[0],), float(time)))
        if method == "ddim":
            x = scheduler.step(output, time, x).prev_sample
        else:
            # It takes the channels, halves of dimension 1, and splits them there.
            step = scheduler.step(
                output.transpose(1, 2), time, x.transpose(1, 2), generator=generator
            )
            x = step.prev_sample.transpose(1, 2)
            if time:
                noise = torch.randn(
                    SHAPE[0], SHAPE[2], SHAPE[1], generator=twin_generator, dtype=torch.float64
                )
                noises[999 - time] = noise.transpose(1, 2)
    sampled = draw(
        diffusion,
        denoise,
        start,
        steps=1000,
        method="ddim" if method == "ddim" else "ddpm",
        step_noise=noises.get,
    )
    # Their tables are float32.
    torch.testing.assert_close(sampled, x, rtol=2e-3, atol=2e-3)
    assert (sampled - start).abs().max() > 0.1


def perfect(diffusion, mean, std):
    """The best prediction for data that is normal with this mean and standard deviation."""

    def denoise(x, times):
        signal, sigma = diffusion._levels(times, x)
        gap = (x - signal * mean) / (signal**2 * std**2 + sigma**2)
        data, noise = mean + signal * std**2 * gap, sigma * gap
        return diffusion.target(data, noise, times)

    return denoise


@pytest.mark.parametrize(("objective", "method"), METHODS)
def test_a_perfect_model_gives_the_distribution_back(objective, method):
    diffusion, mean, std, steps = of(objective), 0.4, 0.3, 1000 if method == "ddpm" else 200
    start = drawn(4000, 1, 2)
    noises = lambda step: drawn(4000, 1, 2, seed=step + 1)  # noqa: E731
    sampled = draw(
        diffusion,
        perfect(diffusion, mean, std),
        start,
        steps=steps,
        method=method,
        step_noise=noises,
    )
    # 8,000 values: standard errors of 0.0034 and 0.0024; over all times the smaller fixed variance
    # is short by 1 %.
    assert sampled.mean().item() == pytest.approx(mean, abs=0.014)
    assert sampled.std().item() == pytest.approx(std, abs=0.012)
    if (objective, method) == ("ddpm", "ddim"):  # negative control
        wrong = draw(
            diffusion,
            lambda x, times: 0.9 * perfect(diffusion, mean, std)(x, times),
            start,
            steps=steps,
        )
        assert abs(wrong.std().item() - std) > 0.02


def test_perfect_variances_make_few_steps_exact():
    """The step before is normal too.

    The smaller fixed variance leaves out what x_t does not say about the data.
    """
    mean, std, steps = 0.4, 0.3, 20
    learned, fixed = of("ddpm", learn_sigma=True), of("ddpm")
    chosen = chosen_times(1000, steps)
    schedule, predict = learned.schedule.skipping(torch.tensor(chosen)), perfect(learned, mean, std)

    def denoise(x, times):
        index = chosen.index(int(times[0]))
        alpha_bar = schedule.alpha_bars[index]
        unsaid = 1 / (1 / std**2 + alpha_bar / (1 - alpha_bar))
        variance = (
            schedule.posterior_variances[index] * (index > 0)
            + schedule.from_data[index] ** 2 * unsaid
        )
        min_log, max_log = schedule.posterior_variances[index].log(), schedule.betas[index].log()
        share = (variance.log() - min_log) / (max_log - min_log) if index else 0.0
        return learned.join(predict(x, times), torch.full_like(x, 2 * share - 1))

    def found(diffusion, model):
        noises = {step: drawn(8000, 1, 2, seed=step + 1) for step in range(steps)}
        return draw(
            diffusion, model, drawn(8000, 1, 2), steps=steps, method="ddpm", step_noise=noises.get
        )

    exact = found(learned, denoise)
    assert exact.mean().item() == pytest.approx(mean, abs=0.01)
    # All but the last step, which gives its mean, as in every implementation: hardly any noise is
    # left there.
    assert exact.std().item() == pytest.approx(std, abs=0.008)
    assert found(fixed, perfect(fixed, mean, std)).std().item() < 0.25


def test_euler_walks_the_straight_path():
    """A constant velocity is followed exactly, in one step as in many."""
    diffusion, start, velocity = of("rectified_flow"), drawn(*SHAPE), drawn(*SHAPE, seed=1)
    visited_times = []

    def denoise(x, times):
        visited_times.append(times[0].item())
        return velocity

    for steps in (1, 7):
        torch.testing.assert_close(draw(diffusion, denoise, start, steps=steps), start - velocity)
    assert visited_times[:3] == pytest.approx([1000, 1000, 1000 * 6 / 7])


def test_times_visited_are_those_of_the_original():
    """guided-diffusion's space_timesteps with one section."""
    for steps in (1, 2, 7, 50, 250, 1000):
        current, expected = 0.0, []
        for _ in range(steps):
            expected.append(round(current))
            current += 999 / max(steps - 1, 1)
        assert chosen_times(1000, steps) == (expected if steps > 1 else [999])


def test_guidance_of_the_first_channels_is_the_original_s():
    """forward_with_cfg of the original's models.py, on pictures, for 3 of 4 channels."""
    diffusion = Diffusion(DiffusionConfig(), learn_sigma=True, channels=4)
    x, labels, weight = (
        drawn(2, 4, 16),
        torch.tensor([3, 5]),
        drawn(11, 8, seed=1),
    )  # 4 patches of 2 x 2 places

    def picture(output, channels):
        """[B, 4, 4 * channels] -> [B, channels, 4, 4]; where a place lies does not matter here."""
        return output.unflatten(2, (4, channels)).permute(0, 3, 1, 2)

    def model(x, times, labels):
        pixels = x.unflatten(2, (4, 4))
        return (
            torch.cat([pixels, pixels.square()], dim=-1) * weight[labels][:, None, None]
        ).flatten(2)

    def forward_with_cfg(x, scale):
        half = x[: len(x) // 2]
        out = picture(
            model(torch.cat([half, half]), None, torch.cat([labels, torch.full_like(labels, 10)])),
            8,
        )
        eps, rest = out[:, :3], out[:, 3:]
        cond_eps, uncond_eps = torch.split(eps, len(eps) // 2, dim=0)
        half_eps = uncond_eps + scale * (cond_eps - uncond_eps)
        return torch.cat([torch.cat([half_eps, half_eps]), rest], dim=1)[: len(labels)]

    pictured = picture(guided(model, labels, 10, 4.0, diffusion, channels=3)(x, torch.zeros(2)), 8)
    torch.testing.assert_close(pictured, forward_with_cfg(torch.cat([x, x]), 4.0))
    whole = picture(guided(model, labels, 10, 4.0, diffusion)(x, torch.zeros(2)), 8)
    assert (whole - pictured).abs().amax(dim=(0, 2, 3)).gt(0.01).tolist() == [False] * 3 + [
        True
    ] + [False] * 4
