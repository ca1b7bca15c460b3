"""Read frames of videos at a given frame rate and size, upright.

Only this module uses PyAV. Frames are chosen by their times, so videos with a varying rate are
sampled evenly, and some frames of videos with a higher rate are skipped.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from runtime.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

_HDR = {16: "PQ", 18: "HLG"}
"""Transfer functions of high dynamic range, keyed by their numbers in ITU-T H.273."""
_NOTES = {
    "small": "are smaller than the requested size, and were enlarged",
    "hdr": "are of high dynamic range (PQ or HLG), but their colours are read as if they were not",
    "interlaced": "are interlaced, but were not deinterlaced",
}


class VideoReader:
    """Reads clips of one size, and counts the videos that it enlarges or cannot show exactly."""

    def __init__(self, *, frames: int, height: int, width: int, fps: float) -> None:
        self._frames = frames
        self._height = height
        self._width = width
        self._fps = fps
        self._counts: Counter[str] = Counter()
        self._first: dict[str, Path] = {}

    def count(self, path: Path) -> int:
        """Return how many different frames a clip of this video would have, at most ``frames``.

        The number is smaller if the video is too short, or has a lower frame rate, so that frames
        would be repeated. All of the clip's frames are decoded, so damage in them is detected.

        Raises DataError if the file cannot be read as a video.
        """
        times: set[int] = set()
        for frame, _ in islice(_nearest_frames(path, self._fps), self._frames):
            if not times:
                self._note_traits(path, frame)
            times.add(frame.pts)
        return len(times)

    def read(self, path: Path) -> np.ndarray:
        """Return the clip from the video's start, uint8 [F, H, W, 3].

        Frames are resized to cover the size, and cropped to their middle.
        """
        images = []
        for frame, aspect in islice(_nearest_frames(path, self._fps), self._frames):
            image = frame.to_image().rotate(frame.rotation, expand=True)
            aspect = 1 / aspect if frame.rotation % 180 else aspect
            images.append(np.asarray(cover(image, self._height, self._width, aspect)))
        return np.stack(images)

    def notes(self) -> list[str]:
        """Return a line for each noted trait: the number of videos with it, and the first one."""
        return [
            f"{count:,} videos {_NOTES[kind]} (the first: {self._first[kind]})"
            for kind, count in self._counts.items()
        ]

    def _note_traits(self, path: Path, frame: Any) -> None:
        sides = (frame.height, frame.width)
        if frame.rotation % 180:
            sides = sides[::-1]
        traits = {
            "small": sides[0] < self._height or sides[1] < self._width,
            "hdr": int(frame.color_trc) in _HDR,
            "interlaced": frame.interlaced_frame,
        }
        for kind, has_trait in traits.items():
            if has_trait:
                self._counts[kind] += 1
                self._first.setdefault(kind, path)


def cover(image: "Image", height: int, width: int, aspect: Fraction = Fraction(1)) -> "Image":
    """Resize an image so that it covers a size, and crop it to its middle.

    This is ``resize_mode="crop"`` of diffusers' image processor. ``aspect`` is a pixel's width
    divided by its height.
    """
    from PIL.Image import Resampling

    shown_width = image.width * aspect
    covering_width = max(width, int(shown_width * height / image.height))
    covering_height = max(height, int(image.height * width / shown_width))
    resized = image.resize((covering_width, covering_height), Resampling.LANCZOS)
    x0 = covering_width // 2 - width // 2
    y0 = covering_height // 2 - height // 2
    return resized.crop((x0, y0, x0 + width, y0 + height))


def _nearest_frames(path: Path, fps: float) -> Iterator[tuple[Any, Fraction]]:
    """Yield the frame nearest in time to each multiple of 1 / fps, and its pixels' aspect.

    Times are counted from the first frame. The last frame is assumed to last as long as the one
    before it.

    Raises DataError if the file cannot be read as a video.
    """
    interval = 1 / Fraction(fps).limit_denominator(1001)
    sample_time = Fraction(0)
    previous = None
    previous_time = Fraction(0)
    duration = Fraction(0)
    for frame, time, aspect in _timed_frames(path):
        duration = time - previous_time
        while previous is not None and sample_time <= previous_time + duration / 2:
            yield previous, aspect
            sample_time += interval
        previous = frame
        previous_time = time

    while previous is not None and sample_time <= previous_time + duration / 2:
        yield previous, aspect
        sample_time += interval


def _timed_frames(path: Path) -> Iterator[tuple[Any, Fraction, Fraction]]:
    """Yield a video's frames as displayed, with their times from 0 and their pixels' aspect."""
    with _readable(path) as av, av.open(str(path)) as container:
        if not container.streams.video:
            raise ValueError("it has no video stream")
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        start = None
        for frame in container.decode(stream):
            if frame.pts is None or frame.is_corrupt:
                raise ValueError("a frame is damaged, or has no timestamp")
            time = frame.pts * frame.time_base
            start = time if start is None else start
            yield frame, time - start, Fraction(stream.sample_aspect_ratio or 1)
        if start is None:
            raise ValueError("it has no frames")


@contextmanager
def _readable(path: Path) -> Iterator[Any]:
    """Yield the module of PyAV; convert read errors to a DataError that names the file."""
    try:
        import av
    except ImportError as error:
        raise DataError(
            "--videos needs the package PyAV; install it: pip install av (make venv EXTRAS=video)"
        ) from error
    try:
        yield av
    except (av.FFmpegError, OSError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"{path} cannot be read as a video ({reason}); repair or remove it"
        ) from error
