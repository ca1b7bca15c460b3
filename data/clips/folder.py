"""Write and read a folder of cached clips: a file for each clip, and an index.json of the files.

clip-00000.safetensors has ``latents`` [C, F, H, W] and ``text`` (the caption's embedding) [L, D];
its metadata has the caption and the video's name. empty.safetensors has the ``text`` of the empty
caption, for training that drops captions.
"""

import json
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.latents.folder import INDEX
from data.latents.writing import writable
from runtime.errors import DataError
from runtime.files import drafting, owned
from runtime.progress import Progress

FORMAT = "clips"
EMPTY = "empty.safetensors"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_WRITE = "write the folder again (tools/prepare_clips.py)"


@dataclass(frozen=True, kw_only=True)
class Clip:
    """An encoded clip, with the name of its video and its caption."""

    video: str
    caption: str
    latents: Tensor
    text: Tensor


def check_unwritten(folder: Path) -> None:
    """Raise DataError if a folder already has an index, and therefore data."""
    if (folder / INDEX).exists():
        raise DataError(f"{folder} already has data; give another folder, or remove this one")


def write_clips(
    folder: Path,
    clips: Iterable[Clip],
    *,
    empty_text: Tensor,
    dtype: str,
    description: dict[str, Any],
) -> None:
    """Write clips while ``clips`` yields them; all files appear at the end, the index last.

    If anything raises an error, ``clips`` included, no file remains.

    Args:
        description: further entries of the index, such as the number of frames per second.

    Raises DataError if the folder has an index, is in use by another process or is not writable, or
    if values are not finite in ``dtype``.
    """
    rows = []
    with ExitStack() as stack:
        with writable(folder):
            stack.enter_context(owned(folder))
        check_unwritten(folder)
        drafts_of = stack.enter_context(drafting())
        shapes: dict[str, list[int]] = {}
        for number, clip in enumerate(clips):
            name = f"clip-{number:05}.safetensors"
            tensors = {"latents": clip.latents, "text": clip.text}
            shapes = {key: list(x.shape) for key, x in tensors.items()}
            content = _content(tensors, dtype, clip.video, caption=clip.caption)
            with writable(folder):
                drafts_of(folder / name)[0].write_bytes(content)
            rows.append({"file": name, "video": clip.video})
        with writable(folder):
            empty = _content({"text": empty_text}, dtype, "the empty caption", caption="")
            drafts_of(folder / EMPTY)[0].write_bytes(empty)
            index = {"format": FORMAT, "version": 1, **shapes, "dtype": dtype, **description}
            index |= {"empty": EMPTY, "clips": rows}
            draft = drafts_of(folder / INDEX)[0]
            draft.write_text(json.dumps(index, indent=1), encoding="utf-8")
            stack.close()


def _content(tensors: dict[str, Tensor], dtype: str, video: str, *, caption: str) -> bytes:
    """Return the bytes of a clip's file. Raises DataError for a NaN or an infinity."""
    from safetensors.torch import save

    cast = {name: x.to(DTYPES[dtype]).contiguous() for name, x in tensors.items()}
    for name, x in cast.items():
        if not bool(x.isfinite().all()):
            raise DataError(
                f"{video}: its {name} hold a NaN or an infinity in {dtype}; leave out the video, "
                "or give another dtype"
            )
    return save(cast, {"caption": caption, "video": video})


class ClipFolder:
    """A folder of cached clips, opened by its index."""

    def __init__(self, folder: str | Path) -> None:
        """Read the index. Raises DataError if it is missing or invalid."""
        self.folder = Path(folder)
        path = self.folder / INDEX
        if not path.is_file():
            raise DataError(
                f"{folder} has no {INDEX}; give a folder that tools/prepare_clips.py wrote"
            )
        try:
            index = json.loads(path.read_text(encoding="utf-8"))
            self.latents_shape = tuple(index["latents"])
            self.text_shape = tuple(index["text"])
            self.dtype = DTYPES[index["dtype"]]
            self.files = [self.folder / Path(row["file"]).name for row in index["clips"]]
            is_ours = (index["format"], index["version"]) == (FORMAT, 1)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(f"{path} is not an index of clips ({error!r}); {_WRITE}") from error
        if not is_ours or not self.files:
            raise DataError(f"{path} is not an index of version 1 with clips; {_WRITE}")
        self.index = index

    def check(self) -> None:
        """Read all tensors. Raises DataError if one is missing, not finite, or not as indexed."""
        shapes = {"latents": self.latents_shape, "text": self.text_shape}
        with Progress() as progress:
            self._check_file(self.folder / EMPTY, {"text": self.text_shape})
            for number, path in enumerate(self.files, start=1):
                self._check_file(path, shapes)
                progress(f"{self.folder}: {number} of {len(self.files)} clips checked")

    def _check_file(self, path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise DataError(f"{path} cannot be read ({error}); {_WRITE}") from error
        for name, shape in shapes.items():
            x = tensors.get(name)
            if x is None or x.shape != shape or x.dtype != self.dtype:
                described = "nothing" if x is None else f"{x.dtype} {list(x.shape)}"
                raise DataError(
                    f"{path} has {described} as {name}, but the index says {self.dtype} "
                    f"{list(shape)}; {_WRITE}"
                )
            if not bool(x.isfinite().all()):
                raise DataError(f"{path}: its {name} hold a NaN or an infinity; {_WRITE}")
