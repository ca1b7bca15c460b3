"""A folder of precomputed latents: shards of samples and the index.json that names them.

index.json: {"version": 1, "shape": [C, H, W] or [C, F, H, W], "dtype": "float32" or "float16",
"shards": [{"latents": file, "labels": file, "samples": N}, ...]}. A .npy shard holds latents [N, *shape], a second .npy
its labels, integers [N]; a .safetensors shard holds both under these names, and the entry has no "labels".
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.fingerprint import fingerprint
from runtime.errors import DataError
from runtime.progress import Progress

INDEX = "index.json"
DTYPES: dict[str, Any] = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16)}
_SAFETENSORS = {"F32": "float32", "F16": "float16"}
_BLOCK = 1 << 26
_WRITE = "write the folder again (tools/prepare_latents.py)"


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One memory-mapped file of latents, with the shape and dtype that its index says."""

    path: Path
    samples: int
    labels: np.ndarray
    """int64 [samples]."""
    labels_path: Path
    """`path` itself if one file holds both."""
    read: Callable[[slice], np.ndarray]
    """Read rows of the latents, [rows, *shape]."""

    def check_finite(self) -> None:
        """Read everything; raise DataError for the first row with a NaN or an infinity."""
        rows = max(1, _BLOCK // max(1, self.path.stat().st_size // max(1, self.samples)))
        for begin in range(0, self.samples, rows):
            # numpy clips a slice past the end, safetensors raises.
            block = self.read(slice(begin, min(begin + rows, self.samples)))
            good = np.isfinite(block).reshape(len(block), -1).all(axis=1)
            if not good.all():
                raise not_finite(self.path, begin + int(np.argmin(good)))


def not_finite(path: Path, row: int) -> DataError:
    """Return the DataError for a sample with a NaN or an infinity."""
    return DataError(f"{path}: row {row} holds a NaN or an infinity; repair or leave out the sample and {_WRITE}")


def check_labels(labels: np.ndarray, where: Callable[[int], tuple[Path, int]], num_classes: int | None = None) -> None:
    """Raise DataError for the first label that is negative or, given num_classes, not below it.

    Args:
        labels: int64 [samples].
        where: returns the file and row of a sample's label.
    """
    negative = labels < 0
    below = bool(negative.any())  # reported first: no num_classes fixes it
    bad = negative if below or num_classes is None else labels >= num_classes
    if bad.any():
        row = int(np.argmax(bad))
        file, within = where(row)
        allowed = "classes begin at 0"
        if num_classes is not None:
            allowed = f"num_classes {num_classes} allows 0 to {num_classes - 1}"
        remedy = f"set num_classes to {int(labels.max()) + 1} or more, or repair the labels"
        if below:
            remedy = "number the classes from 0, and leave out samples without one"
        raise DataError(f"{file}: row {within} has label {labels[row]}, and {allowed}; {remedy}")


def locate(ends: np.ndarray, row: int) -> tuple[int, int]:
    """Return the part that holds a row, and its row there; ``ends``, int64 [parts], cumulates the parts' sizes."""
    number = int(np.searchsorted(ends, row, side="right"))
    return number, row - (int(ends[number - 1]) if number else 0)


class LatentFolder:
    """The samples of a folder, in the order of its shards."""

    def __init__(self, folder: str | Path) -> None:
        """Open the folder and check everything but the values (`check_finite`).

        Raises:
            DataError: a missing or broken index, a shard that is missing, broken or not as the index says, or labels
                that are not integers; names the file.
        """
        self.folder = Path(folder)
        index = _index(self.folder)
        self.shape: tuple[int, ...] = tuple(index["shape"])
        self.shards = [_open(self.folder, entry, self.shape, index["dtype"]) for entry in index["shards"]]
        self._ends = np.cumsum([shard.samples for shard in self.shards])
        self.labels = np.concatenate([shard.labels for shard in self.shards])  # int64 [samples]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def where_label(self, row: int) -> tuple[Path, int]:
        """Return the file that holds the label of sample `row`, and its row there."""
        shard, within = self._locate(row)
        return shard.labels_path, within

    def latents(self, row: int) -> np.ndarray:
        """Return sample `row`, float32 [*shape]; raise DataError for a NaN or an infinity."""
        shard, within = self._locate(row)
        found = shard.read(slice(within, within + 1))[0].astype(np.float32)
        if not np.isfinite(found).all():
            raise not_finite(shard.path, within)
        return found

    def _locate(self, row: int) -> tuple[Shard, int]:
        number, within = locate(self._ends, row)
        return self.shards[number], within

    def check_finite(self) -> None:
        """Read all values; raise DataError as `Shard` does. Training checks each sample as it reads it."""
        with Progress() as progress:
            for number, shard in enumerate(self.shards, start=1):
                shard.check_finite()
                progress(f"{self.folder}: {number} of {len(self.shards)} shards checked")


def _missing(path: Path) -> DataError:
    return DataError(f"{path} is missing, and {INDEX} names it; {_WRITE}")


def latents_fingerprint(folder: str | Path) -> str:
    """Fingerprint a folder's index and the files that it names. Raises DataError as `LatentFolder` does."""
    entries = _index(Path(folder))["shards"]
    names = [entry[part] for entry in entries for part in ("latents", "labels") if entry.get(part)]
    for path in (path for name in names if not (path := Path(folder) / name).is_file()):
        raise _missing(path)
    return fingerprint(Path(folder) / INDEX, [Path(folder) / name for name in names])


def _index(folder: Path) -> dict[str, Any]:
    """Read the index and check its form."""
    path = folder / INDEX
    if not folder.is_dir():
        raise DataError(f"data_path is {folder}, which is no folder; name one that tools/prepare_latents.py wrote")
    if not path.is_file():  # a named pipe would be waited for
        what = f"holds no {INDEX}" if any(folder.iterdir()) else "is empty"
        raise DataError(f"{folder} {what}; name a folder of latents that tools/prepare_latents.py wrote")
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read ({error}); {_WRITE}") from error
    if not isinstance(index, dict) or index.get("version") != 1:
        raise DataError(f"{path} is not an index of version 1; {_WRITE}")
    shape, shards = index.get("shape"), index.get("shards")
    if not isinstance(shape, list) or len(shape) not in (3, 4) or not all(type(n) is int and n > 0 for n in shape):
        raise DataError(f"{path}: shape is {shape}; it must be [channels, (frames,) height, width]; {_WRITE}")
    if index.get("dtype") not in list(DTYPES):  # not in the dict: JSON lists are unhashable
        raise DataError(f"{path}: dtype is {index.get('dtype')}; it must be {' or '.join(DTYPES)}; {_WRITE}")
    if not isinstance(shards, list) or not shards:
        raise DataError(f"{path} names no shards, so the folder is empty; {_WRITE}")
    for entry in shards:
        names = [entry.get("latents"), entry.get("labels", "")] if isinstance(entry, dict) else [None]
        # Plain names only: an index must not point outside its folder.
        if not all(isinstance(name, str) and name == Path(name).name for name in names):
            raise DataError(f"{path}: a shard is {entry}; it must name files of the folder as latents and labels")
        if type(entry.get("samples")) is not int or entry["samples"] < 1:
            raise DataError(f"{path}: {names[0]} has samples {entry.get('samples')}; it must be 1 or more; {_WRITE}")
    return index


def _open(folder: Path, entry: dict[str, Any], shape: tuple[int, ...], dtype: str) -> Shard:
    path, samples = folder / entry["latents"], entry["samples"]
    if path.suffix == ".safetensors":
        found, labels, read = _safetensors(path)
        labels_path = path
    elif path.suffix == ".npy" and entry.get("labels"):
        labels_path = folder / entry["labels"]
        array, labels = _npy(path), _npy(labels_path)
        found, read = (str(array.dtype), array.shape), array.__getitem__
    else:
        raise DataError(f"{folder / INDEX}: {path.name} is no .safetensors, nor a .npy with labels; {_WRITE}")
    wanted = (dtype, (samples, *shape))
    if found != wanted:
        raise DataError(
            f"{path} holds {found[0]} {list(found[1])}, and its index says {dtype} {list(wanted[1])}; {_WRITE}"
        )
    if labels.dtype.kind not in "iu" or labels.shape != (samples,):
        raise DataError(
            f"{labels_path} holds labels {labels.dtype} {list(labels.shape)}; they must be integers [{samples}]; "
            f"{_WRITE}"
        )
    over = labels > np.iinfo(np.int64).max  # uint64 would wrap around to other labels
    if over.any():
        row = int(np.argmax(over))
        raise DataError(f"{labels_path}: row {row} has label {labels[row]}, which is no int64; repair the labels")
    labels = np.asarray(labels, dtype=np.int64)
    return Shard(path=path, samples=samples, labels=labels, labels_path=labels_path, read=read)


def _npy(path: Path) -> np.ndarray:
    with _readable(path):
        with path.open("rb") as file:
            magic = file.read(6)
        if magic != b"\x93NUMPY":
            raise ValueError("not a numpy array")
        return np.load(path, mmap_mode="r", allow_pickle=False)


def _safetensors(path: Path) -> tuple[tuple[str, tuple[int, ...]], np.ndarray, Callable[[slice], np.ndarray]]:
    """Return the latents' dtype and shape, the labels, and a reader of rows."""
    from safetensors import safe_open

    with _readable(path):
        opened = safe_open(path, framework="np")
        missing = {"latents", "labels"} - set(opened.keys())
        if missing:
            raise ValueError(f"no tensor {' nor '.join(sorted(missing))}")
        latents = opened.get_slice("latents")
        dtype = latents.get_dtype()
        return (
            (_SAFETENSORS.get(dtype, dtype), tuple(latents.get_shape())),
            opened.get_tensor("labels"),
            latents.__getitem__,
        )


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    if not path.is_file():
        raise _missing(path)
    try:
        yield
    except (OSError, EOFError, ValueError, TypeError, OverflowError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read ({error}); {_WRITE}") from error
