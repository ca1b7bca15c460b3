"""Read a model from diffusers' ``config.json``, describe a clip, and count its tokens."""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from planner.diffusion.flux import Flux
from planner.diffusion.hunyuan import HunyuanVideo, HunyuanVideo15
from planner.diffusion.parts import Tokens
from planner.diffusion.transformer import Grid, ModelError, Transformer
from planner.diffusion.wan import Wan
from runtime.errors import UserError

MODELS = Path(__file__).resolve().parents[2] / "configs" / "diffusers"
"""Folder of published models' configurations, with the keys of their ``config.json``."""
CLASSES: dict[str, type[Transformer]] = {
    "WanTransformer3DModel": Wan,
    "HunyuanVideoTransformer3DModel": HunyuanVideo,
    "HunyuanVideo15Transformer3DModel": HunyuanVideo15,
    "FluxTransformer2DModel": Flux,
}
"""Classes that the planner describes, keyed by their names in diffusers."""


MAY_BE_0 = ("num_single_layers", "num_refiner_layers")
"""Keys of a configuration whose value may be 0."""


class ClipError(UserError):
    """A clip that the model cannot take; the message names the size and the nearest valid ones."""


def load_transformer(path: str) -> tuple[Transformer, Path]:
    """Read a model; return it and its file.

    Args:
        path: a ``config.json``, its folder, a pipeline's folder, or a name in configs/diffusers.

    Raises ModelError if the file cannot be read, the planner does not describe the class, or a key
    is unknown or has a wrong value.
    """
    file = _file(path)
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        names = ", ".join(sorted(file.stem for file in MODELS.glob("*.json")))
        raise ModelError(
            f"{path}: cannot be read ({error.strerror}); name the config.json of a transformer of "
            f"diffusers, or one of configs/diffusers: {names}"
        ) from error
    except ValueError as error:
        raise ModelError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(entries, dict):
        raise ModelError(f"{file}: not a JSON object; name a transformer's config.json")
    try:
        return transformer_of(entries), file
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from None


def _file(path: str) -> Path:
    """Return the file that a path or a name stands for."""
    bundled = MODELS / f"{path}.json"
    folder = Path(path)
    for file in (folder / "transformer" / "config.json", folder / "config.json"):
        if file.is_file():
            return file
    if bundled.is_file() and not folder.is_file():
        return bundled
    return folder


def transformer_of(entries: dict[str, Any]) -> Transformer:
    """Return the model of a configuration. Raises ModelError as ``load_transformer`` does."""
    name = entries.get("_class_name")
    if name not in CLASSES:
        raise ModelError(
            f"_class_name is {name!r}; the planner supports only {', '.join(CLASSES)}; name the "
            "config.json of one (in a pipeline's folder, transformer/config.json)"
        )
    kind = CLASSES[name]
    config = {"_class_name": name, **kind.defaults}
    for key, value in entries.items():
        if key.startswith("_"):  # about the file, such as _diffusers_version
            continue
        if key not in config:
            raise ModelError(
                f"unknown key {key} (value {value!r}) of {name}; if it does not change "
                f"the computation, remove it (the planner knows {', '.join(kind.defaults)})"
            )
        _check_value(key, value, kind.defaults[key])
        config[key] = value
    return kind(config)


def _check_value(key: str, value: Any, default: Any) -> None:
    """Raise ModelError unless a value has the type of the key's default, and is in range.

    A default of None allows integers too.
    """
    minimum = 0 if key in MAY_BE_0 else 1
    if isinstance(default, bool | str):
        is_right = type(value) is type(default)
        must = f"a value like {default!r}"
    elif isinstance(default, tuple):
        is_right = isinstance(value, list | tuple) and len(value) == len(default)
        is_right = is_right and all(type(size) is int and size >= minimum for size in value)
        must = f"{len(default)} integers of {minimum} or more"
    elif isinstance(default, float):
        is_right = type(value) in (int, float) and value > 0
        must = "a number above 0"
    else:
        is_right = type(value) is int and value >= minimum
        must = f"an integer of {minimum} or more"
        if default is None or key == "out_channels":
            is_right = is_right or value is None or key == "image_condition_type"
    if not is_right:
        raise ModelError(f"{key} is {value!r}; it must be {must}")


