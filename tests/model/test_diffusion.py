import math

import pytest
import torch

from model.diffusion import Diffusion, DiffusionConfig

OBJECTIVES = ["ddpm", "v_prediction", "rectified_flow"]
B, T, PLACES, C = 5, 3, 4, 2
WIDTH = PLACES * C


def of(objective, learn_sigma=False, channels=C, **settings):
    return Diffusion(DiffusionConfig(objective=objective, **settings), learn_sigma, channels)


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def alpha_bars(count=1000):
    """By a plain loop over the definition."""
    alpha_bar, bars = 1.0, []
    for i in range(count):
        alpha_bar *= 1 - (1000 / count) * (1e-4 + (0.02 - 1e-4) * i / (count - 1))
        bars.append(alpha_bar)
    return bars


def test_noise_follows_the_schedule_or_the_straight_path():
    x0, noise = drawn(3, T, WIDTH), drawn(3, T, WIDTH, seed=1)
    times = torch.tensor([0.0, 400.0, 999.0])
    bars = alpha_bars()
    for row, time in enumerate([0, 400, 999]):
        expected = math.sqrt(bars[time]) * x0[row] + math.sqrt(1 - bars[time]) * noise[row]
        for objective in ("ddpm", "v_prediction"):
            torch.testing.assert_close(of(objective).noised(x0, noise, times)[row], expected)
        flow = of("rectified_flow").noised(x0, noise, times)[row]
        torch.testing.assert_close(flow, (1 - time / 1000) * x0[row] + time / 1000 * noise[row])


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_target_leads_back_to_data_and_noise(objective):
    diffusion = of(objective)
    x0, noise, times = (
        drawn(B, T, WIDTH),
        drawn(B, T, WIDTH, seed=1),
        torch.tensor([0.0, 1.0, 300.0, 700.0, 990.0]),
    )
    x_t = diffusion.noised(x0, noise, times)
    target = diffusion.target(x0, noise, times)
    found_x0, found_noise = diffusion.data_and_noise(target, x_t, times)
    torch.testing.assert_close(found_x0, x0)
    torch.testing.assert_close(found_noise, noise)
    loss = diffusion.loss(target + 0.5, x0, noise, x_t, times)
    torch.testing.assert_close(loss, torch.full_like(x0, 0.25))
    assert loss.dtype == torch.float64
    halves = x0.float(), noise.float(), x_t.float()
    assert diffusion.loss(target.bfloat16(), *halves, times).dtype == torch.float32


def naive_bound(prediction, variance, x0, x_t, t, count):
    """The bound's term for one element, in bits.

    The formulas are those of Ho et al. and of Nichol and Dhariwal.
    """
    bars = alpha_bars(count)
    bar, before = bars[t], bars[t - 1] if t else 1.0
    beta = 1 - bar / before
    small = beta * (1 - before) / (1 - bar)
    if t == 0:
        small = (1 - bars[1] / bars[0]) * (1 - bars[0]) / (1 - bars[1])
    share = (variance + 1) / 2
    log_variance = share * math.log(beta) + (1 - share) * math.log(small)

    def mean(data):
        return (math.sqrt(before) * beta * data + math.sqrt(1 - beta) * (1 - before) * x_t) / (
            1 - bar
        )

    guess = mean((x_t - math.sqrt(1 - bar) * prediction) / math.sqrt(bar))
    if t:
        gap = math.log(small) - log_variance
        kl = 0.5 * (-gap - 1 + math.exp(gap) + (mean(x0) - guess) ** 2 * math.exp(-log_variance))
        return kl / math.log(2)

    def cdf(x):
        return 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    scale = math.exp(-0.5 * log_variance)
    above, below = cdf(scale * (x0 - guess + 1 / 255)), cdf(scale * (x0 - guess - 1 / 255))
    mass = above if x0 < -0.999 else 1 - below if x0 > 0.999 else above - below
    return -math.log(max(mass, 1e-12)) / math.log(2)


