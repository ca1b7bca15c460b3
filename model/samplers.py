"""Samplers of diffusion models: DDIM, DDPM and Euler's method, with classifier-free guidance.

Shapes as in ``model/diffusion.py``: B samples, T patches, W values of a patch.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from model.diffusion import Diffusion, Method, broadcast

Denoise = Callable[[Tensor, Tensor], Tensor]
"""A model with fixed labels: x_t ``[B, T, W]``, times ``[B]`` -> its output, ``[B, T, W]``, or
``[B, T, 2 W]`` with learned variances."""


def guided(
    model: Callable[[Tensor, Tensor, Tensor], Tensor],
    labels: Tensor,
    null: int,
    scale: float,
    diffusion: Diffusion,
    channels: int | None = None,
) -> Denoise:
    """Add classifier-free guidance to a model (Ho and Salimans 2021).

    The guided prediction is the one without a class, moved by ``scale`` times the difference to the
    one with the class. Unguided channels and the variances come from the output with the class.

    Args:
        model: (x, times, labels) -> its output.
        labels: classes, int64 ``[B]``.
        null: the label that means no class.
        scale: scale of the guidance; 1 adds none.
        channels: number of the prediction's first channels to guide; by default all. The original
            DiT guides 3 of 4, "for exact reproducibility reasons" (models.py, forward_with_cfg).
    """
    if scale == 1:
        return lambda x, times: model(x, times, labels)

    def denoise(x: Tensor, times: Tensor) -> Tensor:
        # One call computes both outputs: the first half has the classes, the second none.
        all_labels = torch.cat([labels, torch.full_like(labels, null)])  # [2 B]
        output = model(x.repeat(2, 1, 1), times.repeat(2), all_labels)
        conditional, unconditional = output.chunk(2)
        prediction, variance = diffusion.split(conditional)
        free_prediction, _ = diffusion.split(unconditional)
        result = free_prediction + scale * (prediction - free_prediction)  # [B, T, W]
        if channels is not None:
            channel = torch.arange(result.shape[-1], device=result.device) % diffusion.channels
            result = result.where(channel < channels, prediction)
        return diffusion.join(result, variance)

    return denoise


def chosen_times(count: int, steps: int) -> list[int]:
    """Choose ``steps`` times evenly from 0 to count - 1, ascending; one step takes the last."""
    if steps == 1:
        return [count - 1]
    return [round(step * (count - 1) / (steps - 1)) for step in range(steps)]


@torch.no_grad()
def draw(
    diffusion: Diffusion,
    denoise: Denoise,
    noise: Tensor,
    *,
    steps: int,
    method: Method | None = None,
    step_noise: Callable[[int], Tensor] | None = None,
) -> Tensor:
    """Draw samples ``[B, T, W]`` starting from ``noise``, in its dtype.

    Args:
        steps: number of model evaluations, 1 or more; at most num_timesteps for ddim and ddpm.
        method: one of ``diffusion.methods``, by default the first: ddim adds no noise (Song et al.
            2021, eta 0); ddpm adds noise at each step, with the learned variance if there is one,
            else the smaller fixed one; euler follows the velocity.
        step_noise: function for ddpm that returns the noise, shaped like ``noise``, to add after a
            step from 0 to steps - 2.
    """
    method = method or diffusion.methods[0]
    if method == "ddpm":
        assert step_noise is not None
        return _ddpm(diffusion, denoise, noise, steps, step_noise)
    if method == "euler":
        return _euler(diffusion, denoise, noise, steps)
    return _ddim(diffusion, denoise, noise, steps)


def _euler(diffusion: Diffusion, denoise: Denoise, x: Tensor, steps: int) -> Tensor:
    count = diffusion.config.num_timesteps
    for step in range(steps):
        times = x.new_full((len(x),), count * (1 - step / steps), dtype=torch.float32)
        x = x - denoise(x, times).to(x.dtype) / steps
    return x


def _ddim(diffusion: Diffusion, denoise: Denoise, x: Tensor, steps: int) -> Tensor:
    chosen = chosen_times(diffusion.config.num_timesteps, steps)
    for index, time in reversed(list(enumerate(chosen))):
        times = x.new_full((len(x),), time, dtype=torch.float32)
        prediction, _ = diffusion.split(denoise(x, times).to(x.dtype))
        x0, noise = diffusion.data_and_noise(prediction, x, times)
        if index == 0:
            return x0
        x = diffusion.noised(x0, noise, torch.full_like(times, chosen[index - 1]))
    return x


def _ddpm(
    diffusion: Diffusion,
    denoise: Denoise,
    x: Tensor,
    steps: int,
    step_noise: Callable[[int], Tensor],
) -> Tensor:
    chosen = chosen_times(diffusion.config.num_timesteps, steps)
    schedule = diffusion.schedule.skipping(torch.tensor(chosen)).to(x.device)
    for index, time in reversed(list(enumerate(chosen))):
        times = x.new_full((len(x),), time, dtype=torch.float32)
        prediction, variance = diffusion.split(denoise(x, times).to(x.dtype))
        x0, _ = diffusion.data_and_noise(prediction, x, times)
        indices = torch.full_like(times, index, dtype=torch.int64)  # [B], steps of the short chain
        mean = schedule.mean(x0, x, indices)
        if index == 0:
            return mean
        if variance is None:
            log_variance = broadcast(schedule.posterior_variances[indices].log(), x)
        else:
            log_variance = schedule.log_variance(variance, indices)
        x = mean + (0.5 * log_variance).exp() * step_noise(steps - 1 - index).to(x.dtype)
    return x
