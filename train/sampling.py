"""Draw samples of a diffusion transformer on the mesh that trains it, and make pictures of them.

Each data-parallel rank draws its own samples; the ranks of a context-parallel group share each
sample. Noise is drawn for whole samples from the seed and the sample's number, so that every mesh
draws the same noise.

Shapes: b samples of this rank, T patches of this context-parallel rank, W elements of a patch.
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
"""Minimum number of pixels on a sample's shorter side in a picture; smaller ones are enlarged."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """The samples that a run draws at each validation and writes to samples/iter_N.png."""

    samples_per_class: int = 4
    """Number of samples of each class in the picture; 0 draws none. Each validation draws all of
    them again, in sample_steps passes through the model; with guidance each pass computes every
    sample twice. The model computes no more samples at once than in training."""
    sample_classes: int = 10
    """Number of classes in the picture, counted from class 0."""
    sample_steps: int = 50
    """Number of passes through the model per sample."""
    sample_method: Literal["ddim", "ddpm", "euler"] | None = None
    """Sampling method: ddim adds no noise between the steps, ddpm does; euler is for rectified_flow
    only. The default is euler for rectified_flow, and otherwise ddim."""
    guidance: float = 4.0
    """Weight of the class in classifier-free guidance; 1 disables guidance."""
    guidance_channels: int | None = None
    """Number of the latents' first channels that guidance changes; by default all. The original
    DiT uses 3."""

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
        """Raise ConfigError for a method, steps or channels that the objective does not have."""
        objective = diffusion.config.objective
        num_timesteps = diffusion.config.num_timesteps
        method = self.sample_method or diffusion.methods[0]
        if method not in diffusion.methods:
            raise ConfigError(
                f"sample_method is {method}, but objective {objective} supports only "
                f"{' or '.join(diffusion.methods)}; use that, or leave out --sample-method"
            )
        if method != "euler" and self.sample_steps > num_timesteps:
            raise ConfigError(
                f"sample_steps is {self.sample_steps}, but num_timesteps is {num_timesteps}, and "
                "each step needs a timestep of its own; lower sample_steps to at most num_timesteps"
            )
        if self.guidance_channels is not None and self.guidance_channels > diffusion.channels:
            raise ConfigError(
                f"guidance_channels is {self.guidance_channels}, but latents have only "
                f"{diffusion.channels} channels; lower guidance_channels, or leave it out to guide "
                "all"
            )

    def check_guidance(self, class_dropout_prob: float) -> None:
        """Raise ConfigError for guidance if training never drops labels."""
        if self.guidance != 1 and class_dropout_prob == 0:
            raise ConfigError(
                f"guidance is {self.guidance}, but class_dropout_prob is {class_dropout_prob}, so "
                "training never learns the no-class embedding, which guidance needs; give "
                "--guidance 1, or train with a class_dropout_prob above 0, such as 0.1"
            )


