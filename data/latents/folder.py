"""A folder of precomputed latents: shards of samples and the index.json that names them, read and
written.

index.json: {"version": 1, "shape": [C, H, W] or [C, F, H, W], "dtype": "float32" or "float16",
"shards": [{"latents": file, "labels": file, "samples": N}, ...]}. A .npy shard holds latents [N,
*shape], a second .npy its labels, integers [N]; a .safetensors shard holds both under these names,
and the entry has no "labels".
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data.fingerprint import fingerprint
from runtime.errors import DataError
from runtime.files import Drafts, InUseError, drafting, owned, reason
from runtime.progress import Progress

INDEX = "index.json"
DTYPES: dict[str, Any] = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16)}
_SAFETENSORS = {"F32": "float32", "F16": "float16"}
_BLOCK = 1 << 22
"""Values that are checked at once."""
_WRITE = "write the folder again (tools/prepare_latents.py)"


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Samples of one file, memory-mapped, with the shape and dtype that its index says."""

    path: Path
    labels: np.ndarray
    """int64 [samples]."""
    labels_path: Path
    """`path` itself if one file holds both."""
    read: Callable[[slice], np.ndarray]
    """Read rows of the latents, [rows, *shape]."""


class Latents:
    """The samples of shards, one after the other, all of one shape."""

    def __init__(self, shards: Sequence[Shard], shape: tuple[int, ...]) -> None:
        self.shards, self.shape = shards, shape
        self._ends = np.cumsum([len(shard.labels) for shard in shards])
        self.labels = np.concatenate([shard.labels for shard in shards])  # int64 [samples]

    def __len__(self) -> int:
        return len(self.labels)

    def locate(self, row: int) -> tuple[Shard, int]:
        """Return the shard that holds a sample, and its row there."""
        number = int(np.searchsorted(self._ends, row, side="right"))
        return self.shards[number], row - (int(self._ends[number - 1]) if number else 0)

    def latents(self, row: int) -> np.ndarray:
        """Return sample `row`, float32 [*shape]; raise DataError for a NaN or an infinity."""
        shard, within = self.locate(row)
        found = shard.read(slice(within, within + 1))[0].astype(np.float32)
        if not np.isfinite(found).all():
            raise DataError(
                f"{shard.path}: row {within} holds a NaN or an infinity; repair or leave out the sample and {_WRITE}"
            )
        return found

    def check_labels(self, num_classes: int | None = None) -> None:
        """Raise DataError for the first label that is negative or, given num_classes, not below it."""
        negative = self.labels < 0
        below = bool(negative.any())  # reported first: no num_classes fixes it
        bad = negative if below or num_classes is None else self.labels >= num_classes
        if bad.any():
            row = int(np.argmax(bad))
            shard, within = self.locate(row)
            allowed = "classes begin at 0"
            if num_classes is not None:
                allowed = f"num_classes {num_classes} allows 0 to {num_classes - 1}"
            remedy = (
                f"set num_classes to {int(self.labels.max()) + 1} or more, or repair the labels"
            )
            if below:
                remedy = "number the classes from 0, and leave out samples without one"
            where = f"{shard.labels_path}: row {within}"
            raise DataError(f"{where} has label {self.labels[row]}, and {allowed}; {remedy}")