@dataclass(frozen=True, kw_only=True)
class Clip:
    """Size of a clip or a picture, in frames and pixels, and of its text, in tokens."""

    frames: int
    height: int
    width: int
    text: int | None = None
    """Number of text tokens; None means the number that the model's pipeline makes."""
    vae: Grid | None = None
    """Pixels per latent along frames, height and width; None means the published model's."""
    has_time_per_token: bool = False

    def grid(self, model: Transformer) -> Grid:
        """Return the numbers of tokens along frames, height and width.

        Raises ClipError if the model cannot take the clip, or a size does not give whole tokens.
        """
        vae = self.vae or model.vae
        if min(vae) < 1:
            raise ClipError(f"vae is {' '.join(map(str, vae))}; its factors must be 1 or more")
        if model.makes_pictures and self.frames != 1:
            raise ClipError(
                f"frames is {self.frames}, but {model.config_class} makes pictures; set frames to 1"
            )
        for name, value in (("frames", self.frames), ("height", self.height)):
            if value < 1:
                raise ClipError(f"{name} is {value}; it must be 1 or more")

        # The first frame makes one latent, and then every ``vae.frames`` frames make one.
        step = vae.frames * model.patch.frames
        count = (self.frames - 1) // vae.frames + 1
        if (self.frames - 1) % vae.frames or count % model.patch.frames:
            below = max(1, self.frames - (self.frames - 1) % step)
            raise ClipError(
                f"frames is {self.frames}, but the autoencoder encodes the first frame alone and "
                f"the others {vae.frames} at a time; use {below} or {below + step}"
            )
        return Grid(
            count // model.patch.frames,
            _side("height", self.height, vae.height * model.patch.height),
            _side("width", self.width, vae.width * model.patch.width),
        )

    def image_tokens(self, model: Transformer) -> int:
        """Return the number of the clip's tokens. Raises ClipError as ``grid`` does."""
        return prod(self.grid(model))

    def text_tokens(self, model: Transformer) -> int:
        """Return the number of text tokens, including those of a picture and a second text encoder.

        Raises ClipError if the model cannot take this number.
        """
        text = model.text_tokens if self.text is None else self.text
        if text < 1:
            raise ClipError(f"text is {text}; it must be 1 token or more")
        if not model.joint and model.added_tokens and text != model.text_tokens:
            raise ClipError(
                f"text is {text}, but diffusers takes exactly {model.text_tokens} text tokens in a "
                f"model that also sees a picture; use {model.text_tokens}"
            )
        return text + model.added_tokens

    def attended_tokens(self, model: Transformer) -> int:
        """Return the number of tokens that attend jointly, counted over all ranks."""
        image = self.image_tokens(model)
        return image + self.text_tokens(model) if model.joint else image

    def local_tokens(self, model: Transformer, local_len: int, samples: int = 1) -> Tokens:
        """Return the token counts of the busiest rank, if each rank has ``local_len`` tokens."""

        # Image tokens come before the text's, so the first rank has the most of them.
        whole_image = self.image_tokens(model)
        whole_text = self.text_tokens(model)
        image = min(whole_image, local_len)
        text = whole_text
        if model.joint:
            text = min(whole_text, local_len - image)
        return Tokens(samples, image, text, whole_image, whole_text, self.has_time_per_token)


def _side(name: str, pixels: int, multiple: int) -> int:
    """Return the number of tokens along a side. Raises ClipError if it is not whole."""
    if pixels < 1 or pixels % multiple:
        below = max(multiple, pixels // multiple * multiple)
        raise ClipError(
            f"{name} is {pixels}, but must be a positive multiple of {multiple}; use {below} or "
            f"{below + multiple}"
        )
    return pixels // multiple
