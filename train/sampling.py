"""Draw samples of a diffusion transformer over the mesh that trains it, and write pictures of them.

Each data-parallel rank draws its own samples; the ranks of a context-parallel group share each.
Noise is drawn for whole samples from the seed and the sample's number, so that every mesh draws the
same ones.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from model.diffusion import Diffusion
from model.dit import patchify, unpatchify
from model.samplers import draw, guided
from parallel.context import ContextParallel
from parallel.mesh import Mesh
from runtime.errors import at_least, require
from runtime.files import unwritable
from runtime.tensors import generator_of
from runtime.together import is_first, raise_together
from train.config.flags import ConfigError

SMALLEST_SIDE = 48
"""Minimum pixels of a sample's shorter side in a picture."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """The samples that a run draws at each validation, into samples/iter_N.png of its folder."""

    samples_per_class: int = 4
    """Samples of each class in the picture; 0 draws none. All are drawn anew at each validation,
    sample_steps times through the model, twice as many with guidance; never more at once than
    micro_batch_size."""
    sample_classes: int = 10
    """Classes in the picture: the first ones."""
    sample_steps: int = 50
    """Times that the model is asked for a sample."""
    sample_method: Literal["ddim", "ddpm", "euler"] | None = None
    """ddim, without noise on the way, or ddpm, with; euler, for rectified_flow alone. By default
    ddim or euler.
    """
    guidance: float = 4.0
    """Weight of the class over none in classifier-free guidance; 1 is without."""
    guidance_channels: int | None = None
    """Channels of the latents that guidance moves, the first ones; by default all; the original DiT
    has 3.
    """

    def __post_init__(self) -> None:
        at_least(self, 0, "samples_per_class")
        at_least(self, 1, "sample_classes", "sample_steps", "guidance_channels")
        require(
            self,
            0 <= self.guidance < math.inf,
            "guidance",
            "it must be a number of 0 or more, such as 4",
        )

    def check(self, diffusion: Diffusion) -> None:
        """Raise ConfigError for a method or steps that the objective lacks, or more channels than
        there are.
        """
        method, objective = self.sample_method or diffusion.methods[0], diffusion.config.objective
        if method not in diffusion.methods:
            raise ConfigError(
                f"sample_method is {method}, and objective {objective} has {' or '.join(diffusion.methods)}; "
                "set one of these, or leave it out"
            )
        if method != "euler" and self.sample_steps > diffusion.config.num_timesteps:
            raise ConfigError(
                f"sample_steps is {self.sample_steps}, and there are num_timesteps {diffusion.config.num_timesteps} to "
                "visit; set it to at most that"
            )
        if self.guidance_channels is not None and self.guidance_channels > diffusion.channels:
            raise ConfigError(
                f"guidance_channels is {self.guidance_channels}, and latent_shape has {diffusion.channels}; set it to "
                "at most that, or leave it out to guide all"
            )

    def check_guidance(self, class_dropout_prob: float) -> None:
        """Raise ConfigError for guidance if training never drops labels."""
        if self.guidance != 1 and class_dropout_prob == 0:
            raise ConfigError(
                f"guidance is {self.guidance} and class_dropout_prob is {class_dropout_prob}, so that training never "
                "sees the embedding of no class that guidance extrapolates from; give --guidance 1, or train with a "
                "class_dropout_prob above 0, such as 0.1"
            )