@pytest.mark.parametrize("count", [1000, 250])
def test_learned_variance_adds_the_variational_bound(count):
    """With weight 1 for any number of steps.

    The original's create_diffusion leaves rescale_learned_sigmas off.
    """
    diffusion = Diffusion(DiffusionConfig(num_timesteps=count), learn_sigma=True, channels=C)
    x0, noise = drawn(B, T, WIDTH) / 3, drawn(B, T, WIDTH, seed=1)
    x0[0, 0, :2] = torch.tensor([-1.0, 1.0])
    x0[0, 1, :2] = torch.tensor([-1.0, 1.0])
    times = torch.tensor([0.0, 1.0, 10.0, count / 2, count - 1])
    x_t = diffusion.noised(x0, noise, times)
    # Near the noise, as a trained model: far from it, the likelihood at time 0 meets its floor.
    prediction, variance = noise + 0.1 * drawn(B, T, WIDTH, seed=2), drawn(B, T, WIDTH, seed=3)
    output = diffusion.join(prediction, variance).requires_grad_()
    loss = diffusion.loss(output, x0, noise, x_t, times)
    for row, time in enumerate(times.int().tolist()):
        for place in range(T):
            for i in range(WIDTH):
                index = row, place, i
                p, v, x, y = (values[index].item() for values in (prediction, variance, x0, x_t))
                expected = (p - noise[index].item()) ** 2 + naive_bound(p, v, x, y, time, count)
                assert loss[index].item() == pytest.approx(expected, rel=1e-7, abs=1e-9)
    (gradient,) = torch.autograd.grad(loss.sum(), output)
    of_prediction, of_variance = diffusion.split(gradient)
    # The bound must not move the prediction: its gradient is the squared error's alone.
    torch.testing.assert_close(of_prediction, 2 * (prediction - noise))
    assert (of_variance != 0).float().mean() > 0.9


def test_predictions_and_variances_alternate_place_by_place():
    """As the original's final layer has them.

    Patch x patch x (prediction channels, variance channels).
    """
    output = torch.arange(2.0 * WIDTH).view(1, 1, 2 * WIDTH)
    prediction, variance = of("ddpm", learn_sigma=True).split(output)
    assert prediction.flatten().tolist() == [0, 1, 4, 5, 8, 9, 12, 13]
    assert variance.flatten().tolist() == [2, 3, 6, 7, 10, 11, 14, 15]
    assert of("ddpm", learn_sigma=True).join(prediction, variance).equal(output)


def test_times_are_uniform_or_logit_normal():
    uniform = torch.tensor([0.0, 0.0015, 0.5, 0.9999999])
    normal = torch.tensor([-40.0, -1.0, 0.0, 2.0])
    assert of("ddpm").times(uniform, normal).tolist() == [0.0, 1.0, 500.0, 999.0]
    times = of("rectified_flow", logit_normal_mean=0.5, logit_normal_std=2.0).times(uniform, normal)
    expected = [1000 / (1 + math.exp(-(0.5 + 2 * value))) for value in normal.tolist()]
    torch.testing.assert_close(times, torch.tensor(expected))
    assert times.dtype == torch.float32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_timesteps": 1}, "num_timesteps is 1"),
        ({"objective": "rectified_flow", "logit_normal_std": 0.0}, "logit_normal_std is 0"),
        (
            {"objective": "rectified_flow", "logit_normal_mean": math.nan},
            "logit_normal_mean is nan",
        ),
        ({"logit_normal_std": 2.0}, "logit_normal_std is 2.0, but objective ddpm"),
    ],
)
def test_settings_out_of_range_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        DiffusionConfig(**settings)


def test_a_flow_has_no_variance_to_learn():
    with pytest.raises(ValueError, match="learn_sigma is true"):
        of("rectified_flow", learn_sigma=True)
