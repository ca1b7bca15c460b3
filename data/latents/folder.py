"""Read a folder of precomputed latents: shards of samples, and the index.json that names them.

index.json: {"version": 1, "shape": [C, H, W] or [C, F, H, W], "dtype": "float32" or "float16",
"shards": [{"latents": file, "labels": file, "samples": N}, ...]}. A .npy shard holds latents [N,
*shape], a second .npy its labels, integers [N]; a .safetensors shard holds both under these names,
and the entry has no "labels".

Shards are memory-mapped. Opening a folder checks everything but the values: reading all of them
would take as long as an epoch's data, so a NaN is found when its sample is read.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from data.fingerprint import fingerprint
from runtime.errors import DataError
from runtime.progress import Progress

INDEX = "index.json"
DTYPES: dict[str, Any] = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16)}
_SAFETENSORS = {"F32": "float32", "F16": "float16"}
_BLOCK = 1 << 22
"""Number of values that `check_finite` reads at once, which bounds its memory."""
_WRITE = "write the folder again (tools/prepare_latents.py)"


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Samples of one file, memory-mapped, with the shape and dtype of the index."""

    path: Path
    labels: np.ndarray
    """Class of each sample, int64 [samples]."""
    labels_path: Path
    """File of the labels; `path` itself if one file holds both."""
    read: Callable[[slice], np.ndarray]
    """Returns a slice of the file's latents, [rows, *shape]."""


class Latents:
    """Latents and labels of several shards, as one sequence of samples of the same shape."""

    def __init__(self, shards: Sequence[Shard], shape: tuple[int, ...]) -> None:
        self.shards = shards
        self.shape = shape
        self._ends = np.cumsum([len(shard.labels) for shard in shards])
        self.labels = np.concatenate([shard.labels for shard in shards])  # int64 [samples]

    def __len__(self) -> int:
        return len(self.labels)

    def locate(self, row: int) -> tuple[Shard, int]:
        """Return the shard that holds a sample, and the sample's row in it."""
        number = int(np.searchsorted(self._ends, row, side="right"))
        begin = int(self._ends[number - 1]) if number else 0
        return self.shards[number], row - begin

    def latents(self, row: int) -> np.ndarray:
        """Return sample `row`, float32 [*shape]; raise DataError for a NaN or an infinity."""
        shard, row_in_shard = self.locate(row)
        values = shard.read(slice(row_in_shard, row_in_shard + 1))[0].astype(np.float32)
        if not np.isfinite(values).all():
            raise DataError(
                f"{shard.path}: row {row_in_shard} holds a NaN or an infinity; repair or leave out "
                f"the sample and {_WRITE}"
            )
        return values

    def check_labels(self, num_classes: int | None = None) -> None:
        """Raise DataError for the first label that is negative or not below num_classes."""
        bad = self.labels < 0
        problem = "classes begin at 0"
        remedy = "number the classes from 0, and leave out samples without a class"
        # Negative labels are reported first: no num_classes fixes them.
        if num_classes is not None:
            problem = f"num_classes {num_classes} allows 0 to {num_classes - 1}"
            if not bad.any():
                bad = self.labels >= num_classes
                remedy = (
                    f"set num_classes to {int(self.labels.max()) + 1} or more, or repair the labels"
                )
        if not bad.any():
            return
        row = int(np.argmax(bad))
        shard, row_in_shard = self.locate(row)
        raise DataError(
            f"{shard.labels_path}: row {row_in_shard} has label {self.labels[row]}, but {problem}; "
            f"{remedy}"
        )


