"""Encode clips as diffusers' Wan pipelines do: latents by the VAE, captions by the text encoder."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime.errors import DataError, UserError, nearest
from runtime.files import sha256

VAES = ("AutoencoderKLWan",)
TEXT_ENCODERS = ("UMT5EncoderModel", "T5EncoderModel")
TEMPORAL = 4
"""Number of video frames that a latent frame encodes; the first latent frame encodes only one."""
PATCH = 2
"""Height and width of a Wan transformer's patch, in elements of the latents."""


@dataclass(frozen=True)
class Folder:
    """A local folder of a model, with the model's class and configuration."""

    path: Path
    kind: str
    config: dict[str, Any]

    def described(self) -> dict[str, str]:
        """Return the entry that describes the model in a clip folder's index."""
        return {"class": self.kind, "config_sha256": sha256(self.path / "config.json")}


def vae_folder(path: Path) -> Folder:
    """Read a VAE's configuration. Raises DataError if it is missing or of another class."""
    config = _config("vae", path)
    return _folder_of("vae", path, str(config.get("_class_name")), config, VAES)


def text_encoder_folder(path: Path) -> Folder:
    """Read a text encoder's configuration. Raises DataError like ``vae_folder``."""
    config = _config("text_encoder", path)
    architectures = config.get("architectures") or [None]
    return _folder_of("text_encoder", path, str(architectures[0]), config, TEXT_ENCODERS)


def _folder_of(
    field: str, path: Path, kind: str, config: dict[str, Any], kinds: tuple[str, ...]
) -> Folder:
    if kind not in kinds:
        supported = " or ".join(kinds)
        raise DataError(
            f"{field} is {path}, a model of class {kind}, but only {supported} is supported; give "
            "the folder of such a model"
        )
    return Folder(path, kind, config)


def _config(field: str, path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.is_file():
        fix = "give a local folder with config.json and safetensors"
        if (path / "model_index.json").is_file():
            fix = f"it is the folder of a whole pipeline: give {path / field}"
        raise DataError(f"{field} is {path}, but there is no config.json in it; {fix}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file} cannot be read ({error}); download it again") from error
    if not isinstance(config, dict):
        raise DataError(f"{file} is not a JSON object; download it again")
    return config


def check_sizes(vae: Folder, *, frames: int, height: int, width: int) -> None:
    """Raise UserError for sizes that cannot be divided into the VAE's latents and Wan's patches.

    The message has the nearest sizes that can.
    """
    if frames % TEMPORAL != 1:
        near = nearest(frames, range(1, frames + TEMPORAL, TEMPORAL))
        raise UserError(
            f"frames is {frames}, but the VAE encodes the first frame alone and the others "
            f"{TEMPORAL} at a time; give {near}"
        )
    spatial = int(vae.config.get("scale_factor_spatial") or 8)
    multiple = spatial * PATCH
    for name, size in {"height": height, "width": width}.items():
        if size % multiple:
            near = nearest(size, range(multiple, size + multiple, multiple))
            raise UserError(
                f"{name} is {size}; it must be a multiple of {multiple}, since the VAE downsamples "
                f"it by a factor of {spatial} and the transformer by {PATCH} more; give {near}"
            )


class Encoders:
    """A VAE and a text encoder with its tokenizer, frozen, on one device."""

    def __init__(
        self,
        vae: Folder,
        text_encoder: Folder,
        tokenizer: Path,
        max_text_tokens: int,
        device: torch.device,
    ) -> None:
        """Load the models: the VAE in float32, the text encoder in the dtype of its weights.

        Raises DataError if a package is missing, or a folder cannot be loaded.
        """
        try:
            import diffusers
            import transformers
        except ImportError as error:
            raise DataError(
                "vae and text_encoder need the packages diffusers and transformers; install them: "
                "pip install diffusers transformers (make venv EXTRAS=video)"
            ) from error

        options = {"local_files_only": True, "use_safetensors": True}
        vae_class = getattr(diffusers, vae.kind)
        self._vae: Any = _loaded(
            "vae", vae.path, vae_class.from_pretrained, torch_dtype=torch.float32, **options
        )
        encoder_class = getattr(transformers, text_encoder.kind)
        encoder: Any = _loaded(
            "text_encoder", text_encoder.path, encoder_class.from_pretrained, **options
        )
        self._vae.to(device).eval().requires_grad_(False)
        encoder.to(device).eval().requires_grad_(False)
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(
                tokenizer, local_files_only=True
            )
        except (OSError, ValueError, ImportError) as error:
            reason = str(error).splitlines()[0]
            raise DataError(
                f"tokenizer {tokenizer} cannot be loaded ({reason}); give the folder of a tokenizer"
            ) from error
        # The pipeline's own code cleans, cuts and pads captions, exactly as in sampling.
        self._pipeline: Any = diffusers.WanPipeline(
            tokenizer=self._tokenizer, text_encoder=encoder, vae=self._vae, scheduler=None
        )
        self._max_text_tokens = max_text_tokens
        self._device = device

    @torch.no_grad()
    def latents(self, pixels: np.ndarray) -> Tensor:
        """Encode frames, uint8 [f, h, w, 3], to normalised mean latents, float32 [C, F, H, W]."""
        colours = 2 * (torch.from_numpy(pixels).to(self._device).float() / 255) - 1
        video = colours.permute(3, 0, 1, 2)[None]  # [1, 3, f, h, w]
        mode = self._vae.encode(video).latent_dist.mode()[0]  # [C, F, H, W]
        config = self._vae.config
        mean = torch.tensor(config.latents_mean, device=self._device).view(-1, 1, 1, 1)
        std = torch.tensor(config.latents_std, device=self._device).view(-1, 1, 1, 1)
        return ((mode - mean) / std).cpu()

    @torch.no_grad()
    def text(self, caption: str) -> Tensor:
        """Return a caption's embedding [L, D], with zeros after the caption's last token."""
        embedding, _ = self._pipeline.encode_prompt(
            caption,
            do_classifier_free_guidance=False,
            max_sequence_length=self._max_text_tokens,
            device=self._device,
        )
        return embedding[0].cpu()

    def is_cut(self, caption: str) -> bool:
        """Return True if a caption has more tokens than an embedding can hold."""
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        return len(self._tokenizer(prompt_clean(caption)).input_ids) > self._max_text_tokens


def _loaded(field: str, path: Path, load: Any, **options: Any) -> Any:
    """Load a model from a folder. Raises DataError if that fails, or if weights are missing."""
    try:
        model, report = load(str(path), output_loading_info=True, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{field} {path} cannot be loaded ({str(error).splitlines()[0]}); download it again"
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise DataError(
            f"{field} {path} lacks {len(missing)} weights, such as {missing[0]}; download it again"
        )
    return model
