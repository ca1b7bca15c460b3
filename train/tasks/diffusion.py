"""Diffusion transformers on latents of images or videos, with patches sharded over ranks."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from data.latents.dataset import build_latent_datasets
from model.dit import DiT, dit_flops_per_patch, num_dit_parameters
from runtime.together import raise_together
from train.config import diffusion
from train.config.diffusion import diffusion_of
from train.config.entries import DiTRunConfig
from train.context_attention import diffusion_context
from train.objectives.diffusion import Denoising
from train.sampling import Sampler, picture_writer
from train.tasks.task import Data, Task


class DiffusionTask(Task[DiTRunConfig]):
    """Pretraining of a diffusion transformer."""

    entry = "pretrain_dit.py"
    data_writer = "tools.prepare_latents"
    data_flags = ("--data-path FOLDER",)
    parse_args = staticmethod(diffusion.parse_args)
    validate = staticmethod(diffusion.validate)

    def set_up(self) -> None:
        """Set up context parallelism, the attention and the loss; collective."""
        config = self.config
        with raise_together():
            self.cp, self._attend = diffusion_context(config, self.mesh.cp.get_group())
        self.objective = Denoising(
            self.cp,
            self.mesh.device,
            config.model,
            diffusion_of(config),
            config.train.seed,
            joined=config.packed,
        )

    def build_model(self) -> nn.Module:
        """Build the whole model."""
        return DiT(self.config.model, self._attend)

    def load_data(self, tokenizer: None) -> Data:
        """Open the latents; collective."""
        config = self.config
        model = config.model
        train, valid = build_latent_datasets(
            config.data, model.latent_shape, model.num_classes, config.train.seed
        )
        return Data(train, valid if config.train.eval_iters else None)

    def flops_per_token(self, length: int) -> float:
        """Return the training FLOPs per patch, which depend only on the model."""
        return dit_flops_per_patch(self.config.model)

    def after_validation(self, parts: Sequence[Any]) -> Callable[[int], None] | None:
        """Return a function that writes a picture of samples after each validation."""
        return picture_writer(self.sampler(parts).draw, self.config)

    def sampler(self, parts: Sequence[Any], seed: int | None = None) -> Sampler:
        """Return a sampler with the run's settings; ``seed`` is the run's by default."""
        if seed is None:
            seed = self.config.train.seed
        return Sampler(self.config, self.mesh, self.cp, parts, diffusion_of(self.config), seed)

    def description(self, data: Data) -> str:
        """Describe the run in one line: the model, the mesh and the data."""
        model = self.config.model
        shape = " x ".join(map(str, model.latent_shape))
        latents = f"latents of {shape} in {model.num_patches} patches"
        title = f"DiT of {num_dit_parameters(model):,} parameters"
        return self._summary(title, self.config.context.title, latents)
