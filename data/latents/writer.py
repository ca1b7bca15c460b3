"""Write a folder of latents for `data/latents/folder.py`: whole, or nothing of it stays."""

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data.latents.folder import DTYPES, INDEX
from runtime.errors import DataError
from runtime.files import InUseError, owned, reason, replacing, write_text


def write_latents(
    folder: str | Path,
    batches: Iterable[tuple[np.ndarray, np.ndarray]],
    *,
    dtype: str = "float32",
    samples_per_shard: int = 4096,
    kind: Literal["npy", "safetensors"] = "npy",
) -> int:
    """Write batches of latents [n, *shape] and labels [n] as a folder; return the number of samples.

    Shards are filled in order and the index is written last, so a killed write leaves no valid folder. If anything
    raises, `batches` included, nothing stays.

    Raises:
        DataError: the folder has an index, is being written or is not writable, there are no samples, or latents
            differ in shape or are not finite (also after the cast to `dtype`: float16 has a smaller range).
    """
    folder = Path(folder)
    shards: list[dict[str, Any]] = []
    with ExitStack() as held:
        with _writable(folder):
            held.enter_context(owned(folder))
        if (folder / INDEX).exists():
            raise DataError(f"{folder} holds latents already; name another folder, or remove it")
        with _whole_or_gone(folder, shards):
            _write_shards(folder, shards, batches, dtype, samples_per_shard, kind)
    return sum(shard["samples"] for shard in shards)


@contextmanager
def _whole_or_gone(folder: Path, shards: list[dict[str, Any]]) -> Iterator[None]:
    """Remove the shards listed so far if the block raises, KeyboardInterrupt included."""
    try:
        yield
    except BaseException:
        for path in (folder / shard[what] for shard in shards for what in ("latents", "labels") if what in shard):
            with suppress(OSError):
                path.unlink()
        raise


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except InUseError as error:
        raise DataError(f"{error}, or name another folder") from error
    except (OSError, SafetensorError) as error:
        said = reason(error, folder) if isinstance(error, OSError) else error
        raise DataError(f"cannot write to {folder} ({said}); free space or name a folder to write to") from error


def _write_shards(
    folder: Path,
    shards: list[dict[str, Any]],
    batches: Iterable[tuple[np.ndarray, np.ndarray]],
    dtype: str,
    samples_per_shard: int,
    kind: str,
) -> None:
    """Write the shards, append the index entry of each to `shards`, and write the index."""
    shape: tuple[int, ...] | None = None
    for latents, labels in _regrouped(batches, samples_per_shard):
        shape = shape or latents.shape[1:]
        if latents.shape[1:] != shape:
            raise DataError(f"sample {len(shards) * samples_per_shard} on is {latents.shape[1:]}, those before {shape}")
        with np.errstate(over="ignore"):  # an overflow gives an infinity, found below
            # Contiguous: safetensors writes an array's memory as is, whatever its strides.
            latents = np.ascontiguousarray(latents, dtype=DTYPES[dtype])
        if not np.isfinite(latents).all():
            row = len(shards) * samples_per_shard + int(
                np.argmin(np.isfinite(latents.reshape(len(latents), -1)).all(1))
            )
            raise DataError(f"sample {row} holds a NaN or an infinity in {dtype}; leave it out, or use float32")
        with _writable(folder):
            shards.append(_write_shard(folder, len(shards), latents, labels.astype(np.int64), kind))
    if shape is None:
        raise DataError(f"there are no samples to write to {folder}")
    index = {"version": 1, "shape": list(shape), "dtype": dtype, "shards": shards}
    with _writable(folder):
        write_text(folder / INDEX, json.dumps(index, indent=1))


def _write_shard(folder: Path, number: int, latents: np.ndarray, labels: np.ndarray, kind: str) -> dict[str, Any]:
    if kind == "safetensors":
        from safetensors.numpy import save

        names = {"latents": f"latents-{number:05d}.safetensors"}
        with replacing(folder / names["latents"]) as (draft,):
            # Not save_file: it ignores the umask and makes files private.
            draft.write_bytes(save({"latents": latents, "labels": labels}))
    else:
        names = {what: f"{what}-{number:05d}.npy" for what in ("latents", "labels")}
        with replacing(*(folder / name for name in names.values())) as drafts:
            for draft, array in zip(drafts, (latents, labels), strict=True):
                np.save(draft, array)
    return {**names, "samples": len(latents)}


def _regrouped(batches: Iterable[tuple[np.ndarray, np.ndarray]], size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Regroup the samples into batches of `size`."""
    held: list[tuple[np.ndarray, np.ndarray]] = []
    count = 0
    for batch in batches:
        held.append(batch)
        count += len(batch[1])
        while count >= size:
            latents, labels = (np.concatenate(part) for part in zip(*held, strict=True))
            yield latents[:size], labels[:size]
            held, count = [(latents[size:], labels[size:])], count - size
    if count:
        latents, labels = (np.concatenate(part) for part in zip(*held, strict=True))
        yield latents, labels
