"""Training objectives of diffusion models: noise, targets, losses and the noise schedule.

All functions are elementwise on patches ``[B, T, W]``, so each rank that shares a sample can
compute its own patches; ``model/samplers.py`` draws samples with them.

Shapes: B samples, T patches, W = N x C values of a patch with N pixels of C channels, channels
innermost. x0 is data, x_t noisy data. Times ``[B]`` go from 0 (data) to num_timesteps (noise), the
range that the model's timestep embedding takes.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from runtime.errors import UserError, require

Method = Literal["ddim", "ddpm", "euler"]


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig:
    """The objective, and the distribution from which training samples timesteps."""

    objective: Literal["ddpm", "v_prediction", "rectified_flow"] = "ddpm"
    """Target that the model predicts. ddpm: the noise, as in the original DiT; v_prediction:
    Salimans and Ho's mixture of noise and data; rectified_flow: the velocity of a straight path
    from data to noise (Esser et al. 2024)."""
    num_timesteps: int = 1000
    """Number of times in the noise schedule; rectified_flow scales its continuous times to this
    number."""
    logit_normal_mean: float = 0.0
    """Mean of the logit of the times that rectified_flow trains on; a value above 0 favours noisier
    samples."""
    logit_normal_std: float = 1.0
    """Standard deviation of the logit of the times that rectified_flow trains on."""

    def __post_init__(self) -> None:
        mean = self.logit_normal_mean
        std = self.logit_normal_std
        enough = self.num_timesteps >= 2
        require(self, enough, "num_timesteps", "it must be 2 or more; 1000 is usual")
        must = "it must be a finite number, such as 0"
        require(self, math.isfinite(mean), "logit_normal_mean", must)
        must = "it must be a number above 0, such as 1"
        require(self, 0 < std < math.inf, "logit_normal_std", must)

        if self.objective == "rectified_flow":
            return
        for name in ("logit_normal_mean", "logit_normal_std"):
            value = getattr(self, name)
            if value != getattr(type(self), name):
                raise UserError(
                    f"{name} is {value}, but objective {self.objective} samples its timesteps "
                    "uniformly; leave the setting out, or set objective to rectified_flow"
                )


class Diffusion:
    """One objective's targets and losses, in the data's dtype; noise schedules are float64."""

    def __init__(
        self, config: DiffusionConfig, learn_sigma: bool = False, channels: int = 1
    ) -> None:
        """Build the noise schedule.

        Args:
            learn_sigma: True if outputs have 2 C channels: C of predictions and C of variances.
            channels: number of channels C of a pixel.

        Raises:
            UserError: learn_sigma is set with rectified_flow, which has no variance to learn.
        """
        self.config = config
        self.learn_sigma = learn_sigma
        self.channels = channels
        self.flow = config.objective == "rectified_flow"
        if self.flow and learn_sigma:
            raise UserError(
                "learn_sigma is true, but objective rectified_flow has no variance to learn; set "
                "learn_sigma to false, or objective to ddpm or v_prediction"
            )
        self.schedule = NoiseSchedule.linear(config.num_timesteps)
        self._schedules: dict[torch.device, NoiseSchedule] = {}

    @property
    def methods(self) -> tuple[Method, ...]:
        """Sampling methods for the objective; the first is the default."""
        return ("euler",) if self.flow else ("ddim", "ddpm")

    def times(self, uniform: Tensor, normal: Tensor) -> Tensor:
        """Return training times ``[B]``, float32.

        Args:
            uniform: draws ``[B]`` from [0, 1), for objectives with a schedule.
            normal: draws ``[B]`` from the standard normal, for rectified_flow.
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
        """Return the tensor that the model should predict.

        The target is the noise (ddpm), alpha noise - sigma x0 (v_prediction), or the velocity noise
        - x0.
        """
        if self.config.objective == "ddpm":
            return noise
        if self.flow:
            return noise - x0
        signal, sigma = self._levels(times, x0)
        return signal * noise - sigma * x0

    def loss(self, output: Tensor, x0: Tensor, noise: Tensor, x_t: Tensor, times: Tensor) -> Tensor:
        """Return the loss of every element, in x0's shape and dtype (float32 or float64).

        A sample's loss is the mean of its elements' losses. An element's loss is the squared error
        plus, with learn_sigma, the variational bound's term in bits, which trains only the variance
        (Nichol and Dhariwal 2021, "hybrid" loss). The term's weight is 1, as in the original DiT.
        The option rescale_learned_sigmas, which is off there, would make the weight num_timesteps /
        1000, which is also 1 at 1000 steps.
        """
        prediction, variance = self.split(output.to(x0.dtype))
        error = (prediction - self.target(x0, noise, times)).square()
        if variance is None:
            return error
        return error + self._bound(prediction.detach(), variance, x0, x_t, times)

    def split(self, output: Tensor) -> tuple[Tensor, Tensor | None]:
        """Split a model output into predictions ``[..., W]`` and variances ``[..., W]``.

        Variances are None without learn_sigma.
        """
        if not self.learn_sigma:
            return output, None
        pixels = output.unflatten(-1, (-1, 2 * self.channels))  # [..., N, 2 C]
        prediction, variance = pixels.chunk(2, dim=-1)  # [..., N, C] each
        return prediction.flatten(-2), variance.flatten(-2)

    def join(self, prediction: Tensor, variance: Tensor | None) -> Tensor:
        """Undo `split`."""
        if variance is None:
            return prediction
        prediction = prediction.unflatten(-1, (-1, self.channels))  # [..., N, C]
        variance = variance.unflatten(-1, (-1, self.channels))
        return torch.cat([prediction, variance], dim=-1).flatten(-2)

    def data_and_noise(
        self, prediction: Tensor, x_t: Tensor, times: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the x0 and the noise that a prediction at x_t implies."""
        signal, sigma = self._levels(times, x_t)
        if self.config.objective == "ddpm":
            return (x_t - sigma * prediction) / signal, prediction
        if self.flow:
            return x_t - sigma * prediction, x_t + signal * prediction
        return signal * x_t - sigma * prediction, sigma * x_t + signal * prediction

    def _levels(self, times: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors of data and of noise in x_t, ``[B, 1, ...]``."""
        if self.flow:
            sigma = times.double() / self.config.num_timesteps
            signal = 1 - sigma
        else:
            alpha_bar = self._schedule_on(times.device).alpha_bars[times.long()]
            signal = alpha_bar.sqrt()
            sigma = (1 - alpha_bar).sqrt()
        return broadcast(signal, like), broadcast(sigma, like)

    def _schedule_on(self, device: torch.device) -> "NoiseSchedule":
        """Return the schedule on a device, copied only once, since a copy makes the device wait."""
        if device not in self._schedules:
            self._schedules[device] = self.schedule.to(device)
        return self._schedules[device]

    def _bound(
        self, prediction: Tensor, variance: Tensor, x0: Tensor, x_t: Tensor, times: Tensor
    ) -> Tensor:
        """Return the variational bound's term at ``times``, in bits.

        The term is a KL divergence or, at time 0, the negative log-likelihood of 8-bit data.
        """
        schedule = self._schedule_on(times.device)
        index = times.long()
        predicted_x0, _ = self.data_and_noise(prediction, x_t, times)
        log_variance = schedule.log_variance(variance, index)
        true_mean = schedule.mean(x0, x_t, index)
        mean = schedule.mean(predicted_x0, x_t, index)
        true_log_variance = broadcast(schedule.posterior_variances[index].log(), x_t)
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
class NoiseSchedule:
    """Tables ``[steps]``, float64, for a chain of all noising steps or a chain that skips some."""

    betas: Tensor
    """Variance of the noise that each step adds."""
    alpha_bars: Tensor
    """Fraction of the variance of x_t that comes from the data."""
    posterior_variances: Tensor
    """Variance of x_(t-1) given x0 and x_t. The first entry would be 0, so it repeats the second.
    """
    from_data: Tensor
    """Factor of x0 in the mean of x_(t-1) (Ho et al. 2020, equation 7)."""
    from_x_t: Tensor
    """Factor of x_t in the mean of x_(t-1)."""

    @classmethod
    def linear(cls, count: int) -> "NoiseSchedule":
        """Build the schedule of Ho et al. 2020 and the original DiT, scaled to ``count`` steps."""
        betas = torch.linspace(0.1 / count, 20 / count, count, dtype=torch.float64)
        return cls.of(betas.clamp(max=0.999))  # betas would exceed 1 with fewer than 20 steps

    @classmethod
    def of(cls, betas: Tensor) -> "NoiseSchedule":
        """Build the tables for a chain whose steps have these variances."""
        alpha_bars = torch.cumprod(1 - betas, dim=0)
        previous = torch.cat([alpha_bars.new_ones(1), alpha_bars[:-1]])
        posterior_variances = betas * (1 - previous) / (1 - alpha_bars)
        if len(betas) > 1:
            posterior_variances = torch.cat([posterior_variances[1:2], posterior_variances[1:]])
        return cls(
            betas=betas,
            alpha_bars=alpha_bars,
            posterior_variances=posterior_variances,
            from_data=betas * previous.sqrt() / (1 - alpha_bars),
            from_x_t=(1 - previous) * (1 - betas).sqrt() / (1 - alpha_bars),
        )

    def skipping(self, chosen: Tensor) -> "NoiseSchedule":
        """Return the chain that visits only the ``chosen`` times (Nichol and Dhariwal 2021).

        The noise at each chosen time is the same as in the full chain.
        """
        alpha_bars = self.alpha_bars[chosen]
        previous = torch.cat([alpha_bars.new_ones(1), alpha_bars[:-1]])
        return NoiseSchedule.of(1 - alpha_bars / previous)

    def to(self, device: torch.device) -> "NoiseSchedule":
        """Copy the tables to a device."""
        tables = {name: table.to(device) for name, table in vars(self).items()}
        return NoiseSchedule(**tables)

    def mean(self, x0: Tensor, x_t: Tensor, index: Tensor) -> Tensor:
        """Return the mean of x_(t-1) for steps ``index`` ``[B]``."""
        from_data = broadcast(self.from_data[index], x_t)
        return from_data * x0 + broadcast(self.from_x_t[index], x_t) * x_t

    def log_variance(self, variance: Tensor, index: Tensor) -> Tensor:
        """Map a model's variance output from [-1, 1] to a log variance between two bounds.

        The bounds are the logs of the posterior variance and of the step's beta.
        """
        share = (variance + 1) / 2
        max_log = self.betas[index].log()
        min_log = self.posterior_variances[index].log()
        return share * broadcast(max_log, variance) + (1 - share) * broadcast(min_log, variance)


def discretized_gaussian_log_likelihood(x: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
    """Return the log-likelihood (nats) under a Gaussian of data with 256 levels from -1 to 1.

    The outermost levels extend to infinity (Ho et al. 2020).
    """
    centred = x - mean
    inverse = (-log_scale).exp()
    cdf_upper = _normal_cdf(inverse * (centred + 1 / 255))
    cdf_lower = _normal_cdf(inverse * (centred - 1 / 255))
    inside = (cdf_upper - cdf_lower).clamp(min=1e-12).log()
    last = (1 - cdf_lower).clamp(min=1e-12).log()
    first = cdf_upper.clamp(min=1e-12).log()
    return torch.where(x < -0.999, first, torch.where(x > 0.999, last, inside))


def _normal_cdf(x: Tensor) -> Tensor:
    """Approximate the normal CDF as the original DiT does, so that losses are the same."""
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def broadcast(values: Tensor, like: Tensor) -> Tensor:
    """Reshape ``[B]`` to ``[B, 1, ...]``, in the dtype of ``like`` unless it is an index."""
    shaped = values.view(-1, *[1] * (like.dim() - 1))
    return shaped.to(like.dtype) if values.is_floating_point() else shaped
