"""Encode images to latents and decode them with a variational autoencoder of diffusers, from a local folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runtime.errors import DataError


class Vae:
    """diffusers' AutoencoderKL, frozen; its configuration scales latents to a variance of about 1."""

    def __init__(self, folder: str | Path, device: torch.device) -> None:
        """Load a folder with config.json and safetensors. Raises DataError if it cannot."""
        try:
            from diffusers import AutoencoderKL
        except ImportError as error:
            raise DataError(
                "vae is given, which takes diffusers: pip install diffusers (make venv EXTRAS=images)"
            ) from error
        if not (Path(folder) / "config.json").is_file():
            raise DataError(f"vae is {folder}, which holds no config.json; name the folder of an AutoencoderKL")
        try:
            # low_cpu_mem_usage needs another package, and warns without it.
            model = AutoencoderKL.from_pretrained(
                str(folder), use_safetensors=True, local_files_only=True, low_cpu_mem_usage=False
            )
        except (OSError, ValueError) as error:
            raise DataError(f"vae {folder} cannot be loaded ({str(error).splitlines()[0]})") from error
        self._model: Any = model.to(device).eval().requires_grad_(False)
        self._folder, self._device = folder, device
        self._scale = float(model.config.scaling_factor)
        self._shift = float(getattr(model.config, "shift_factor", None) or 0.0)

    @torch.no_grad()
    def encode(self, images: np.ndarray) -> np.ndarray:
        """Encode images from -1 to 1, float32 [N, 3, H, W], to the mean latents, float32 [N, C, h, w]."""
        found = self._model.encode(torch.from_numpy(images).to(self._device)).latent_dist.mode()
        return ((found - self._shift) * self._scale).float().cpu().numpy()

    def check(self, shape: Sequence[int]) -> None:
        """Raise DataError if it cannot decode latents of this shape, [C, (F,) h, w]."""
        shown, channels = " ".join(map(str, shape)), self._model.config.latent_channels
        if len(shape) != 3:
            raise DataError(
                f"vae is {self._folder}, which decodes images, and latent_shape {shown} has frames; leave out --vae"
            )
        if shape[0] != channels:
            raise DataError(
                f"vae is {self._folder}, which decodes {channels} channels, and latent_shape {shown} has {shape[0]}; "
                "name the one that made the run's latents, or leave out --vae"
            )

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode latents [N, C, h, w] to images from about -1 to 1, float32 [N, 3, H, W] on the CPU.

        Raises DataError for images with a NaN or an infinity.
        """
        found = [self._model.decode(row.to(self._device)[None] / self._scale + self._shift).sample for row in latents]
        images = torch.cat(found).float().cpu()
        if broken := int((~images.isfinite()).flatten(1).any(1).sum()):
            raise DataError(
                f"vae {self._folder} decodes {broken} of {len(images)} samples to values that are not finite; it is "
                "damaged, or made for latents of another kind: name the one that made the run's latents"
            )
        return images
