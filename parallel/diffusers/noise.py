"""Noise and timesteps of training samples, equal on every rank and mesh, and training targets.

A draw depends only on the seed and the sample's number. So the ranks that share a clip draw the
same values, whatever their number, and a resumed run draws what the first run would have drawn.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.errors import UserError


def sample_generator(seed: int, sample: int, purpose: str) -> torch.Generator:
    """Return a CPU generator for a sample's draws of one kind, such as "noise" or "time"."""
    digest = hashlib.sha256(f"{seed} {sample} {purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def noise_like(latents: Tensor, samples: Sequence[int], seed: int = 0) -> Tensor:
    """Return normal noise with the latents' shape ``[B, ...]``, dtype and device.

    The noise is drawn in float32 on the CPU.

    Args:
        samples: B numbers, each of which identifies one use of a sample, such as the number of
            samples used before it.

    Raises UserError if the number of samples is not B.
    """
    if len(samples) != len(latents):
        raise UserError(
            f"noise_like got {len(latents)} latents, but {len(samples)} sample numbers; give one "
            "sample number for each latent"
        )
    noise = []
    for sample in samples:
        generator = sample_generator(seed, sample, "noise")
        noise.append(torch.randn(latents.shape[1:], generator=generator))
    return torch.stack(noise).to(latents.device, latents.dtype)


def uniform(samples: Sequence[int], seed: int = 0) -> Tensor:
    """Return uniform numbers in [0, 1), float32 ``[B]``, to choose each sample's timestep."""
    draws = []
    for sample in samples:
        draws.append(torch.rand((), generator=sample_generator(seed, sample, "time")))
    return torch.stack(draws)


def flow_matching(latents: Tensor, noise: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Return noisy latents and the target of flow matching (Lipman et al. 2023, arXiv:2210.02747).

    The noisy latents are ``(1 - sigma) latents + sigma noise``; the target is the velocity
    ``noise - latents``. Wan, HunyuanVideo, LTX, Flux, Qwen-Image and SD3 are trained in this way.
    ``sigma`` is ``[B]``, or has as many dimensions as the latents.
    """
    sigma = _broadcast(sigma, latents)
    return (1 - sigma) * latents + sigma * noise, noise - latents


def epsilon(latents: Tensor, noise: Tensor, alpha_cumprod: Tensor) -> tuple[Tensor, Tensor]:
    """Return noisy latents and the noise, the target of Ho et al. 2020 (arXiv:2006.11239, eq. 14).

    ``alpha_cumprod`` is the scheduler's ``alphas_cumprod[timestep]``, ``[B]``.
    """
    return _diffuse(latents, noise, alpha_cumprod), noise


def v_prediction(latents: Tensor, noise: Tensor, alpha_cumprod: Tensor) -> tuple[Tensor, Tensor]:
    """Return noisy latents and the target v (Salimans and Ho 2022, arXiv:2202.00512, appendix D).

    CogVideoX is trained in this way; ``alpha_cumprod`` is as for ``epsilon``.
    """
    alpha = _broadcast(alpha_cumprod, latents)
    target = alpha.sqrt() * noise - (1 - alpha).sqrt() * latents
    return _diffuse(latents, noise, alpha_cumprod), target


def _diffuse(latents: Tensor, noise: Tensor, alpha_cumprod: Tensor) -> Tensor:
    alpha = _broadcast(alpha_cumprod, latents)
    return alpha.sqrt() * latents + (1 - alpha).sqrt() * noise


def _broadcast(x: Tensor, latents: Tensor) -> Tensor:
    """Return x ``[B]`` as ``[B, 1, ...]`` in the latents' dtype and on their device."""
    x = x.to(latents.device, latents.dtype)
    if x.ndim == 1 and len(x) != len(latents):
        raise UserError(
            f"{len(x)} noise levels were given for {len(latents)} latents; give one for each"
        )
    if x.ndim == 1:
        x = x.view(-1, *[1] * (latents.ndim - 1))
    return x
