"""Write batches of latents as a folder of shards with an index."""

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data.latents.folder import DTYPES, INDEX
from runtime.errors import DataError
from runtime.files import Drafts, InUseError, drafting, owned, reason

Batch = tuple[np.ndarray, np.ndarray]
"""Latents [n, *shape] and labels [n]."""


def write_latents(
    folder: str | Path,
    batches: Iterable[Batch],
    *,
    dtype: str = "float32",
    samples_per_shard: int = 4096,
    kind: Literal["npy", "safetensors"] = "npy",
) -> int:
    """Write batches of latents [n, *shape] and labels [n] as a folder; return the sample count.

    Shards are filled in order; they appear at the end, the index last, so a killed write leaves no
    valid folder. If anything raises, `batches` included, no file is left. Raises DataError if the
    folder has an index, is being written or is not writable, if there are no samples, or if latents
    differ in shape or are not finite (also after the cast to `dtype`: float16 has a smaller range).
    """
    folder = Path(folder)
    shards: list[dict[str, Any]] = []
    shape: tuple[int, ...] | None = None
    samples = 0
    with ExitStack() as stack:
        with writable(folder):
            stack.enter_context(owned(folder))
        if (folder / INDEX).exists():
            raise DataError(
                f"{folder} already holds latents; give another folder, or remove this one"
            )
        drafts_of = stack.enter_context(drafting())
        for latents, labels in _regrouped(batches, samples_per_shard):
            shape = shape or latents.shape[1:]
            if latents.shape[1:] != shape:
                raise DataError(
                    f"samples from {samples} on have shape {latents.shape[1:]}, but earlier "
                    f"samples have {shape}; write latents of one shape"
                )
            latents = _cast(latents, dtype, first=samples)
            with writable(folder):
                names = _write_shard(drafts_of, folder, len(shards), latents, labels, kind)
            shards.append({**names, "samples": len(latents)})
            samples += len(latents)
        if shape is None:
            raise DataError(f"there are no samples to write to {folder}; check the input")
        with writable(folder):
            content = {"version": 1, "shape": list(shape), "dtype": dtype, "shards": shards}
            draft = drafts_of(folder / INDEX)[0]
            draft.write_text(json.dumps(content, indent=1), encoding="utf-8")
            stack.close()
    return samples


def _cast(latents: np.ndarray, dtype: str, first: int) -> np.ndarray:
    """Cast latents to a dtype, in contiguous memory.

    Raises DataError for a NaN or an infinity; `first` is the first sample's number, for messages.
    """
    with np.errstate(over="ignore"):  # an overflow gives an infinity, reported below
        # Contiguous: safetensors writes an array's memory as is, whatever its strides.
        latents = np.ascontiguousarray(latents, dtype=DTYPES[dtype])
    finite = np.isfinite(latents.reshape(len(latents), -1)).all(1)
    if not finite.all():
        row = first + int(np.argmin(finite))
        raise DataError(
            f"sample {row} holds a NaN or an infinity in {dtype}; leave out the sample, or use "
            "float32"
        )
    return latents


def _write_shard(
    drafts_of: Drafts, folder: Path, number: int, latents: np.ndarray, labels: np.ndarray, kind: str
) -> dict[str, str]:
    """Write the drafts of a shard's files; return their names, as an entry of the index."""
    arrays = {"latents": latents, "labels": labels.astype(np.int64)}
    if kind == "safetensors":
        from safetensors.numpy import save

        name = f"latents-{number:05d}.safetensors"
        # Not save_file: it ignores the umask and makes files private.
        drafts_of(folder / name)[0].write_bytes(save(arrays))
        return {"latents": name}

    names = {key: f"{key}-{number:05d}.npy" for key in arrays}
    paths = drafts_of(*(folder / name for name in names.values()))
    for path, array in zip(paths, arrays.values(), strict=True):
        np.save(path, array)
    return names


@contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Turn errors during writing into a DataError that names the folder."""
    from safetensors import SafetensorError

    try:
        yield
    except InUseError as error:
        raise DataError(f"{error}, or name another folder") from error
    except (OSError, SafetensorError) as error:
        message = reason(error, folder) if isinstance(error, OSError) else error
        raise DataError(
            f"cannot write to {folder} ({message}); free space or give another folder"
        ) from error


def _regrouped(batches: Iterable[Batch], size: int) -> Iterator[Batch]:
    """Yield the same samples in batches of `size`; the last may be smaller."""
    pending: list[Batch] = []
    for batch in batches:
        pending.append(batch)
        while sum(len(labels) for _, labels in pending) >= size:
            latents, labels = _concatenated(pending)
            yield latents[:size], labels[:size]
            pending = [(latents[size:], labels[size:])]
    if any(len(labels) for _, labels in pending):
        yield _concatenated(pending)


def _concatenated(batches: list[Batch]) -> Batch:
    latents = np.concatenate([latents for latents, _ in batches])
    return latents, np.concatenate([labels for _, labels in batches])
