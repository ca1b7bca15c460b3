"""Picture files as colours: of any depth, upright, with nothing shown that transparency hides.

The one place that knows of Pillow's modes. Its own conversion to RGB cuts 16 bits off at 255, takes
floats from 0 to 1 for black, and paints transparent pixels with whatever lies under them.
"""

import io
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from runtime.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

_DEEP = {"I;16", "I;16L", "I;16B", "I;16N"}
"""Modes of one channel of 16 bits."""
_DEEP_FORMATS = {"PNG", "TIFF", "JPEG2000", "PPM"}
"""Formats in which white is the largest integer."""
_SHALLOW = {"L;2": 85, "L;4": 17}
"""Grey levels of PNGs of 2 and 4 bits, and what Pillow multiplies them by to have 8."""
_BITS_TAG, _PHOTOMETRIC_TAG, _WHITE_IS_ZERO = 258, 262, 0
_TOLD = {
    "transparent": "have transparent parts, which are laid on white",
    "frames": "have several frames, of which the first is taken",
    "profile": "have a colour profile other than sRGB, which is not applied",
}


class Pictures:
    """Read picture files as squares, and count what had to be decided about them."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def square(self, path: str, content: bytes | None, size: int) -> np.ndarray:
        """Read a picture, crop it to its middle square and resize it: float32 [3, size, size] from
        -1 to 1.

        Args:
            path: of the file; a name alone if there is `content`.

        Raises DataError: a file that is no picture, or a kind whose black and white are not known.
        """
        from PIL import Image, ImageOps

        try:
            # A file, not its name: Pillow maps a named TIFF of one tile, and mixes up the sides of
            # a turned one.
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
        except Exception as error:  # whatever Pillow's many decoders raise
            reason = " ".join(str(error).split()) or type(error).__name__
            raise DataError(
                f"{path} cannot be read as an image ({reason}); repair or remove it"
            ) from error

        side = min(upright.size)
        left, top = ((length - side) // 2 for length in upright.size)
        # Not by resize's own box: its filter would reach pixels outside of the square.
        cropped = upright.crop((left, top, left + side, top + side))
        pixels = np.asarray(
            cropped.resize((size, size), Image.Resampling.BICUBIC), dtype=np.float32
        )
        if pixels.ndim == 2:  # one deep channel, in which the filter may overshoot
            pixels = np.repeat(pixels.clip(0, 255)[..., None], 3, axis=-1)
        return pixels.transpose(2, 0, 1) / 127.5 - 1

    def notes(self) -> list[str]:
        """Say what was decided about how many pictures, and name the first of each."""
        return [
            f"{count:,} pictures {_TOLD[kind]} (the first: {self._first[kind]})"
            for kind, count in sorted(self._counts.items())
        ]

    def _count(self, path: str, image: "Image") -> None:
        several = getattr(image, "n_frames", 1) > 1 and image.format != "MPO"  # a camera's preview
        traits = {
            "transparent": _hides(image),
            "frames": several,
            "profile": _has_other_profile(image),
        }
        for kind in [kind for kind, is_so in traits.items() if is_so]:
            self._counts[kind] += 1
            self._first.setdefault(kind, path)


def _scale_transparency(image: "Image") -> None:
    """Give the transparent value of a PNG as many bits as its pixels get, before these are loaded."""
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
    """Return a picture in mode RGB, or in mode F with one channel from 0 to 255. Raises ValueError."""
    from PIL import Image

    if image.mode in _DEEP or image.mode in ("I", "F"):
        converted = Image.fromarray(_one_deep_channel(image))
    elif image.has_transparency_data:
        converted = Image.alpha_composite(
            Image.new("RGBA", image.size, "white"), _rgba(image)
        ).convert("RGB")
    else:
        converted = image.convert("RGB")
    if 0x0112 in image.getexif():
        converted.getexif()[0x0112] = image.getexif()[
            0x0112
        ]  # the orientation, which fromarray loses
    return converted


def _one_deep_channel(image: "Image") -> np.ndarray:
    """Return the values of a picture of integers of more than 8 bits, or of floats: float32 [H, W]
    from 0 to 255.
    """
    values = np.asarray(image).astype(np.float64)
    if image.mode == "F":
        if not (np.isfinite(values).all() and values.min() >= 0 and values.max() <= 1):
            raise ValueError(
                f"its values are floats from {values.min():g} to {values.max():g}, and white is not known but for "
                "floats from 0 to 1; convert it to 8 or 16 bits"
            )
        shares = values
    elif image.format in _DEEP_FORMATS and not (image.format == "TIFF" and image.mode == "I"):
        shares = values / ((1 << _bits(image)) - 1)
    else:
        raise ValueError(
            f"it holds integers of mode {image.mode}, whose white is not known; convert it to 8 or 16 bits"
        )

    tags = getattr(image, "tag_v2", {})
    if tags.get(_PHOTOMETRIC_TAG) == _WHITE_IS_ZERO:
        shares = 1 - shares
    hidden = image.info.get("transparency")
    if isinstance(hidden, int):  # of a PNG: the one value that is transparent
        shares = np.where(values == hidden, 1.0, shares)
    return (255 * shares).astype(np.float32)


def _bits(image: "Image") -> int:
    bits: Any = getattr(image, "tag_v2", {}).get(_BITS_TAG, 16)
    return int(bits[0] if isinstance(bits, tuple) else bits)


def _hides(image: "Image") -> bool:
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
        return True  # one that nothing can apply
    return "sRGB" not in name
