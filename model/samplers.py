"""Draw samples from a diffusion model: DDIM, DDPM and Euler's method, with guidance.

Elementwise as model/diffusion.py, with the same legend.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from model.diffusion import Diffusion, Method, broadcast
from runtime.errors import UserError

Denoise = Callable[[Tensor, Tensor], Tensor]
"""A model with fixed labels: x_t ``[B, T, W]``, times ``[B]`` -> its output, ``[B, T, W]`` or twice as wide."""


def guided(
    model: Callable[[Tensor, Tensor, Tensor], Tensor],
    labels: Tensor,
    null: int,
    scale: float,
    diffusion: Diffusion,
    channels: int | None = None,
) -> Denoise:
    """Add classifier-free guidance (Ho and Salimans 2021) to a model ``(x, times, labels)``; ``scale`` 1 adds none.

    Unguided channels and the variances are those of the requested class.

    Args:
        labels: classes, int64 ``[B]``.
        null: label that means no class.
        channels: guide only the first channels of the prediction; by default all. The original DiT guides 3 of 4, to
            reproduce its figures exactly, as it says (models.py, forward_with_cfg).
    """
    if scale == 1:
        return lambda x, times: model(x, times, labels)

    def denoise(x: Tensor, times: Tensor) -> Tensor:
        both = model(x.repeat(2, 1, 1), times.repeat(2), torch.cat([labels, torch.full_like(labels, null)]))
        (asked, variance), (free, _) = (diffusion.split(half) for half in both.chunk(2))
        moved = free + scale * (asked - free)  # [B, T, W]
        if channels is not None:
            moved = moved.where(
                torch.arange(moved.shape[-1], device=moved.device) % diffusion.channels < channels, asked
            )
        return diffusion.join(moved, variance)

    return denoise


def chosen_times(count: int, steps: int) -> list[int]:
    """Choose ``steps`` evenly spaced times, ascending, from 0 to count - 1 inclusive; one step takes the last."""
    if steps == 1:
        return [count - 1]
    return [round(i * (count - 1) / (steps - 1)) for i in range(steps)]


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
        steps: model evaluations; at most num_timesteps for ddim and ddpm.
        method: ddim adds no noise (Song et al. 2021, eta 0); ddpm adds noise at each step, with the learned variance
            if there is one, else the smaller fixed one; euler follows the velocity. Default: the objective's first.
        step_noise: for ddpm, returns noise shaped like ``noise`` to add after step 0, 1, ... steps - 2.

    Raises:
        UserError: the objective does not have the method, steps are out of range, or ddpm has no step_noise.
    """
    method = method or diffusion.methods[0]
    if method not in diffusion.methods:
        raise UserError(
            f"method is {method}, and the model was trained with objective {diffusion.config.objective}; use "
            + " or ".join(diffusion.methods)
        )
    most = None if method == "euler" else diffusion.config.num_timesteps
    if steps < 1 or (most is not None and steps > most):
        raise UserError(f"steps is {steps}; it must be 1 or more" + (f" and at most {most}" if most else ""))
    if method == "euler":
        return _euler(diffusion, denoise, noise, steps)
    if method == "ddim":
        return _ddim(diffusion, denoise, noise, steps)
    if step_noise is None:
        raise UserError("step_noise is None; ddpm adds noise at each step: give it, or use ddim")
    return _ddpm(diffusion, denoise, noise, steps, step_noise)


def _euler(diffusion: Diffusion, denoise: Denoise, x: Tensor, steps: int) -> Tensor:
    for step in range(steps):
        times = x.new_full((len(x),), diffusion.config.num_timesteps * (1 - step / steps), dtype=torch.float32)
        x = x - denoise(x, times).to(x.dtype) / steps
    return x


def _ddim(diffusion: Diffusion, denoise: Denoise, x: Tensor, steps: int) -> Tensor:
    chosen = chosen_times(diffusion.config.num_timesteps, steps)
    for time, before in zip(reversed(chosen), [*reversed(chosen[:-1]), None], strict=True):
        times = x.new_full((len(x),), time, dtype=torch.float32)
        prediction, _ = diffusion.split(denoise(x, times).to(x.dtype))
        x0, noise = diffusion.data_and_noise(prediction, x, times)
        x = x0 if before is None else diffusion.noised(x0, noise, torch.full_like(times, before))
    return x


def _ddpm(diffusion: Diffusion, denoise: Denoise, x: Tensor, steps: int, step_noise: Callable[[int], Tensor]) -> Tensor:
    chosen = chosen_times(diffusion.config.num_timesteps, steps)
    schedule = diffusion.schedule.skipping(torch.tensor(chosen)).to(x.device)
    for index, time in reversed(list(enumerate(chosen))):
        times = x.new_full((len(x),), time, dtype=torch.float32)
        prediction, variance = diffusion.split(denoise(x, times).to(x.dtype))
        x0, _ = diffusion.data_and_noise(prediction, x, times)
        at = torch.full_like(times, index, dtype=torch.int64)
        x, x_t = schedule.mean(x0, x, at), x
        if index:
            fixed = broadcast(schedule.small[at].log(), x_t)
            log_variance = fixed if variance is None else schedule.log_variance(variance, at)
            x = x + (0.5 * log_variance).exp() * step_noise(steps - 1 - index).to(x.dtype)
    return x
