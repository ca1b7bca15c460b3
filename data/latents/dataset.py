"""Training samples of diffusion models, from folders of latents or digits, and their autoencoder.

As for text, sample n is a function of n alone, so a run resumes from its number of consumed
samples.
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
    """Settings of the latents to train on."""

    data_path: tuple[str, ...] = (DIGITS,)
    """Folders of latents that tools/prepare_latents.py wrote; their samples are combined. The name
    digits stands for scikit-learn's 1,797 images of handwritten digits, 8 x 8 in one channel, which
    need no download."""
    split: str = "90,10"
    """Shares of the samples for training and validation. The division depends only on the number
    of samples.
    """
    num_workers: int = 0
    """Number of processes that read batches ahead; 0 reads in the training process."""
    pack_samples: bool = False
    """Pack the samples of a micro-batch into one sequence; each sample attends only to itself.
    The context-parallel methods ring, allgather and exchange then give each process whole samples
    as far as possible, and communicate only for the samples that are cut."""

    def __post_init__(self) -> None:
        split_shares(self.split)
        if not self.data_path:
            raise DataError(
                "data_path is empty; give folders of latents, or the name 'digits' for "
                "scikit-learn's built-in images"
            )
        at_least(self, 0, "num_workers")


def digits() -> Latents:
    """Return scikit-learn's handwritten digits, float32 [1, 8, 8] from -1 (paper) to 1 (ink)."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            "data_path is digits, but scikit-learn cannot be imported; install it: pip install "
            "scikit-learn (make venv EXTRAS=digits)"
        ) from error
    content = load_digits()
    images = (content.images[:, None] / 8 - 1).astype(np.float32)  # [1797, 1, 8, 8]
    labels = content.target.astype(np.int64)
    path = Path(DIGITS)
    shard = Shard(path=path, labels=labels, labels_path=path, read=images.__getitem__)
    return Latents([shard], (1, 8, 8))


class LatentSamples:
    """A dataset of endless epochs: sample n is sample n mod len of epoch n // len.

    Each epoch has every row once, in a different order.

    Args:
        latents: the samples of all datasets.
        rows: indices in `latents` of this dataset's samples, int64 [samples].
        seed: seed of the order.
    """

    def __init__(self, latents: Latents, rows: np.ndarray, seed: int) -> None:
        self._latents = latents
        self._rows = rows
        self._seed = seed
        self._epoch = -1
        self._order = rows

    def __len__(self) -> int:
        """Return the number of samples of one epoch."""
        return len(self._rows)

    def row(self, index: int) -> int:
        """Return the row of `latents` that is sample `index`."""
        epoch, within_epoch = divmod(index, len(self._rows))
        if epoch != self._epoch:
            # RandomState's stream is frozen: every numpy gives the same order. It is seeded with a
            # hash of seed and epoch, as 32 bits: with their sum, epoch 1 of a seed would have the
            # order of epoch 0 of the next seed.
            hashed = bytes.fromhex(sha256(f"{self._seed}, epoch {epoch}")[:8])
            random = np.random.RandomState(int.from_bytes(hashed, "little"))
            self._order = self._rows[random.permutation(len(self._rows))]
            self._epoch = epoch
        return int(self._order[within_epoch])

    def __getitem__(self, index: int | None) -> dict[str, torch.Tensor]:
        """Return `latents`, float32 [C, (F,) H, W], and `labels` and `sample`, int64 [] each.

        `sample` is the index. None gives a filler that never counts: zeros, label 0 and sample -1.
        Raises DataError for a bad sample.
        """
        latents = np.zeros(self._latents.shape, np.float32)
        label = 0
        if index is not None:
            row = self.row(index)
            latents = self._latents.latents(row)
            label = int(self._latents.labels[row])
        return {
            "latents": torch.from_numpy(latents),
            "labels": torch.tensor(label),
            "sample": torch.tensor(-1 if index is None else index),
        }


