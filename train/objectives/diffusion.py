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
"""Modules of every pipeline stage, since only hidden states pass between stages."""


class Denoising(Objective):
    """Add noise to a batch, shard it over the context-parallel ranks and sum the loss of this
    rank's patches.

    Noise, time and label dropout are drawn on the CPU for whole samples, from the seed and the
    sample's number alone: every mesh and every resumed run draws the same ones.
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
        """Set up for ``cp``, made for the patches of a sample or, with ``joined``, of a
        micro-batch's, as documents.
        """
        self._cp, self._device, self._model, self._diffusion, self._seed = (
            cp,
            device,
            model,
            diffusion,
            seed,
        )
        self._positions = cp.positions.to(device)  # [T]
        self._real = (cp.positions < cp.plan.seq_len).float()  # [T]; 0 for padding
        self._real_there = self._real.to(device)
        self._sample = (
            (cp.positions.clamp(max=cp.plan.seq_len - 1) // model.num_patches) if joined else None
        )  # [T]
        self._sample_there = None if self._sample is None else self._sample.to(device)

    def blank(self, micro_batch_size: int) -> Batch:
        """Return a micro-batch as the data's, of zeros."""
        numbers = torch.zeros(micro_batch_size, dtype=torch.int64)
        latents = torch.zeros(micro_batch_size, *self._model.latent_shape)
        return {"latents": latents, "labels": numbers, "sample": numbers}

    def local(self, batch: Batch) -> Batch:
        """Return this rank's patches [B, T, W] of latents [B, C, (F,) H, W], with noise, times and
        labels.

        Joined samples are [1, T, W]. A sample with a negative number is a filler and carries no
        loss.
        """
        drawn = [self._drawn(int(sample)) for sample in batch["sample"]]
        chance, uniform, normal, noise = (
            torch.stack(values) for values in zip(*drawn, strict=True)
        )
        times = self._diffusion.times(uniform, normal)
        labels = batch["labels"].where(
            chance >= self._model.class_dropout_prob, self._model.num_classes
        )
        whole = (
            patchify(x, self._model) for x in (batch["latents"], noise)
        )  # [B, all patches, W] each
        joined = (x if self._sample is None else x.flatten(0, 1)[None] for x in whole)
        latents, noise = (self._cp.shard(x, dim=1) for x in joined)
        noised = self._diffusion.noised(
            self._by_time(latents), self._by_time(noise), self._of_rows(times)
        )
        local = {
            "patches": self._by_time(noised),
            "latents": latents,
            "noise": noise,
            "times": times,
            "labels": labels,
            "valid": batch["sample"] >= 0,
        }
        count = self._weights(local["valid"], self._real).sum(dtype=torch.int64)[None]
        return {name: to_device(value, self._device) for name, value in local.items()} | {
            "count": count
        }

    def _by_time(self, patches: Tensor) -> Tensor:
        """Return patches [B, T, W] with a row for each time: joined ones, [1, T, W], as [T, 1, W];
        its own inverse.
        """
        return patches if self._sample is None else patches.transpose(0, 1)

    def _of_rows(self, values: Tensor) -> Tensor:
        """Return a value for each row of ``_by_time``, given one for each sample, [B]."""
        index = self._sample if values.device.type == "cpu" else self._sample_there
        return values if index is None else values[index]

    def _drawn(self, sample: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draw for one sample: label chance, uniform and normal for its time, noise of the latents'
        shape.
        """
        generator = generator_of(self._seed, f"noise of sample {sample}")
        chance, uniform = torch.rand(2, generator=generator)
        normal = torch.randn((), generator=generator)
        return chance, uniform, normal, torch.randn(self._model.latent_shape, generator=generator)

    def lengths(self, local: Batch) -> list[int]:
        """Return the patches of each sample."""
        return [self._model.num_patches] * len(local["times"])

    def _weights(self, valid: Tensor, real: Tensor) -> Tensor:
        """Return 1 for each patch that carries loss and else 0, shaped as ``_by_time`` without W.

        Given whether a sample carries loss [B], and 1 for each patch that is no padding [T].
        """
        return self._of_rows(valid)[:, None] * (real if self._sample is None else real[:, None])

    def loss_sum(self, model: nn.Module, local: Batch) -> Tensor:
        """Return the sum over this rank's patches of their elements' mean loss, float32.

        A stage other than the last returns hidden states; one other than the first takes them in
        place of patches.
        """
        output = model(local["patches"], self._positions, local["times"], local["labels"])
        if model.final_layer is None:
            return output
        latents, noise, output = map(self._by_time, (local["latents"], local["noise"], output))
        times = self._of_rows(local["times"])
        noised = self._diffusion.noised(latents, noise, times)
        loss = self._diffusion.loss(output, latents, noise, noised, times).mean(-1)
        return (loss * self._weights(local["valid"], self._real_there)).sum()

    def first_input(self, micro_batch_size: int) -> tuple[str, Tensor]:
        """Return the name and a meta tensor of patches ``[B, T, W]``, or ``[1, T, W]`` of joined
        samples.
        """
        rows = micro_batch_size if self._sample is None else 1
        return "patches", torch.empty(
            (rows, len(self._positions), self._model.patch_width), device="meta"
        )

    def tied(self, part: nn.Module, stages: int) -> Mapping[str, Sequence[int]]:
        """Tie the conditioning modules of all stages."""
        names = [name for name, _ in part.named_parameters() if name.startswith(CONDITIONING)]
        return dict.fromkeys(names, range(stages))
