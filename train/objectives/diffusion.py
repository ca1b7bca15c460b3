"""Denoising of latents, the objective of diffusion transformers.

Shapes: B samples, T patches of this context-parallel rank, W elements of a patch.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from data.loader import Batch
from model.diffusion import Diffusion
from model.dit import patchify
from model.dit_config import DiTConfig
from parallel.context import ContextParallel
from runtime.tensors import generator_of, to_device
from train.objectives import Objective

CONDITIONING = ("t_embedder.", "y_embedder.")
"""Name prefixes of the parameters that every pipeline stage holds, because stages exchange only
hidden states."""


class Denoising(Objective):
    """Adds noise to a batch, shards it over the context-parallel ranks and sums the local loss.

    Noise, time and label dropout are drawn on the CPU for whole samples, from only the seed and the
    sample's number, so every mesh and every resumed run draws the same values.

    With ``joined`` the samples of a micro-batch form one sequence ``[1, T, W]``, each sample a
    document. A rank then holds patches of several samples, so times and weights are looked up per
    patch.
    """

    loss_name = "diffusion_loss"
    unit = "samples"

    def __init__(
        self,
        cp: ContextParallel,
        device: torch.device,
        model: DiTConfig,
        diffusion: Diffusion,
        seed: int,
        *,
        joined: bool = False,
    ) -> None:
        """Set up; ``cp`` shards the patches of one sample or, with ``joined``, of a micro-batch."""
        self._cp = cp
        self._device = device
        self._model = model
        self._diffusion = diffusion
        self._seed = seed
        self._positions = cp.positions.to(device)  # [T]
        self._is_patch = (cp.positions < cp.plan.seq_len).float()  # [T]; 0 for padding
        self._is_patch_on_device = self._is_patch.to(device)
        self._sample_index: Tensor | None = None
        """Each patch's sample in the micro-batch, int64 [T]; None if samples are not joined."""
        self._sample_index_on_device: Tensor | None = None
        if joined:
            positions = cp.positions.clamp(max=cp.plan.seq_len - 1)
            self._sample_index = positions // model.num_patches
            self._sample_index_on_device = self._sample_index.to(device)

    def blank(self, micro_batch_size: int) -> Batch:
        """Return a micro-batch of zeros in the data's format."""
        numbers = torch.zeros(micro_batch_size, dtype=torch.int64)
        latents = torch.zeros(micro_batch_size, *self._model.latent_shape)
        return {"latents": latents, "labels": numbers, "sample": numbers}

    def local(self, batch: Batch) -> Batch:
        """Return this rank's patches [B, T, W] of latents [B, C, (F,) H, W], and their noise.

        The shard also has the times and labels of the samples. Joined samples are [1, T, W]. A
        sample with a negative number is a filler without loss.
        """
        draws = [self._draw(int(sample)) for sample in batch["sample"]]
        chances, uniforms, normals, noises = zip(*draws, strict=True)
        times = self._diffusion.times(torch.stack(uniforms), torch.stack(normals))  # [B]
        keeps_label = torch.stack(chances) >= self._model.class_dropout_prob
        labels = batch["labels"].where(keeps_label, self._model.num_classes)

        latents = self._local_patches(batch["latents"])
        noise = self._local_patches(torch.stack(noises))
        noised = self._diffusion.noised(
            self._time_first(latents), self._time_first(noise), self._per_row(times)
        )
        is_real_sample = batch["sample"] >= 0
        local = {
            "patches": self._time_first(noised),
            "latents": latents,
            "noise": noise,
            "times": times,
            "labels": labels,
            "valid": is_real_sample,
        }
        local = {name: to_device(value, self._device) for name, value in local.items()}
        weights = self._weights(is_real_sample, self._is_patch)
        local["count"] = weights.sum(dtype=torch.int64)[None]
        return local

    def _local_patches(self, latents: Tensor) -> Tensor:
        """Return this rank's patches [B, T, W], or [1, T, W] of joined samples."""
        patches = patchify(latents, self._model)  # [B, all patches, W]
        if self._sample_index is not None:
            patches = patches.flatten(0, 1)[None]  # [1, B * all patches, W]
        return self._cp.shard(patches, dim=1)

    def _time_first(self, patches: Tensor) -> Tensor:
        """Arrange patches with one timestep per row: joined samples [1, T, W] become [T, 1, W].

        A second call returns them as they were.
        """
        return patches if self._sample_index is None else patches.transpose(0, 1)

    def _per_row(self, values: Tensor) -> Tensor:
        """Expand ``values`` [B], one per sample, to one per row of ``_time_first``."""
        on_cpu = values.device.type == "cpu"
        index = self._sample_index if on_cpu else self._sample_index_on_device
        return values if index is None else values[index]

    def _draw(self, sample: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draw values for label dropout and the timestep (uniform, normal), and the noise."""
        generator = generator_of(self._seed, f"noise of sample {sample}")
        chance, uniform = torch.rand(2, generator=generator)
        normal = torch.randn((), generator=generator)
        return chance, uniform, normal, torch.randn(self._model.latent_shape, generator=generator)

    def lengths(self, local: Batch) -> list[int]:
        """Return the number of patches of each sample."""
        return [self._model.num_patches] * len(local["times"])

    def _weights(self, is_real_sample: Tensor, is_patch: Tensor) -> Tensor:
        """Return 1 for patches with a loss and 0 for others, shaped like ``_time_first`` without W.

        Args:
            is_real_sample: False for fillers, [B].
            is_patch: 0 for padding, [T].
        """
        if self._sample_index is not None:
            is_patch = is_patch[:, None]
        return self._per_row(is_real_sample)[:, None] * is_patch

    def loss_sum(self, model: nn.Module, local: Batch) -> Tensor:
        """Return the sum of this rank's patch losses, each a mean over elements, float32.

        Every pipeline stage but the last returns hidden states; every one but the first takes
        hidden states as patches.
        """
        output = model(local["patches"], self._positions, local["times"], local["labels"])
        if model.final_layer is None:
            return output
        latents = self._time_first(local["latents"])
        noise = self._time_first(local["noise"])
        output = self._time_first(output)
        times = self._per_row(local["times"])
        noised = self._diffusion.noised(latents, noise, times)
        loss = self._diffusion.loss(output, latents, noise, noised, times).mean(-1)
        return (loss * self._weights(local["valid"], self._is_patch_on_device)).sum()

    def first_input(self, micro_batch_size: int) -> tuple[str, Tensor]:
        """Return the key of patches and a meta tensor, ``[B, T, W]`` or, joined, ``[1, T, W]``."""
        num_sequences = micro_batch_size if self._sample_index is None else 1
        shape = (num_sequences, len(self._positions), self._model.patch_width)
        return "patches", torch.empty(shape, device="meta")

    def tied(self, part: nn.Module, stages: int) -> Mapping[str, Sequence[int]]:
        """Tie the conditioning modules of all stages."""
        names = [name for name, _ in part.named_parameters() if name.startswith(CONDITIONING)]
        return dict.fromkeys(names, range(stages))
