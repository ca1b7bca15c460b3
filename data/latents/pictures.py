"""Read picture files as RGB values: any depth, upright, transparent parts on white.

Only this module knows of Pillow's modes. Pillow's own conversion to RGB clips 16 bits at 255, takes
floats from 0 to 1 for black, and paints transparent pixels in the colours stored under them.
"""

import io
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from runtime.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

_DEEP = {"I;16", "I;16L", "I;16B", "I;16N"}
"""Pillow's modes with one channel of 16 bits."""
_DEEP_FORMATS = {"PNG", "TIFF", "JPEG2000", "PPM"}
"""Formats in which white is the largest integer."""
_SHALLOW = {"L;2": 85, "L;4": 17}
"""Grey PNGs of 2 and 4 bits, and the factor by which Pillow scales them to 8 bits."""
_BITS_TAG = 258
_PHOTOMETRIC_TAG = 262
_WHITE_IS_ZERO = 0
_ORIENTATION = 0x0112
_NOTES = {
    "transparent": "have transparent parts, which are blended with white",
    "frames": "have several frames; only the first is used",
    "profile": "have a colour profile other than sRGB, which is not applied",
}


class Pictures:
    """Read picture files as squares, and count those with parts that are changed or ignored."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def square(self, path: str, content: bytes | None, size: int) -> np.ndarray:
        """Return the middle square of a picture, resized: float32 [3, size, size] from -1 to 1.

        Args:
            path: path of the file; with ``content``, a name for messages.
            content: bytes of the file, to read instead of the path.
            size: height and width of the result.

        Raises DataError if the file is not a picture, or if its values for black and white are not
        known.
        """
        from PIL import Image, ImageOps

        try:
            # Pass an open file, not its name: Pillow memory-maps a named TIFF of one tile, and
            # swaps the sides of a rotated one.
            with (
                open(path, "rb") if content is None else io.BytesIO(content) as file,
                Image.open(file) as image,
            ):
                _scale_transparency(image)
                image.load()
                self._count(path, image)
                upright = ImageOps.exif_transpose(_colours(image))
        except MemoryError:
            raise
        except Exception as error:  # Pillow's decoders raise many types
            reason = " ".join(str(error).split()) or type(error).__name__
            raise DataError(
                f"{path} cannot be read as an image ({reason}); repair or remove it"
            ) from error

        side = min(upright.size)
        x0 = (upright.width - side) // 2
        y0 = (upright.height - side) // 2
        # Crop first: with resize(box=...) the filter would use pixels outside the square.
        cropped = upright.crop((x0, y0, x0 + side, y0 + side))
        resized = cropped.resize((size, size), Image.Resampling.BICUBIC)
        pixels = np.asarray(resized, dtype=np.float32)
        if pixels.ndim == 2:  # one deep channel, in which the filter may overshoot
            pixels = np.repeat(pixels.clip(0, 255)[..., None], 3, axis=-1)
        return pixels.transpose(2, 0, 1) / 127.5 - 1

    def notes(self) -> list[str]:
        """Return a line per kind of change, with the number of pictures and the first of them."""
        return [
            f"{count:,} pictures {_NOTES[kind]} (the first: {self._first[kind]})"
            for kind, count in sorted(self._counts.items())
        ]

    def _count(self, path: str, image: "Image") -> None:
        # The second frame of an MPO is a camera's preview.
        has_frames = getattr(image, "n_frames", 1) > 1 and image.format != "MPO"
        traits = {
            "transparent": _has_transparency(image),
            "frames": has_frames,
            "profile": _has_other_profile(image),
        }
        for kind, has_trait in traits.items():
            if has_trait:
                self._counts[kind] += 1
                self._first.setdefault(kind, path)


def _scale_transparency(image: "Image") -> None:
    """Scale the transparent value of a PNG to the depth that its pixels are loaded with."""
    tiles = getattr(image, "tile", [])
    kind = tiles[0].args if image.format == "PNG" and tiles else None
    value: Any = image.info.get("transparency")
    if value is None:
        return

    if kind in _SHALLOW:
        image.info["transparency"] = value * _SHALLOW[kind]
    elif kind == "RGB;16B":
        image.info["transparency"] = tuple(channel >> 8 for channel in value)


def _colours(image: "Image") -> "Image":
    """Convert a picture to mode RGB or, if deeper than 8 bits, to mode F from 0 to 255.

    Raises ValueError under the same conditions as `_one_deep_channel`.
    """
    from PIL import Image

    if image.mode in _DEEP or image.mode in ("I", "F"):
        converted = Image.fromarray(_one_deep_channel(image))
    elif image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        converted = Image.alpha_composite(white, _rgba(image)).convert("RGB")
    else:
        converted = image.convert("RGB")
    if _ORIENTATION in image.getexif():  # fromarray loses it
        converted.getexif()[_ORIENTATION] = image.getexif()[_ORIENTATION]
    return converted


def _one_deep_channel(image: "Image") -> np.ndarray:
    """Convert deep integers or floats to float32 [H, W] from 0 to 255.

    Raises ValueError if it is not known which value is white.
    """
    values = np.asarray(image).astype(np.float64)
    if image.mode == "F":
        if not (np.isfinite(values).all() and values.min() >= 0 and values.max() <= 1):
            raise ValueError(
                f"its values are floats from {values.min():g} to {values.max():g}, but "
                "the value of white is unknown for floats outside 0 to 1; convert it to 8 or 16 "
                "bits"
            )
        shares = values
    elif image.format in _DEEP_FORMATS and not (image.format == "TIFF" and image.mode == "I"):
        shares = values / ((1 << _bits(image)) - 1)
    else:
        raise ValueError(
            f"its pixels are integers of mode {image.mode}, and the value of white is unknown for "
            "these; convert it to 8 or 16 bits"
        )

    tags = getattr(image, "tag_v2", {})
    if tags.get(_PHOTOMETRIC_TAG) == _WHITE_IS_ZERO:
        shares = 1 - shares
    hidden = image.info.get("transparency")
    if isinstance(hidden, int):  # the one transparent value of a PNG
        shares = np.where(values == hidden, 1.0, shares)
    return (255 * shares).astype(np.float32)


def _bits(image: "Image") -> int:
    bits: Any = getattr(image, "tag_v2", {}).get(_BITS_TAG, 16)
    return int(bits[0] if isinstance(bits, tuple) else bits)


def _has_transparency(image: "Image") -> bool:
    """Return whether a picture has a pixel that is not opaque."""
    if not image.has_transparency_data:
        return False
    if image.mode in _DEEP or image.mode == "I":
        return bool((np.asarray(image) == image.info["transparency"]).any())
    return bool((np.asarray(_rgba(image).getchannel("A")) < 255).any())


def _rgba(image: "Image") -> "Image":
    return (image.convert("LA") if image.mode == "La" else image).convert("RGBA")


def _has_other_profile(image: "Image") -> bool:
    """Return whether a picture has a colour profile that is not sRGB."""
    from PIL import ImageCms

    profile = image.info.get("icc_profile")
    if not profile:
        return False
    try:
        name = ImageCms.getProfileDescription(ImageCms.ImageCmsProfile(io.BytesIO(profile)))
    except (OSError, ImageCms.PyCMSError):
        return True  # a broken profile is not applied either
    return "sRGB" not in name
