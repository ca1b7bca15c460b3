"""Every kind of picture file gives its colours, pixel by pixel, or is told or refused."""

import io
import struct
import zlib

import numpy as np
import pytest

from runtime.errors import DataError

Image = pytest.importorskip("PIL.Image")
from PIL import ImageCms  # noqa: E402

from data.latents.pictures import Pictures  # noqa: E402

GREY = np.array(
    [[0, 51, 102, 153], [255, 204, 153, 102], [10, 20, 30, 40], [250, 240, 230, 220]], np.uint8
)
COLOURS = np.stack([GREY, GREY.T, 255 - GREY], axis=-1)
ALPHA = np.array([[255, 255, 0, 0]] * 4, np.uint8)
ON_WHITE = np.where(ALPHA[..., None] == 255, COLOURS, 255)
GREY_ON_WHITE = np.where(ALPHA == 255, GREY, 255)
SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
LAB = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()


def saved(array, mode=None, **options):
    """Return a function that writes an array as a picture."""

    def write(path):
        image = Image.fromarray(array)
        (image if mode is None else image.convert(mode)).save(path, **options)

    return write


def palette(path, **options):
    """Write GREY by a palette in which entry n is n // 16 * 16."""
    image = Image.fromarray(GREY // 16).convert("P")
    image.putdata((GREY // 16).flatten().tolist())
    image.putpalette([value for entry in range(16) for value in [16 * entry] * 3])
    image.save(path, **options)


def cmyk(path):
    image = Image.merge(
        "CMYK",
        [Image.fromarray(x) for x in (*(255 - COLOURS).transpose(2, 0, 1), np.zeros_like(GREY))],
    )
    image.save(path)


def written(path, depth, colour_type, rows, transparent=b""):
    """Write a PNG of 4 x 4 pixels by hand, of kinds that Pillow does not write."""

    def chunk(kind, content):
        return (
            struct.pack(">I", len(content))
            + kind
            + content
            + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">IIBBBBB", 4, 4, depth, colour_type, 0, 0, 0)
    content = chunk(b"IHDR", header)
    if transparent:
        content += chunk(b"tRNS", transparent)
    lines = b"".join(b"\0" + row for row in rows)
    content += chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + content)


def sixteen_bit_colours(path, transparent=b""):
    """Write a PNG of 16 bits a channel, whose samples are 257 times those of COLOURS."""
    written(path, 16, 2, [(row.astype(">u2") * 257).tobytes() for row in COLOURS], transparent)


def sixteen_bit_colours_with_a_transparent_one(path):
    sixteen_bit_colours(path, (COLOURS[0, 1].astype(">u2") * 257).tobytes())


def four_bit_grey_with_a_transparent_level(path):
    """Write levels 0 to 15, of which 3 is transparent."""
    levels = GREY // 16
    rows = [bytes([16 * row[0] + row[1], 16 * row[2] + row[3]]) for row in levels.tolist()]
    written(path, 4, 0, rows, struct.pack(">H", 3))


def pgm(path):
    path.write_bytes(b"P5 4 4 65535\n" + (GREY.astype(">u2") * 257).tobytes())


def frames(path, **options):
    first, second = Image.fromarray(COLOURS), Image.new("RGB", (4, 4))
    first.save(path, save_all=True, append_images=[second], **options)


def deep_with_a_transparent_value(path):
    Image.fromarray(GREY.astype(np.uint16) * 257).save(path, transparency=int(GREY[0, 1]) * 257)


def white_is_zero(path):
    Image.fromarray((255 - GREY).astype(np.uint16) * 257).save(path, tiffinfo={262: 0})


def lab(path):
    Image.new("LAB", (4, 4), (255, 128, 128)).save(path)


DEEP = GREY.astype(np.uint16) * 257
FLOATS = GREY.astype(np.float32) / 255
RIGHT = {
    "8-bit PNG of colours": ("png", saved(COLOURS), COLOURS),
    "8-bit grey PNG": ("png", saved(GREY), GREY),
    "16-bit grey PNG": ("png", saved(DEEP), GREY),
    "16-bit PNG of colours": ("png", sixteen_bit_colours, COLOURS),
    "16-bit TIFF": ("tiff", saved(DEEP), GREY),
    "16-bit TIFF whose white is 0": ("tiff", white_is_zero, GREY),
    "16-bit PGM": ("pgm", pgm, GREY),
    "16-bit JPEG 2000": ("jp2", saved(DEEP, irreversible=False), GREY),
    "floating-point TIFF from 0 to 1": ("tiff", saved(FLOATS), GREY),
    "1-bit PNG": ("png", saved(GREY > 127), 255 * (GREY > 127)),
    "palette PNG": ("png", palette, GREY // 16 * 16),
    "CMYK TIFF": ("tiff", cmyk, COLOURS),
    "TIFF of Lab colours": ("tiff", lab, np.array([[[254, 255, 254]] * 4] * 4)),
    "WebP": ("webp", saved(COLOURS, lossless=True), COLOURS),
    "PNG with an sRGB profile": ("png", saved(COLOURS, icc_profile=SRGB), COLOURS),
    "PNG with an alpha channel that hides nothing": (
        "png",
        saved(np.dstack([COLOURS, np.full_like(GREY, 255)])),
        COLOURS,
    ),
}
TOLD = {
    "PNG with transparent parts": (
        "png",
        saved(np.dstack([COLOURS, ALPHA])),
        ON_WHITE,
        "transparent",
    ),
    "grey PNG with transparent parts": (
        "png",
        saved(np.dstack([GREY, ALPHA])),
        GREY_ON_WHITE,
        "transparent",
    ),
    "palette PNG with a transparent entry": (
        "png",
        lambda path: palette(path, transparency=0),
        np.where(GREY < 16, 255, GREY // 16 * 16),
        "transparent",
    ),
    "16-bit PNG with a transparent value": (
        "png",
        deep_with_a_transparent_value,
        np.where(GREY[0, 1] == GREY, 255, GREY),
        "transparent",
    ),
    "16-bit PNG of colours, one of them transparent": (
        "png",
        sixteen_bit_colours_with_a_transparent_one,
        np.where((COLOURS[0, 1] == COLOURS).all(-1, keepdims=True), 255, COLOURS),
        "transparent",
    ),
    "4-bit grey PNG with a transparent level": (
        "png",
        four_bit_grey_with_a_transparent_level,
        np.where(GREY // 16 == 3, 255, GREY // 16 * 17),
        "transparent",
    ),
    "WebP with transparent parts": (
        "webp",
        saved(np.dstack([COLOURS, ALPHA]), lossless=True, exact=True),
        ON_WHITE,
        "transparent",
    ),
    "animated PNG": ("png", frames, COLOURS, "frames"),
    "animated WebP": ("webp", lambda path: frames(path, lossless=True), COLOURS, "frames"),
    "TIFF of several pages": ("tiff", frames, COLOURS, "frames"),
    "PNG with another colour profile": ("png", saved(COLOURS, icc_profile=LAB), COLOURS, "profile"),
}
REFUSED = {
    "floating-point TIFF beyond 1": ("tiff", saved(GREY.astype(np.float32)), "white is unknown"),
    "floating-point TIFF with a NaN": (
        "tiff",
        saved(np.where(GREY > 9, FLOATS, np.nan)),
        "white is unknown",
    ),
    "32-bit TIFF of integers": ("tiff", saved(GREY.astype(np.int32)), "white is unknown"),
    "file cut off": (
        "png",
        lambda path: path.write_bytes(encoded(COLOURS)[:60]),
        "cannot be read as an image",
    ),
    "file that is no picture": (
        "png",
        lambda path: path.write_text("text"),
        "cannot be read as an image",
    ),
}
KINDS = [
    *((kind, "right") for kind in RIGHT),
    ("CMYK JPEG", "right"),
    ("JPEG with an EXIF orientation", "right"),
    *((kind, "told") for kind in TOLD),
    ("animated GIF", "told"),
    *((kind, "refused") for kind in REFUSED),
]


def encoded(array, **options):
    file = io.BytesIO()
    Image.fromarray(array).save(file, "png", **options)
    return file.getvalue()


def pixels(pictures, path, size=4):
    """Return what is trained on, back as values from 0 to 255, [size, size, 3]."""
    return (pictures.square(str(path), None, size).transpose(1, 2, 0) + 1) * 127.5


def spread(array):
    return array if array.ndim == 3 else np.stack([array] * 3, axis=-1)


@pytest.mark.parametrize("kind", RIGHT)
def test_a_picture_is_what_it_shows(tmp_path, kind):
    ending, write, shown = RIGHT[kind]
    write(tmp_path / f"a.{ending}")
    pictures = Pictures()
    np.testing.assert_allclose(pixels(pictures, tmp_path / f"a.{ending}"), spread(shown), atol=1e-4)
    assert pictures.notes() == []


@pytest.mark.parametrize("kind", TOLD)
def test_a_picture_that_is_not_taken_as_it_is_is_told(tmp_path, kind):
    ending, write, shown, what = TOLD[kind]
    write(tmp_path / f"a.{ending}")
    pictures = Pictures()
    np.testing.assert_allclose(pixels(pictures, tmp_path / f"a.{ending}"), spread(shown), atol=1e-4)
    (note,) = pictures.notes()
    assert what in note
    assert f"a.{ending}" in note


@pytest.mark.parametrize("kind", REFUSED)
def test_a_picture_whose_colours_are_not_known_is_refused_by_name(tmp_path, kind):
    ending, write, why = REFUSED[kind]
    write(tmp_path / f"a.{ending}")
    with pytest.raises(DataError, match=rf"a\.{ending} .*{why}"):
        pixels(Pictures(), tmp_path / f"a.{ending}")


@pytest.mark.parametrize(
    ("ending", "deep"),
    [("png", False), ("webp", False), ("tiff", False), ("png", True), ("tiff", True)],
)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_camera_held_otherwise_gives_an_upright_picture(tmp_path, orientation, ending, deep):
    """By the table of EXIF: row 0 and column 0 of the file are these sides of the picture."""
    turned = {
        1: lambda x: x,
        2: lambda x: x[:, ::-1],
        3: lambda x: x[::-1, ::-1],
        4: lambda x: x[::-1],
        5: lambda x: x.swapaxes(0, 1),
        6: lambda x: x.swapaxes(0, 1)[:, ::-1],
        7: lambda x: x[::-1, ::-1].swapaxes(0, 1),
        8: lambda x: x.swapaxes(0, 1)[::-1],
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if ending == "webp" else {}
    Image.fromarray(DEEP if deep else COLOURS).save(tmp_path / f"a.{ending}", exif=exif, **options)
    expected = spread(turned[orientation](GREY if deep else COLOURS))
    np.testing.assert_allclose(pixels(Pictures(), tmp_path / f"a.{ending}"), expected, atol=1e-4)


@pytest.mark.parametrize("orientation", [5, 6, 7, 8])
def test_a_scan_that_is_no_square_is_turned_whole(tmp_path, orientation):
    """Pillow mixes up the sides of such a TIFF, if it opens it by its name."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    grey_row = np.repeat(np.array([[10, 200, 90, 30, 150, 60]], np.uint8), 4, axis=0)
    Image.fromarray(grey_row).save(tmp_path / "a.tiff", exif=exif)
    column = grey_row[0, 1:5] if orientation in (5, 6) else grey_row[0, 4:0:-1]
    np.testing.assert_allclose(
        pixels(Pictures(), tmp_path / "a.tiff"), spread(np.stack([column] * 4, 1)), atol=1e-4
    )


def test_a_jpeg_of_a_camera_is_upright(tmp_path):
    """Compression leaves two halves as they are in the middle of each."""
    halves = np.zeros((32, 32, 3), np.uint8)
    halves[:16] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees: what is up in the file is right
    Image.fromarray(halves).save(tmp_path / "a.jpg", exif=exif)
    upright = pixels(Pictures(), tmp_path / "a.jpg", 32)
    assert upright[:, :8].max() < 5
    assert upright[:, 24:].min() > 250


def test_a_jpeg_of_printing_colours_is_not_inverted(tmp_path):
    Image.new("CMYK", (16, 16), (255, 0, 0, 0)).save(tmp_path / "a.jpg")
    np.testing.assert_allclose(
        pixels(Pictures(), tmp_path / "a.jpg", 16)[0, 0], [0, 255, 255], atol=3
    )


def test_a_half_transparent_pixel_is_half_white(tmp_path):
    Image.new("RGBA", (4, 4), (0, 0, 0, 128)).save(tmp_path / "a.png")
    np.testing.assert_allclose(pixels(Pictures(), tmp_path / "a.png"), 127, atol=1)


def test_an_animated_gif_is_its_first_frame(tmp_path):
    first, second = Image.new("RGB", (4, 4), (255, 0, 0)), Image.new("RGB", (4, 4), (0, 0, 255))
    first.save(tmp_path / "a.gif", save_all=True, append_images=[second])
    pictures = Pictures()
    np.testing.assert_allclose(
        pixels(pictures, tmp_path / "a.gif"), [[[255, 0, 0]] * 4] * 4, atol=1e-4
    )
    assert "several frames" in pictures.notes()[0]


def test_a_deep_picture_is_resized_like_one_of_8_bits(tmp_path):
    big = np.add.outer(np.arange(16), np.arange(16)).astype(np.uint8) * 8
    Image.fromarray(big).save(tmp_path / "shallow.png")
    Image.fromarray(big.astype(np.uint16) * 257).save(tmp_path / "deep.png")
    shallow, deep = (
        pixels(Pictures(), tmp_path / f"{name}.png", 8) for name in ("shallow", "deep")
    )
    np.testing.assert_allclose(shallow, deep, atol=1.01)
    assert deep.min() >= 0
    assert deep.max() <= 255