class Sampler:
    """Draw samples with the parts of a model on the ranks of a mesh."""

    def __init__(
        self,
        config: Any,
        mesh: Mesh,
        cp: ContextParallel,
        parts: Sequence[Any],
        diffusion: Diffusion,
        seed: int,
    ) -> None:
        """Set up for a run's ``parts`` of a diffusion transformer; samples are joined as in its
        training.
        """
        self._joined = config.train.micro_batch_size if config.packed else None
        self._parts, self._mesh, self._cp, self._model = parts, mesh, cp, config.model
        self._diffusion, self._sampling, self._seed = diffusion, config.sampling, seed
        self._positions = cp.positions.to(mesh.device)  # [T]

    @torch.no_grad()
    def draw(self, labels: Sequence[int], batch_size: int = 64) -> Tensor:
        """Return latents ``[N, C, (F,) H, W]``, float32 on the CPU, one per label; on every rank,
        collective.

        Each data-parallel rank draws ``batch_size`` samples at once, with guidance by twice as many
        in the model; joined ones go through it so many at a time as are joined.
        """
        ranks, rank = self._mesh.dp.size(), self._mesh.dp.get_local_rank()
        each = math.ceil(len(labels) / ranks)
        # All ranks draw equally many, since they gather the sharded model together: some samples
        # are drawn twice.
        mine = [number % len(labels) for number in range(rank * each, (rank + 1) * each)]
        drawn = [
            self._draw(mine[begin : begin + batch_size], labels)
            for begin in range(0, each, batch_size)
        ]  # [b, T, W] each
        found = torch.cat(drawn)
        whole = found if self._joined else self._cp.unshard(found, dim=1)  # [each, all patches, W]
        gathered = [torch.empty_like(whole) for _ in range(ranks)]
        dist.all_gather(gathered, whole.contiguous(), group=self._mesh.dp.get_group())
        return unpatchify(torch.cat(gathered)[: len(labels)], self._model).cpu()

    def _draw(self, numbers: list[int], labels: Sequence[int]) -> Tensor:
        """Return this rank's patches ``[B, T, W]`` of the samples with these numbers, or all if
        samples are joined.
        """
        sampling = self._sampling
        asked = torch.tensor([labels[number] for number in numbers], device=self._mesh.device)
        none, channels = self._model.num_classes, sampling.guidance_channels
        denoise = guided(self._denoised, asked, none, sampling.guidance, self._diffusion, channels)
        return draw(
            self._diffusion,
            denoise,
            self._noise(numbers, "start"),
            steps=sampling.sample_steps,
            method=sampling.sample_method,
            step_noise=lambda step: self._noise(numbers, f"step {step}"),
        )

    def _noise(self, numbers: list[int], when: str) -> Tensor:
        """Return this rank's patches ``[B, T, W]`` of the samples' noise, or all if samples are
        joined.
        """
        noise = [
            torch.randn(
                self._model.latent_shape,
                generator=generator_of(self._seed, f"drawn sample {number}, {when}"),
            )
            for number in numbers
        ]
        patches = patchify(torch.stack(noise), self._model)
        return (patches if self._joined else self._cp.shard(patches, dim=1)).to(self._mesh.device)

    def _denoised(self, x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """Return the model's output for patches as ``_noise`` returns them."""
        if (count := self._joined) is None:
            return self._through_stages(x, times, labels)
        found = []
        for given in zip(*(values.split(count) for values in (x, times, labels)), strict=True):
            # The last sample fills the sequence.
            full = [
                torch.cat((part, part[-1:].expand(count - len(part), *part.shape[1:])))
                for part in given
            ]
            out = self._through_stages(
                self._cp.shard(full[0].flatten(0, 1)[None], dim=1), *full[1:]
            )
            found.append(self._cp.unshard(out, dim=1).unflatten(1, (count, -1))[0][: len(given[0])])
        return torch.cat(found)

    def _through_stages(self, x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """Return the whole model's output; each pipeline stage in turn broadcasts its own."""
        ranks, group = self._mesh.pp.size(), self._mesh.pp.get_group()
        if ranks == 1 and len(self._parts) == 1:
            return self._parts[0](x, self._positions, times, labels).float()
        for stage in range(ranks * len(self._parts)):
            part, owner = self._parts[stage // ranks], stage % ranks
            if owner == self._mesh.pp.get_local_rank():
                x = part(x, self._positions, times, labels).contiguous()
            source, described = dist.get_global_rank(group, owner), [(x.shape, x.dtype)]
            dist.broadcast_object_list(
                described, src=source, group=group
            )  # the others know neither shape nor dtype
            shape, dtype = described[0]
            x = x if dist.get_rank() == source else torch.empty(shape, dtype=dtype, device=x.device)
            dist.broadcast(x, src=source, group=group)
        return x.float()


def write_grid(path: Path, latents: Tensor, columns: int) -> None:
    """Write samples ``[N, C, (F,) H, W]`` as one picture, ``columns`` per row; of a video the first
    frame.

    One channel from -1 to 1 is grey, three are colours. Latents have no colours: their first three
    channels are shown, or the first alone, from -3 to 3.
    """
    from PIL import Image

    images = latents[:, :, 0] if latents.ndim == 5 else latents  # [N, C, H, W]
    if images.shape[1] not in (1, 3):
        images = images[:, : 3 if images.shape[1] > 3 else 1] / 3
    pixels = ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    scale = math.ceil(SMALLEST_SIDE / min(pixels.shape[-2:]))
    pixels = pixels.repeat_interleave(scale, dim=2).repeat_interleave(scale, dim=3)
    count, channels, height, width = pixels.shape
    gap, rows = 2, math.ceil(count / columns)
    page = torch.full(
        (rows * (height + gap) + gap, columns * (width + gap) + gap, channels),
        255,
        dtype=torch.uint8,
    )
    for number, image in enumerate(pixels):
        top, left = (
            gap + place * (size + gap)
            for place, size in zip(divmod(number, columns), (height, width), strict=True)
        )
        page[top : top + height, left : left + width] = image.permute(1, 2, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(page.squeeze(-1).numpy()).save(path)


def not_finite(samples: Tensor) -> int:
    """Count the samples ``[N, ...]`` with a NaN or an infinity, which a picture would show as a
    shade.
    """
    return int((~samples.isfinite()).flatten(1).any(1).sum())


def by_class(classes: Sequence[int], per_class: int) -> list[int]:
    """Return the label of every sample of a grid with a row of ``per_class`` for each class."""
    return [label for label in classes for _ in range(per_class)]


def picture_writer(
    draw: Callable[[Sequence[int], int], Tensor], config: Any
) -> Callable[[int], None] | None:
    """Return a function of the iteration that writes samples/iter_N.png, for all ranks; None if
    there is none to write.

    ``draw`` is a ``Sampler``'s, and ``config`` the run's. No more samples are in the model at once
    than in training. Collective: raises on all ranks if the first one cannot write there or make a
    picture.
    """
    sampling, folder, micro_batch_size = (
        config.sampling,
        config.checkpoint.save,
        config.train.micro_batch_size,
    )
    if not sampling.samples_per_class or folder is None:
        return None
    labels = by_class(
        range(min(sampling.sample_classes, config.model.num_classes)), sampling.samples_per_class
    )
    at_once = micro_batch_size if sampling.guidance == 1 else max(1, micro_batch_size // 2)
    pictures = Path(folder) / "samples"
    with raise_together():
        if is_first():
            import_module("PIL.Image")  # fail before training, not after the first validation
            if why := unwritable(pictures, "choose another --save"):
                raise ConfigError(f"pictures go to {pictures}, {why}")

    def write(iteration: int) -> None:
        latents = draw(labels, at_once)
        path = pictures / f"iter_{iteration:07d}.png"
        with raise_together():
            if is_first() and (broken := not_finite(latents)):
                print(
                    f"note: {path.name} is not written: {broken} of {len(latents)} samples hold values that are not "
                    f"finite; guidance {sampling.guidance} is too large, or training diverges",
                    file=sys.stderr,
                )
            elif is_first():
                write_grid(path, latents, sampling.samples_per_class)

    return write