class Sampler:
    """Draws samples from a model on the ranks of a mesh."""

    def __init__(
        self,
        config: Any,
        mesh: Mesh,
        cp: ContextParallel,
        parts: Sequence[Any],
        diffusion: Diffusion,
        seed: int,
    ) -> None:
        """Set up for a run's ``parts``; joins samples into one sequence if training joins them."""
        self._num_joined = config.train.micro_batch_size if config.packed else None
        self._parts = parts
        self._mesh = mesh
        self._cp = cp
        self._model = config.model
        self._diffusion = diffusion
        self._sampling = config.sampling
        self._seed = seed
        self._positions = cp.positions.to(mesh.device)  # [T]

    @torch.no_grad()
    def draw(self, labels: Sequence[int], batch_size: int = 64) -> Tensor:
        """Return one sample per label, ``[N, C, (F,) H, W]``, float32 on the CPU; collective.

        Every rank gets all samples. Each data-parallel rank draws ``batch_size`` samples at once;
        with guidance the model computes twice as many. Joined samples go through the model in
        groups as large as the training's micro-batch.
        """
        dp_size = self._mesh.dp.size()
        dp_rank = self._mesh.dp.get_local_rank()
        # All ranks draw the same number of samples, because they gather the sharded model together;
        # so some samples may be drawn twice.
        per_rank = math.ceil(len(labels) / dp_size)
        first = dp_rank * per_rank
        numbers = [number % len(labels) for number in range(first, first + per_rank)]
        draws = [
            self._draw(numbers[begin : begin + batch_size], labels)
            for begin in range(0, per_rank, batch_size)
        ]
        patches = torch.cat(draws)  # [b, T, W]
        if not self._num_joined:
            patches = self._cp.unshard(patches, dim=1)  # [b, all patches, W]

        gathered = [torch.empty_like(patches) for _ in range(dp_size)]
        dist.all_gather(gathered, patches.contiguous(), group=self._mesh.dp.get_group())
        return unpatchify(torch.cat(gathered)[: len(labels)], self._model).cpu()

    def _draw(self, numbers: list[int], labels: Sequence[int]) -> Tensor:
        """Draw samples by number; return this rank's patches ``[b, T, W]``, or all if joined."""
        sampling = self._sampling
        sample_labels = torch.tensor(
            [labels[number] for number in numbers], device=self._mesh.device
        )
        denoise = guided(
            self._denoised,
            sample_labels,
            self._model.num_classes,  # the label for no class
            sampling.guidance,
            self._diffusion,
            sampling.guidance_channels,
        )
        return draw(
            self._diffusion,
            denoise,
            self._noise(numbers, "start"),
            steps=sampling.sample_steps,
            method=sampling.sample_method,
            step_noise=lambda step: self._noise(numbers, f"step {step}"),
        )

    def _noise(self, numbers: list[int], when: str) -> Tensor:
        """Return this rank's patches ``[b, T, W]`` of the samples' noise; all patches if joined."""
        noises = []
        for number in numbers:
            generator = generator_of(self._seed, f"drawn sample {number}, {when}")
            noises.append(torch.randn(self._model.latent_shape, generator=generator))
        patches = patchify(torch.stack(noises), self._model)  # [b, all patches, W]
        if not self._num_joined:
            patches = self._cp.shard(patches, dim=1)  # [b, T, W]
        return patches.to(self._mesh.device)

    def _denoised(self, x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """Return the model's output for patches of the shape that ``_noise`` returns."""
        if self._num_joined is None:
            return self._through_stages(x, times, labels)

        group_size = self._num_joined
        outputs = []
        for begin in range(0, len(x), group_size):
            group = slice(begin, begin + group_size)
            num_samples = len(x[group])
            sequence = _repeat_last(x[group], group_size).flatten(0, 1)[None]  # [1, all, W]
            output = self._through_stages(
                self._cp.shard(sequence, dim=1),
                _repeat_last(times[group], group_size),
                _repeat_last(labels[group], group_size),
            )
            samples = self._cp.unshard(output, dim=1).unflatten(1, (group_size, -1))[0]
            outputs.append(samples[:num_samples])
        return torch.cat(outputs)

    def _through_stages(self, x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """Return the whole model's output; each pipeline stage in turn broadcasts its output."""
        pp_size = self._mesh.pp.size()
        group = self._mesh.pp.get_group()
        if pp_size == 1 and len(self._parts) == 1:
            return self._parts[0](x, self._positions, times, labels).float()

        for stage in range(pp_size * len(self._parts)):
            part = self._parts[stage // pp_size]
            owner = stage % pp_size
            if owner == self._mesh.pp.get_local_rank():
                x = part(x, self._positions, times, labels).contiguous()
            source = dist.get_global_rank(group, owner)
            # Sent first, because the other stages know neither shape nor dtype.
            described = [(x.shape, x.dtype)]
            dist.broadcast_object_list(described, src=source, group=group)
            shape, dtype = described[0]
            if dist.get_rank() != source:
                x = torch.empty(shape, dtype=dtype, device=x.device)
            dist.broadcast(x, src=source, group=group)
        return x.float()


def _repeat_last(values: Tensor, length: int) -> Tensor:
    """Pad the first dimension to ``length`` by repeating the last entry."""
    missing = length - len(values)
    return torch.cat((values, values[-1:].expand(missing, *values.shape[1:])))


def write_grid(path: Path, latents: Tensor, columns: int) -> None:
    """Write samples ``[N, C, (F,) H, W]`` as one picture, ``columns`` per row.

    One channel is shown in grey and three as colours, clipped to values from -1 to 1. Other numbers
    of channels have no colours: the first three are shown (of two only the first), clipped to
    values from -3 to 3. Only the first frame of a video is shown.
    """
    from PIL import Image

    # Values of -1 to 1 become 0 to 255, and small samples are enlarged.
    images = latents[:, :, 0] if latents.ndim == 5 else latents  # [N, C, H, W]
    if images.shape[1] not in (1, 3):
        shown_channels = 3 if images.shape[1] > 3 else 1
        images = images[:, :shown_channels] / 3
    pixels = ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    scale = math.ceil(SMALLEST_SIDE / min(pixels.shape[-2:]))
    pixels = pixels.repeat_interleave(scale, dim=2).repeat_interleave(scale, dim=3)

    # A white page with gaps between the samples.
    count, channels, height, width = pixels.shape
    gap = 2
    rows = math.ceil(count / columns)
    page_shape = (rows * (height + gap) + gap, columns * (width + gap) + gap, channels)
    page = torch.full(page_shape, 255, dtype=torch.uint8)  # [height, width, C]
    for number, image in enumerate(pixels):
        row, column = divmod(number, columns)
        y0 = gap + row * (height + gap)
        x0 = gap + column * (width + gap)
        page[y0 : y0 + height, x0 : x0 + width] = image.permute(1, 2, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(page.squeeze(-1).numpy()).save(path)


def not_finite(samples: Tensor) -> int:
    """Count the samples ``[N, ...]`` with a NaN or an infinity, which a picture would hide."""
    return int((~samples.isfinite()).flatten(1).any(1).sum())


def by_class(classes: Sequence[int], per_class: int) -> list[int]:
    """Return the labels of a grid that has a row of ``per_class`` samples for each class."""
    return [label for label in classes for _ in range(per_class)]


def picture_writer(
    draw: Callable[[Sequence[int], int], Tensor], config: Any
) -> Callable[[int], None] | None:
    """Return a function that writes samples/iter_N.png, given N; None if no picture is requested.

    All ranks call the function. The model computes no more samples at once than in training.

    Args:
        draw: the ``draw`` method of a ``Sampler``.
        config: the run's configuration.

    Raises on all ranks if the first rank cannot write there, or cannot import PIL.
    """
    sampling = config.sampling
    folder = config.checkpoint.save
    micro_batch_size = config.train.micro_batch_size
    if not sampling.samples_per_class or folder is None:
        return None

    num_classes = min(sampling.sample_classes, config.model.num_classes)
    labels = by_class(range(num_classes), sampling.samples_per_class)
    batch_size = micro_batch_size
    if sampling.guidance != 1:  # each sample goes through the model twice
        batch_size = max(1, micro_batch_size // 2)
    pictures = Path(folder) / "samples"
    with raise_together():
        if is_first():
            import_module("PIL.Image")  # so that a missing PIL is reported before training
            problem = unwritable(pictures, "choose another --save")
            if problem:
                raise ConfigError(f"pictures go to {pictures}, {problem}")

    def write(iteration: int) -> None:
        latents = draw(labels, batch_size)
        path = pictures / f"iter_{iteration:07d}.png"
        with raise_together():
            if not is_first():
                return
            num_broken = not_finite(latents)
            if num_broken:
                print(
                    f"note: {path.name} is not written, because {num_broken} of {len(latents)} "
                    "samples have values that are not finite; either guidance "
                    f"{sampling.guidance} is too large, or training diverges",
                    file=sys.stderr,
                )
            else:
                write_grid(path, latents, sampling.samples_per_class)

    return write
