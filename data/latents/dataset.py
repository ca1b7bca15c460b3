"""Training samples of diffusion models: folders of latents, or handwritten digits; and the
autoencoder of latents.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.latents.folder import LatentFolder, Latents, Shard
from data.text.config import split_shares
from runtime.errors import DataError, at_least
from runtime.files import sha256

DIGITS = "digits"


@dataclass(frozen=True, kw_only=True)
class LatentDataConfig:
    """Options of the latents to train on."""

    data_path: tuple[str, ...] = (DIGITS,)
    """Folders of latents that tools/prepare_latents.py wrote, taken together; or digits,
    scikit-learn's 1,797 images of handwritten digits, 8 x 8 in one channel, which need no
    download."""
    split: str = "90,10"
    """Shares of the samples for training and validation; which samples these are depends on their
    number alone.
    """
    num_workers: int = 0
    """Processes that read batches ahead; 0 reads in the training process."""
    pack_samples: bool = False
    """Join the samples of a micro-batch into one sequence in which each attends to itself alone:
    ring, allgather and exchange then give each process whole samples as far as they can, and only
    those that are cut travel."""

    def __post_init__(self) -> None:
        split_shares(self.split)
        if not self.data_path:
            raise DataError("data_path is empty; give folders of latents, or digits")
        at_least(self, 0, "num_workers")


def digits() -> Latents:
    """Return scikit-learn's handwritten digits as latents, float32 [1, 8, 8] from -1 (paper) to 1
    (ink).
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            "data_path is digits, which takes scikit-learn: pip install scikit-learn (make venv EXTRAS=digits)"
        ) from error
    found, path = load_digits(), Path(DIGITS)
    images = (found.images[:, None] / 8 - 1).astype(np.float32)  # [1797, 1, 8, 8]
    labels = found.target.astype(np.int64)
    return Latents(
        [Shard(path=path, labels=labels, labels_path=path, read=images.__getitem__)], (1, 8, 8)
    )


class LatentSamples:
    """Endless epochs: sample n is number n mod len of epoch n // len; each epoch has every row
    once, reshuffled.

    Args:
        rows: rows of this dataset among those of `latents`, int64 [samples].
        seed: seed of the order.
    """

    def __init__(self, latents: Latents, rows: np.ndarray, seed: int) -> None:
        self._latents, self._rows, self._seed = latents, rows, seed
        self._epoch, self._order = -1, rows

    def __len__(self) -> int:
        """Return the samples of one epoch."""
        return len(self._rows)

    def row(self, index: int) -> int:
        """Return the row of sample `index`."""
        epoch, within = divmod(index, len(self._rows))
        if epoch != self._epoch:
            # RandomState's stream is frozen: every numpy gives the same order. The seed is a hash
            # of both, as 32 bits: with their sum, epoch 1 of a seed would equal epoch 0 of the
            # next.
            hashed = bytes.fromhex(sha256(f"{self._seed}, epoch {epoch}")[:8])
            shuffled = np.random.RandomState(int.from_bytes(hashed, "little")).permutation(
                len(self._rows)
            )
            self._epoch, self._order = epoch, self._rows[shuffled]
        return int(self._order[within])

    def __getitem__(self, index: int | None) -> dict[str, torch.Tensor]:
        """Return `latents`, float32 [C, (F,) H, W], and `labels` and `sample` (the index), int64 []
        each.

        None gives a filler that never counts: zeros, label 0 and sample -1. Raises DataError for a
        bad sample.
        """
        if index is None:
            latents, label = np.zeros(self._latents.shape, np.float32), 0
        else:
            row = self.row(index)
            latents, label = self._latents.latents(row), int(self._latents.labels[row])
        sample = -1 if index is None else index
        return {
            "latents": torch.from_numpy(latents),
            "labels": torch.tensor(label),
            "sample": torch.tensor(sample),
        }


def build_latent_datasets(
    config: LatentDataConfig, latent_shape: Sequence[int], num_classes: int, seed: int
) -> tuple[LatentSamples, LatentSamples | None]:
    """Build the training and validation samples of `config.data_path`; None for a validation share
    of 0.

    Sample n is a pure function of (data, split, seed, n).

    Collective over all ranks if a process group is initialised: a failure on one rank raises on
    all. Raises DataError: latents of another shape than the model's, labels outside [0,
    num_classes), an empty or broken folder (`LatentFolder`), or an empty split; names file and row.
    """
    from runtime.together import raise_together

    with raise_together():
        shards, shape = list[Shard](), tuple(latent_shape)
        for path in config.data_path:
            found = digits() if path == DIGITS else LatentFolder(path)
            if found.shape != shape:
                has, wanted = (" ".join(map(str, of)) for of in (found.shape, shape))
                which, fix = f"{path} holds", f"set latent_shape to {has}"
                if path == DIGITS:
                    which = f"data_path is {DIGITS}, the default; {DIGITS} holds"
                    fix = (
                        f"give --data-path FOLDER, as tools/prepare_latents.py writes it, or {fix}"
                    )
                raise DataError(f"{which} latents of {has}, and latent_shape is {wanted}; {fix}")
            found.check_labels(num_classes)
            shards += found.shards
        latents = Latents(shards, shape)
        train, valid, _ = split_shares(config.split)
        # Folders are often sorted by class. The same for all seeds.
        rows = np.random.RandomState(0).permutation(len(latents)).astype(np.int64)
        held = math.ceil(valid * len(latents))
        kept = min(math.floor(train * len(latents)), len(latents) - held)
        if kept < 1:
            raise DataError(
                f'split is "{config.split}" and leaves nothing to train on of {len(latents)} samples; make its first '
                "share larger"
            )
    return (
        LatentSamples(latents, rows[held : held + kept], seed),
        LatentSamples(latents, rows[:held], seed) if held else None,
    )


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
            raise DataError(
                f"vae is {folder}, which holds no config.json; name the folder of an AutoencoderKL"
            )
        try:
            # low_cpu_mem_usage needs another package, and warns without it.
            model = AutoencoderKL.from_pretrained(
                str(folder), use_safetensors=True, local_files_only=True, low_cpu_mem_usage=False
            )
        except (OSError, ValueError) as error:
            raise DataError(
                f"vae {folder} cannot be loaded ({str(error).splitlines()[0]})"
            ) from error
        self._model: Any = model.to(device).eval().requires_grad_(False)
        self._folder, self._device = folder, device
        self._scale = float(model.config.scaling_factor)
        self._shift = float(getattr(model.config, "shift_factor", None) or 0.0)

    @torch.no_grad()
    def encode(self, images: np.ndarray) -> np.ndarray:
        """Encode images from -1 to 1, float32 [N, 3, H, W], to the mean latents, float32 [N, C, h,
        w].
        """
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
        """Decode latents [N, C, h, w] to images from about -1 to 1, float32 [N, 3, H, W] on the
        CPU.

        Raises DataError for images with a NaN or an infinity.
        """
        found = [
            self._model.decode(row.to(self._device)[None] / self._scale + self._shift).sample
            for row in latents
        ]
        images = torch.cat(found).float().cpu()
        if broken := int((~images.isfinite()).flatten(1).any(1).sum()):
            raise DataError(
                f"vae {self._folder} decodes {broken} of {len(images)} samples to values that are not finite; it is "
                "damaged, or made for latents of another kind: name the one that made the run's latents"
            )
        return images
