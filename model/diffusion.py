"""Training objectives of diffusion models, and samplers: DDIM, DDPM and Euler's method, with
guidance.

All functions are elementwise on patches ``[B, T, W]``, so ranks that share a sample each compute
their part. Legend: B samples, T patches, W = N x C values per patch, N places of C channels,
channels innermost; x0 data, x_t noisy data, times ``[B]`` as the model's timestep embedding takes
them, from 0 (data) to num_timesteps (noise).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from runtime.errors import UserError, require

Method = Literal["ddim", "ddpm", "euler"]


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig:
    """The prediction of the model, and the times at which it is asked."""

    objective: Literal["ddpm", "v_prediction", "rectified_flow"] = "ddpm"
    """ddpm: the noise, as the original DiT; v_prediction: Salimans and Ho's mixture of noise and
    data; rectified_flow: the velocity of a straight path from data to noise (Esser et al. 2024)."""
    num_timesteps: int = 1000
    """Times of the noise schedule; rectified_flow, whose times are continuous, scales them to this.
    """
    logit_normal_mean: float = 0.0
    """Mean of the logit of the times that rectified_flow trains on; above 0 leans towards noise."""
    logit_normal_std: float = 1.0
    """Standard deviation of that logit."""

    def __post_init__(self) -> None:
        mean, std = self.logit_normal_mean, self.logit_normal_std
        require(
            self,
            self.num_timesteps >= 2,
            "num_timesteps",
            "it must be 2 or more, and 1000 is usual",
        )
        require(
            self, math.isfinite(mean), "logit_normal_mean", "it must be a finite number, such as 0"
        )
        require(
            self, 0 < std < math.inf, "logit_normal_std", "it must be a number above 0, such as 1"
        )
        flow = self.objective == "rectified_flow"
        for name in ("logit_normal_mean", "logit_normal_std"):
            if not flow and getattr(self, name) != getattr(type(self), name):
                raise UserError(
                    f"{name} is {getattr(self, name)}, and objective {self.objective} draws its times uniformly; "
                    "leave it out, or set objective to rectified_flow"
                )


class Diffusion:
    """The arithmetic of one objective, in the data's dtype; tables in float64."""

    def __init__(
        self, config: DiffusionConfig, learn_sigma: bool = False, channels: int = 1
    ) -> None:
        """Set up the schedule. With learn_sigma, outputs hold C predictions and C variances per
        place; channels is C.

        Raises UserError for rectified_flow with learn_sigma: a flow has no variance to learn.
        """
        self.config, self.learn_sigma, self.channels = config, learn_sigma, channels
        self.flow = config.objective == "rectified_flow"
        if self.flow and learn_sigma:
            raise UserError(
                "learn_sigma is true and objective rectified_flow has no variance to learn; set learn_sigma to false, "
                "or objective to ddpm or v_prediction"
            )
        self.schedule = Schedule.linear(config.num_timesteps)
        self._placed: dict[torch.device, Schedule] = {}

    @property
    def methods(self) -> tuple[Method, ...]:
        """Samplers of the objective, the default first."""
        return ("euler",) if self.flow else ("ddim", "ddpm")

    def times(self, uniform: Tensor, normal: Tensor) -> Tensor:
        """Return training times ``[B]``, float32, from draws ``[B]`` from [0, 1) and the standard
        normal.
        """
        count = self.config.num_timesteps
        if self.flow:
            logit = self.config.logit_normal_mean + self.config.logit_normal_std * normal.double()
            return (count * torch.sigmoid(logit)).float()
        return (count * uniform.double()).floor().clamp(max=count - 1).float()

    def noised(self, x0: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """Return x_t from data and noise, both ``[B, ...]``, at times ``[B]``."""
        signal, sigma = self._levels(times, x0)
        return signal * x0 + sigma * noise

    def target(self, x0: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """Return the model's target: the noise, v = alpha noise - sigma x0, or the velocity noise -
        x0.
        """
        if self.config.objective == "ddpm":
            return noise
        if self.flow:
            return noise - x0
        signal, sigma = self._levels(times, x0)
        return signal * noise - sigma * x0

    def loss(self, output: Tensor, x0: Tensor, noise: Tensor, x_t: Tensor, times: Tensor) -> Tensor:
        """Return the loss of every element, in x0's shape and dtype (float32 or float64); its mean
        is a sample's loss.

        It is the squared error and, with learn_sigma, the variational bound's term in bits, which
        trains only the variance (Nichol and Dhariwal 2021, "hybrid" loss). Its weight is 1, as in
        the original DiT; with rescale_learned_sigmas (off there) it would be num_timesteps / 1000,
        the same at 1000 steps.
        """
        prediction, variance = self.split(output.to(x0.dtype))
        error = (prediction - self.target(x0, noise, times)).square()
        if variance is None:
            return error
        return error + self._bound(prediction.detach(), variance, x0, x_t, times)

    def split(self, output: Tensor) -> tuple[Tensor, Tensor | None]:
        """Split an output into its prediction ``[..., W]`` and, with learn_sigma, variances ``[...,
        W]``.
        """
        if not self.learn_sigma:
            return output, None
        prediction, variance = output.unflatten(-1, (-1, 2 * self.channels)).chunk(
            2, dim=-1
        )  # [..., N, C] each
        return prediction.flatten(-2), variance.flatten(-2)

    def join(self, prediction: Tensor, variance: Tensor | None) -> Tensor:
        """Invert `split`."""
        if variance is None:
            return prediction
        places = [
            part.unflatten(-1, (-1, self.channels)) for part in (prediction, variance)
        ]  # [..., N, C]
        return torch.cat(places, dim=-1).flatten(-2)

    def data_and_noise(
        self, prediction: Tensor, x_t: Tensor, times: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the x0 and noise that a prediction at x_t implies."""
        signal, sigma = self._levels(times, x_t)
        if self.config.objective == "ddpm":
            return (x_t - sigma * prediction) / signal, prediction
        if self.flow:
            return x_t - sigma * prediction, x_t + signal * prediction
        return signal * x_t - sigma * prediction, sigma * x_t + signal * prediction

    def _levels(self, times: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors of data and noise in x_t, ``[B, 1, ...]``."""
        if self.flow:
            sigma = times.double() / self.config.num_timesteps
            signal = 1 - sigma
        else:
            kept = self._schedule_on(times.device).kept[times.long()]
            signal, sigma = kept.sqrt(), (1 - kept).sqrt()
        return broadcast(signal, like), broadcast(sigma, like)

    def _schedule_on(self, device: torch.device) -> "Schedule":
        """Return the schedule there; it is copied once, since a copy makes the device wait for the
        host.
        """
        if device not in self._placed:
            self._placed[device] = self.schedule.to(device)
        return self._placed[device]

    def _bound(
        self, prediction: Tensor, variance: Tensor, x0: Tensor, x_t: Tensor, times: Tensor
    ) -> Tensor:
        """Return the bound's term at ``times``, in bits: a KL divergence; at time 0, the likelihood
        of 8-bit data.
        """
        schedule, index = self._schedule_on(times.device), times.long()
        guessed, _ = self.data_and_noise(prediction, x_t, times)
        log_variance = schedule.log_variance(variance, index)
        true_mean, mean = schedule.mean(x0, x_t, index), schedule.mean(guessed, x_t, index)
        true_log_variance = broadcast(schedule.small[index].log(), x_t)
        divergence = 0.5 * (
            log_variance
            - true_log_variance
            - 1
            + (true_log_variance - log_variance).exp()
            + (true_mean - mean).square() * (-log_variance).exp()
        )
        likelihood = discretized_gaussian_log_likelihood(x0, mean, 0.5 * log_variance)
        return torch.where(broadcast(index, x_t) == 0, -likelihood, divergence) / math.log(2)


@dataclass(frozen=True)
class Schedule:
    """Tables ``[steps]``, float64, of a chain of noising steps, complete or with times skipped."""

    betas: Tensor
    kept: Tensor
    """Share of the data's variance in x_t, "alpha bar"."""
    small: Tensor
    """Variance of the step before, given x0 and x_t; the first, which would be 0, repeats the
    second.
    """
    from_data: Tensor
    from_x_t: Tensor
    """Factors of x0 and x_t in the mean of the step before (Ho et al. 2020, equation 7)."""

    @classmethod
    def linear(cls, count: int) -> "Schedule":
        """Build the chain of Ho et al. 2020 and the original DiT, its variances scaled to ``count``
        steps.
        """
        # above 1 with fewer than 20 steps
        return cls.of(
            torch.linspace(0.1 / count, 20 / count, count, dtype=torch.float64).clamp(max=0.999)
        )

    @classmethod
    def of(cls, betas: Tensor) -> "Schedule":
        """Build the tables of a chain whose steps have these variances."""
        kept = torch.cumprod(1 - betas, dim=0)
        before = torch.cat([kept.new_ones(1), kept[:-1]])
        small = betas * (1 - before) / (1 - kept)
        if len(betas) > 1:
            small = torch.cat([small[1:2], small[1:]])
        from_x_t = (1 - before) * (1 - betas).sqrt() / (1 - kept)
        return cls(betas, kept, small, betas * before.sqrt() / (1 - kept), from_x_t)

    def skipping(self, chosen: Tensor) -> "Schedule":
        """Return the chain of only the ``chosen`` times, with the same noise at each (Nichol and
        Dhariwal 2021).
        """
        kept = self.kept[chosen]
        return Schedule.of(1 - kept / torch.cat([kept.new_ones(1), kept[:-1]]))

    def to(self, device: torch.device) -> "Schedule":
        """Copy the tables to a device."""
        return Schedule(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))

    def mean(self, x0: Tensor, x_t: Tensor, index: Tensor) -> Tensor:
        """Return the mean of the step before step ``index`` ``[B]``."""
        return (
            broadcast(self.from_data[index], x_t) * x0 + broadcast(self.from_x_t[index], x_t) * x_t
        )

    def log_variance(self, variance: Tensor, index: Tensor) -> Tensor:
        """Map an output's variance from [-1, 1] to the log of the smallest to the largest variance
        of the step.
        """
        share = (variance + 1) / 2
        largest, smallest = self.betas[index].log(), self.small[index].log()
        return share * broadcast(largest, variance) + (1 - share) * broadcast(smallest, variance)


def discretized_gaussian_log_likelihood(x: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
    """Return the log-likelihood, in nats, of data in 256 levels from -1 to 1 under a Gaussian (Ho
    et al. 2020).
    """
    centred, inverse = x - mean, (-log_scale).exp()
    above = _normal_cdf(inverse * (centred + 1 / 255))
    below = _normal_cdf(inverse * (centred - 1 / 255))
    inside = (above - below).clamp(min=1e-12).log()
    last = (1 - below).clamp(min=1e-12).log()
    return torch.where(
        x < -0.999, above.clamp(min=1e-12).log(), torch.where(x > 0.999, last, inside)
    )


def _normal_cdf(x: Tensor) -> Tensor:
    """Approximate the normal CDF as the original does, so that losses are the same."""
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def broadcast(values: Tensor, like: Tensor) -> Tensor:
    """Reshape ``[B]`` to ``[B, 1, ...]``, in the dtype of ``like`` unless it is an index."""
    shaped = values.view(-1, *[1] * (like.dim() - 1))
    return shaped.to(like.dtype) if values.is_floating_point() else shaped


Denoise = Callable[[Tensor, Tensor], Tensor]
"""A model with fixed labels: x_t ``[B, T, W]``, times ``[B]`` -> its output, ``[B, T, W]`` or twice
as wide.
"""


def guided(
    model: Callable[[Tensor, Tensor, Tensor], Tensor],
    labels: Tensor,
    null: int,
    scale: float,
    diffusion: Diffusion,
    channels: int | None = None,
) -> Denoise:
    """Add classifier-free guidance (Ho and Salimans 2021) to a model ``(x, times, labels)``;
    ``scale`` 1 adds none.

    Unguided channels and the variances are those of the requested class.

    Args:
        labels: classes, int64 ``[B]``.
        null: label that means no class.
        channels: guide only the first channels of the prediction; by default all. The original DiT
            guides 3 of 4, to reproduce its figures exactly, as it says (models.py,
            forward_with_cfg).
    """
    if scale == 1:
        return lambda x, times: model(x, times, labels)

    def denoise(x: Tensor, times: Tensor) -> Tensor:
        both = model(
            x.repeat(2, 1, 1), times.repeat(2), torch.cat([labels, torch.full_like(labels, null)])
        )
        (asked, variance), (free, _) = (diffusion.split(half) for half in both.chunk(2))
        moved = free + scale * (asked - free)  # [B, T, W]
        if channels is not None:
            moved = moved.where(
                torch.arange(moved.shape[-1], device=moved.device) % diffusion.channels < channels,
                asked,
            )
        return diffusion.join(moved, variance)

    return denoise


def chosen_times(count: int, steps: int) -> list[int]:
    """Choose ``steps`` evenly spaced times, ascending, from 0 to count - 1 inclusive; one step
    takes the last.
    """
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
        steps: model evaluations, 1 or more; at most num_timesteps for ddim and ddpm.
        method: one of the objective's, the first by default: ddim adds no noise (Song et al. 2021,
            eta 0); ddpm adds noise at each step, with the learned variance if there is one, else
            the smaller fixed one; euler follows the velocity.
        step_noise: for ddpm, returns noise shaped like ``noise`` to add after step 0, 1, ... steps
            - 2.
    """
    method = method or diffusion.methods[0]
    if method == "ddpm":
        assert step_noise is not None
        return _ddpm(diffusion, denoise, noise, steps, step_noise)
    x, count = noise, diffusion.config.num_timesteps
    if method == "euler":
        for step in range(steps):
            times = x.new_full((len(x),), count * (1 - step / steps), dtype=torch.float32)
            x = x - denoise(x, times).to(x.dtype) / steps
        return x
    chosen = chosen_times(count, steps)
    for time, before in zip(reversed(chosen), [*reversed(chosen[:-1]), None], strict=True):
        times = x.new_full((len(x),), time, dtype=torch.float32)
        prediction, _ = diffusion.split(denoise(x, times).to(x.dtype))
        x0, noise = diffusion.data_and_noise(prediction, x, times)
        x = x0 if before is None else diffusion.noised(x0, noise, torch.full_like(times, before))
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
        at = torch.full_like(times, index, dtype=torch.int64)
        x, x_t = schedule.mean(x0, x, at), x
        if index:
            fixed = broadcast(schedule.small[at].log(), x_t)
            log_variance = fixed if variance is None else schedule.log_variance(variance, at)
            x = x + (0.5 * log_variance).exp() * step_noise(steps - 1 - index).to(x.dtype)
    return x
