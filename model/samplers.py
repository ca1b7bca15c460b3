"""How samples are drawn from a diffusion model: DDIM, DDPM and Euler's method, with guidance.

Elementwise, as model/diffusion.py, whose legend holds here too.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from model.diffusion import Diffusion, Method, broadcast
from runtime.errors import UserError

Denoise = Callable[[Tensor, Tensor], Tensor]
"""The model with its labels: x_t ``[B, T, W]`` and times ``[B]`` to its output, ``[B, T, W]`` or twice as wide."""


def guided(
    model: Callable[[Tensor, Tensor, Tensor], Tensor],
    labels: Tensor,
    null: int,
    scale: float,
    diffusion: Diffusion,
    channels: int | None = None,
) -> Denoise:
    """The model ``(x, times, labels)`` with classifier-free guidance (Ho and Salimans 2021); ``scale`` 1 is without.

    What is not guided, and the variances, are those of the asked class.

    Args:
        labels: classes, int64 ``[B]``.
        null: label that stands for no class.
        channels: how many channels of the prediction are guided, the first ones; by default all. The original DiT
            guides 3 of 4, for exact reproduction, as it says, of its figures (models.py, forward_with_cfg).
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
    """``steps`` of the times 0 to count - 1, ascending and evenly spaced, both ends included; one is the last."""
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
    """Samples ``[B, T, W]`` that begin as ``noise``, in its dtype.

    Args:
        steps: times that the model is asked; for ddim and ddpm num_timesteps at most.
        method: ddim: without further noise (Song et al. 2021, eta 0); ddpm: with noise at each step, of the learned
            variance where there is one, else the smaller fixed one; euler: along the velocity. By default the
            objective's usual one.
        step_noise: for ddpm, noise as ``noise`` to add after step 0, 1, ... steps - 2.

    Raises:
        UserError: a method that the objective does not have, steps out of range, or ddpm without step_noise.
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