def build_latent_datasets(
    config: LatentDataConfig, latent_shape: Sequence[int], num_classes: int, seed: int
) -> tuple[LatentSamples, LatentSamples | None]:
    """Build the training and validation samples of `config.data_path`.

    Validation is None if its share is 0. Sample n is a pure function of (data, split, seed, n).

    Collective over all ranks if a process group is initialised: a failure on one rank raises on
    all. Raises DataError if latents have another shape than the model's, a label is outside [0,
    num_classes), a folder is empty or broken (`LatentFolder`), or no sample is left to train on.
    """
    from runtime.together import raise_together

    with raise_together():
        shape = tuple(latent_shape)
        shards: list[Shard] = []
        for path in config.data_path:
            source = digits() if path == DIGITS else LatentFolder(path)
            _check_shape(path, source.shape, shape)
            source.check_labels(num_classes)
            shards += source.shards
        latents = Latents(shards, shape)
        train_share, valid_share, _ = split_shares(config.split)
        # Shuffled: folders are often sorted by class. The same for all seeds, so that runs of
        # several seeds share their validation samples.
        rows = np.random.RandomState(0).permutation(len(latents)).astype(np.int64)
        num_valid = math.ceil(valid_share * len(latents))
        num_train = min(math.floor(train_share * len(latents)), len(latents) - num_valid)
        if num_train < 1:
            raise DataError(
                f'split is "{config.split}", but it leaves none of the {len(latents)} samples to '
                "train on; make its first share larger"
            )
    train = LatentSamples(latents, rows[num_valid : num_valid + num_train], seed)
    valid = LatentSamples(latents, rows[:num_valid], seed) if num_valid else None
    return train, valid


def _check_shape(path: str, shape: tuple[int, ...], latent_shape: tuple[int, ...]) -> None:
    """Raise DataError if the latents of a path have another shape than the model's."""
    if shape == latent_shape:
        return
    actual = " ".join(map(str, shape))
    expected = " ".join(map(str, latent_shape))
    subject = f"{path} has"
    fix = f"set latent_shape to {actual}"
    if path == DIGITS:
        subject = f"data_path is {DIGITS} (the default) with"
        fix = f"give --data-path a folder that tools/prepare_latents.py wrote, or {fix}"
    raise DataError(f"{subject} latents of {actual}, but latent_shape is {expected}; {fix}")


class Vae:
    """diffusers' AutoencoderKL, frozen; it scales latents to a variance of about 1."""

    def __init__(self, folder: str | Path, device: torch.device) -> None:
        """Load a folder with config.json and safetensors. Raises DataError if that fails."""
        try:
            from diffusers import AutoencoderKL
        except ImportError as error:
            raise DataError(
                "vae is given, but diffusers cannot be imported; install it: pip install diffusers "
                "(make venv EXTRAS=images)"
            ) from error
        if not (Path(folder) / "config.json").is_file():
            raise DataError(
                f"vae is {folder}, but it has no config.json; give the folder of an AutoencoderKL"
            )
        try:
            # low_cpu_mem_usage needs another package, and warns without it.
            model = AutoencoderKL.from_pretrained(
                str(folder), use_safetensors=True, local_files_only=True, low_cpu_mem_usage=False
            )
        except (OSError, ValueError) as error:
            raise DataError(
                f"vae {folder} cannot be loaded ({str(error).splitlines()[0]}); give the folder of "
                "an AutoencoderKL in safetensors"
            ) from error
        self._model: Any = model.to(device).eval().requires_grad_(False)
        self._folder = folder
        self._device = device
        self._scale = float(model.config.scaling_factor)
        self._shift = float(getattr(model.config, "shift_factor", None) or 0.0)

    @torch.no_grad()
    def encode(self, images: np.ndarray) -> np.ndarray:
        """Encode images [N, 3, H, W] to the mean latents, float32 [N, C, h, w].

        Images are float32 from -1 to 1.
        """
        distribution = self._model.encode(torch.from_numpy(images).to(self._device)).latent_dist
        return ((distribution.mode() - self._shift) * self._scale).float().cpu().numpy()

    def check(self, shape: Sequence[int]) -> None:
        """Raise DataError if the autoencoder cannot decode this shape, [C, (F,) h, w]."""
        latent_shape = " ".join(map(str, shape))
        channels = self._model.config.latent_channels
        if len(shape) != 3:
            raise DataError(
                f"vae {self._folder} decodes images, but latent_shape {latent_shape} has frames; "
                "leave out --vae"
            )
        if shape[0] != channels:
            raise DataError(
                f"vae {self._folder} decodes {channels} channels, but latent_shape "
                f"{latent_shape} has {shape[0]}; give the vae that made the run's latents, "
                "or leave out --vae"
            )

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode latents [N, C, h, w] to images, float32 [N, 3, H, W] on the CPU.

        Image values are from about -1 to 1. Raises DataError for images with a NaN or an infinity.
        """
        decoded = []
        for sample in latents:
            latent = sample.to(self._device)[None] / self._scale + self._shift  # [1, C, h, w]
            decoded.append(self._model.decode(latent).sample)
        images = torch.cat(decoded).float().cpu()
        num_broken = int((~images.isfinite()).flatten(1).any(1).sum())
        if num_broken:
            raise DataError(
                f"vae {self._folder} decodes {num_broken} of {len(images)} samples to values that "
                "are not finite; the vae is damaged, or was made for other latents: give the vae "
                "that made the run's latents"
            )
        return images