class LatentFolder(Latents):
    """The samples of a folder, in the order of its shards."""

    def __init__(self, folder: str | Path) -> None:
        """Open the folder and check everything but the values (`check_finite`).

        Raises DataError, naming the file, if the index is missing or broken, a shard is missing,
        broken or different from its entry in the index, or labels are not integers.
        """
        self.folder = Path(folder)
        index = _index(self.folder)
        shape = tuple(index["shape"])
        dtype = index["dtype"]
        shards = [_open(self.folder, entry, shape, dtype) for entry in index["shards"]]
        super().__init__(shards, shape)

    def check_finite(self) -> None:
        """Read all values; raise DataError for a NaN or an infinity.

        Training checks each sample as it reads it.
        """
        rows_at_once = max(1, _BLOCK // math.prod(self.shape))
        with Progress() as progress:
            for number, (begin, end) in enumerate(pairwise([0, *self._ends]), start=1):
                shard = self.shards[number - 1]
                size = int(end - begin)
                for first in range(0, size, rows_at_once):
                    last = min(first + rows_at_once, size)  # safetensors cannot slice past the end
                    if np.isfinite(shard.read(slice(first, last))).all():
                        continue
                    for row in range(first, last):
                        self.latents(begin + row)
                progress(f"{self.folder}: {number} of {len(self.shards)} shards checked")


def latents_fingerprint(folder: str | Path) -> str:
    """Return the fingerprint of a folder's index and the files that it names.

    Raises DataError if the index is missing or broken, or if a file is missing.
    """
    folder = Path(folder)
    paths = []
    for entry in _index(folder)["shards"]:
        for part in ("latents", "labels"):
            if entry.get(part):
                paths.append(folder / entry[part])
    for path in paths:
        if not path.is_file():
            raise _missing(path)
    return fingerprint(folder / INDEX, paths)


def _missing(path: Path) -> DataError:
    return DataError(f"{path} is missing, but {INDEX} names it; {_WRITE}")


def _index(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's index. Raises DataError if it is missing or invalid."""
    path = folder / INDEX
    if not folder.is_dir():
        raise DataError(
            f"data_path is {folder}, which is not a folder; give a folder that "
            "tools/prepare_latents.py wrote"
        )
    if not path.is_file():  # a named pipe would block
        problem = f"has no {INDEX}" if any(folder.iterdir()) else "is empty"
        raise DataError(
            f"{folder} {problem}; give a folder of latents that tools/prepare_latents.py wrote"
        )
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read ({error}); {_WRITE}") from error

    if isinstance(index, dict) and index.get("format") == "clips":
        raise DataError(
            f"{path} is of clips with captions, but only images or clips with labels can be read "
            "here; "
            "python -m tools.prepare_clips --check reads it, and docs/examples/finetune_clip.py "
            "trains on it"
        )
    if not isinstance(index, dict) or index.get("version") != 1:
        raise DataError(f"{path} is not an index of version 1; {_WRITE}")
    shape = index.get("shape")
    is_shape = (
        isinstance(shape, list)
        and len(shape) in (3, 4)
        and all(type(size) is int and size > 0 for size in shape)
    )
    if not is_shape:
        raise DataError(
            f"{path}: shape is {shape}; it must be [channels, (frames,) height, width]; {_WRITE}"
        )
    if index.get("dtype") not in list(DTYPES):  # a dict lookup would fail for a JSON list
        raise DataError(
            f"{path}: dtype is {index.get('dtype')}; it must be {' or '.join(DTYPES)}; {_WRITE}"
        )
    shards = index.get("shards")
    if not isinstance(shards, list) or not shards:
        raise DataError(f"{path} lists no shards, so the folder has no samples; {_WRITE}")
    for entry in shards:
        _check_entry(path, entry)
    return index


def _check_entry(path: Path, entry: Any) -> None:
    """Raise DataError if an entry of the index does not describe a shard."""
    names: list[Any] = [None]
    if isinstance(entry, dict):
        names = [entry.get("latents"), entry.get("labels", "")]
    # Plain names only: an index must not point outside its folder.
    if not all(isinstance(name, str) and name == Path(name).name for name in names):
        raise DataError(
            f"{path}: a shard is {entry}; its latents and labels must be names of files in the "
            "same folder"
        )
    samples = entry.get("samples")
    if type(samples) is not int or samples < 1:
        raise DataError(
            f"{path}: samples of {names[0]} is {samples}; it must be 1 or more; {_WRITE}"
        )


def _open(folder: Path, entry: dict[str, Any], shape: tuple[int, ...], dtype: str) -> Shard:
    """Open a shard. Raises DataError if it cannot be read or differs from its index entry."""
    path = folder / entry["latents"]
    samples = entry["samples"]
    labels_path = path
    read: Callable[[slice], np.ndarray]
    if path.suffix == ".safetensors":
        header, labels, read = _safetensors(path)
    elif path.suffix == ".npy" and entry.get("labels"):
        labels_path = folder / entry["labels"]
        array = _npy(path)
        labels = _npy(labels_path)
        header = (str(array.dtype), array.shape)
        read = array.__getitem__
    else:
        raise DataError(
            f"{folder / INDEX}: {path.name} is neither a .safetensors file nor a .npy file with "
            f"labels; {_WRITE}"
        )

    expected_shape = (samples, *shape)
    if header != (dtype, expected_shape):
        raise DataError(
            f"{path} holds {header[0]} {list(header[1])}, but the index says {dtype} "
            f"{list(expected_shape)}; {_WRITE}"
        )
    if labels.dtype.kind not in "iu" or labels.shape != (samples,):
        raise DataError(
            f"{labels_path} holds labels {labels.dtype} {list(labels.shape)}; "
            f"they must be integers of shape [{samples}]; {_WRITE}"
        )
    too_large = labels > np.iinfo(np.int64).max  # uint64 would wrap around to other labels
    if too_large.any():
        row = int(np.argmax(too_large))
        raise DataError(
            f"{labels_path}: row {row} has label {labels[row]}, but labels must fit into int64; "
            "repair the labels"
        )
    labels = np.asarray(labels, dtype=np.int64)
    return Shard(path=path, labels=labels, labels_path=labels_path, read=read)


def _npy(path: Path) -> np.ndarray:
    with _readable(path):
        with path.open("rb") as file:
            magic = file.read(6)
        if magic != b"\x93NUMPY":
            raise ValueError("not a numpy array")
        return np.load(path, mmap_mode="r", allow_pickle=False)


def _safetensors(
    path: Path,
) -> tuple[tuple[str, tuple[int, ...]], np.ndarray, Callable[[slice], np.ndarray]]:
    """Return the latents' dtype and shape, the labels, and a reader of rows."""
    from safetensors import safe_open

    with _readable(path):
        file = safe_open(path, framework="np")
        missing = {"latents", "labels"} - set(file.keys())
        if missing:
            raise ValueError(f"no tensor {' nor '.join(sorted(missing))}")
        latents = file.get_slice("latents")
        dtype = latents.get_dtype()
        header = (_SAFETENSORS.get(dtype, dtype), tuple(latents.get_shape()))
        return header, file.get_tensor("labels"), latents.__getitem__


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    if not path.is_file():
        raise _missing(path)
    try:
        yield
    except (OSError, EOFError, ValueError, TypeError, OverflowError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read ({error}); {_WRITE}") from error