class LatentFolder(Latents):
    """The samples of a folder, in the order of its shards."""

    def __init__(self, folder: str | Path) -> None:
        """Open the folder and check everything but the values (`check_finite`).

        Raises DataError: a missing or broken index, a shard that is missing, broken or not as the
        index says, or labels that are not integers; names the file.
        """
        self.folder = Path(folder)
        index = _index(self.folder)
        shape = tuple(index["shape"])
        super().__init__(
            [_open(self.folder, entry, shape, index["dtype"]) for entry in index["shards"]], shape
        )

    def check_finite(self) -> None:
        """Read all values; raise DataError for a NaN or an infinity. Training checks each sample as
        it reads it.
        """
        rows = max(1, _BLOCK // math.prod(self.shape))
        with Progress() as progress:
            for number, (begin, end) in enumerate(pairwise([0, *self._ends]), start=1):
                for first in range(0, end - begin, rows):
                    block = range(
                        first, min(first + rows, end - begin)
                    )  # safetensors reads none past the end
                    if not np.isfinite(
                        self.shards[number - 1].read(slice(block.start, block.stop))
                    ).all():
                        for row in block:
                            self.latents(begin + row)
                progress(f"{self.folder}: {number} of {len(self.shards)} shards checked")


def _missing(path: Path) -> DataError:
    return DataError(f"{path} is missing, and {INDEX} names it; {_WRITE}")


def latents_fingerprint(folder: str | Path) -> str:
    """Fingerprint a folder's index and the files that it names. Raises DataError as `LatentFolder`
    does.
    """
    entries = _index(Path(folder))["shards"]
    names = [entry[part] for entry in entries for part in ("latents", "labels") if entry.get(part)]
    for path in (path for name in names if not (path := Path(folder) / name).is_file()):
        raise _missing(path)
    return fingerprint(Path(folder) / INDEX, [Path(folder) / name for name in names])


def _index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    if not folder.is_dir():
        raise DataError(
            f"data_path is {folder}, which is no folder; name one that tools/prepare_latents.py wrote"
        )
    if not path.is_file():  # a named pipe would be waited for
        what = f"holds no {INDEX}" if any(folder.iterdir()) else "is empty"
        raise DataError(
            f"{folder} {what}; name a folder of latents that tools/prepare_latents.py wrote"
        )
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read ({error}); {_WRITE}") from error
    if not isinstance(index, dict) or index.get("version") != 1:
        raise DataError(f"{path} is not an index of version 1; {_WRITE}")
    shape, shards = index.get("shape"), index.get("shards")
    if (
        not isinstance(shape, list)
        or len(shape) not in (3, 4)
        or not all(type(n) is int and n > 0 for n in shape)
    ):
        raise DataError(
            f"{path}: shape is {shape}; it must be [channels, (frames,) height, width]; {_WRITE}"
        )
    if index.get("dtype") not in list(DTYPES):  # not in the dict: JSON lists are unhashable
        raise DataError(
            f"{path}: dtype is {index.get('dtype')}; it must be {' or '.join(DTYPES)}; {_WRITE}"
        )
    if not isinstance(shards, list) or not shards:
        raise DataError(f"{path} names no shards, so the folder is empty; {_WRITE}")
    for entry in shards:
        names = (
            [entry.get("latents"), entry.get("labels", "")] if isinstance(entry, dict) else [None]
        )
        # Plain names only: an index must not point outside its folder.
        if not all(isinstance(name, str) and name == Path(name).name for name in names):
            raise DataError(
                f"{path}: a shard is {entry}; it must name files of the folder as latents and labels"
            )
        if type(entry.get("samples")) is not int or entry["samples"] < 1:
            raise DataError(
                f"{path}: {names[0]} has samples {entry.get('samples')}; it must be 1 or more; {_WRITE}"
            )
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
        raise DataError(
            f"{folder / INDEX}: {path.name} is no .safetensors, nor a .npy with labels; {_WRITE}"
        )
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
        raise DataError(
            f"{labels_path}: row {row} has label {labels[row]}, which is no int64; repair the labels"
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


def write_latents(
    folder: str | Path,
    batches: Iterable[tuple[np.ndarray, np.ndarray]],
    *,
    dtype: str = "float32",
    samples_per_shard: int = 4096,
    kind: Literal["npy", "safetensors"] = "npy",
) -> int:
    """Write batches of latents [n, *shape] and labels [n] as a folder; return the number of
    samples.

    Shards are filled in order; they appear at the end, the index last, so a killed write leaves no
    valid folder. If anything raises, `batches` included, nothing stays. Raises DataError: the
    folder has an index, is being written or is not writable, there are no samples, or latents
    differ in shape or are not finite (also after the cast to `dtype`: float16 has a smaller range).
    """
    folder = Path(folder)
    shards: list[dict[str, Any]] = []
    shape: tuple[int, ...] | None = None
    with ExitStack() as held:
        with _writable(folder):
            held.enter_context(owned(folder))
        if (folder / INDEX).exists():
            raise DataError(f"{folder} holds latents already; name another folder, or remove it")
        drafts_of = held.enter_context(drafting())
        for latents, labels in _regrouped(batches, samples_per_shard):
            first, shape = len(shards) * samples_per_shard, shape or latents.shape[1:]
            if latents.shape[1:] != shape:
                raise DataError(f"sample {first} on is {latents.shape[1:]}, those before {shape}")
            with np.errstate(over="ignore"):  # an overflow gives an infinity, found below
                # Contiguous: safetensors writes an array's memory as is, whatever its strides.
                latents = np.ascontiguousarray(latents, dtype=DTYPES[dtype])
            finite = np.isfinite(latents.reshape(len(latents), -1)).all(1)
            if not finite.all():
                row = first + int(np.argmin(finite))
                raise DataError(
                    f"sample {row} holds a NaN or an infinity in {dtype}; leave it out, or use float32"
                )
            with _writable(folder):
                names = _write_shard(drafts_of, folder, len(shards), latents, labels, kind)
            shards.append({**names, "samples": len(latents)})
        if shape is None:
            raise DataError(f"there are no samples to write to {folder}")
        with _writable(folder):
            content = {"version": 1, "shape": list(shape), "dtype": dtype, "shards": shards}
            drafts_of(folder / INDEX)[0].write_text(json.dumps(content, indent=1), encoding="utf-8")
            held.close()
    return sum(shard["samples"] for shard in shards)


def _write_shard(
    drafts_of: Drafts, folder: Path, number: int, latents: np.ndarray, labels: np.ndarray, kind: str
) -> dict[str, str]:
    """Write the drafts of a shard's files; return their names by what they hold, as an index has
    them.
    """
    arrays = {"latents": latents, "labels": labels.astype(np.int64)}
    names = {what: f"{what}-{number:05d}.npy" for what in arrays}
    if kind == "safetensors":
        names = {"latents": f"latents-{number:05d}.safetensors"}
    paths = drafts_of(*(folder / name for name in names.values()))
    if kind == "safetensors":
        from safetensors.numpy import save

        paths[0].write_bytes(
            save(arrays)
        )  # not save_file: it ignores the umask and makes files private
    else:
        for path, array in zip(paths, arrays.values(), strict=True):
            np.save(path, array)
    return names


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except InUseError as error:
        raise DataError(f"{error}, or name another folder") from error
    except (OSError, SafetensorError) as error:
        said = reason(error, folder) if isinstance(error, OSError) else error
        raise DataError(
            f"cannot write to {folder} ({said}); free space or name a folder to write to"
        ) from error


def _regrouped(
    batches: Iterable[tuple[np.ndarray, np.ndarray]], size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    held: list[tuple[np.ndarray, np.ndarray]] = []
    for batch in chain(batches, [None]):  # None at the end: then the last, smaller one too
        held += [] if batch is None else [batch]
        while (count := sum(len(labels) for _, labels in held)) >= size or (
            count and batch is None
        ):
            latents, labels = (np.concatenate(part) for part in zip(*held, strict=True))
            yield latents[:size], labels[:size]
            held = [(latents[size:], labels[size:])]
