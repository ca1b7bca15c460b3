"""DCP's table of tensors, a pickle that is read without executing code from it.

`torch.distributed.checkpoint` (DCP) unpickles its table, and a pickle can run any program. A
checkpoint may come from elsewhere, and the manifest's checksums only show that it was not damaged
since it was written. So the unpickler here creates only data classes, and the table is checked
against the files of the manifest before DCP sees it.
"""

import pickle
from dataclasses import is_dataclass
from enum import EnumType
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from train.checkpoint.manifest import METADATA, CheckpointError, Manifest, is_count

# DCP also puts these into `.metadata`, besides the dataclasses and enumerations of its metadata
# module; each of them only holds data.
_DATA_CLASSES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


def read_metadata(folder: Path, manifest: Manifest) -> Metadata:
    """Read DCP's table of tensors without executing code that it may contain.

    Raises CheckpointError if the table is unreadable, asks for a class that is not for data, names
    a file outside the manifest, has impossible sizes, or does not say where a tensor is.
    """
    path = folder / METADATA
    if METADATA not in manifest.files:
        raise CheckpointError(
            f"{folder} has no {METADATA} in its manifest; load another checkpoint"
        )
    try:
        with path.open("rb") as file:
            metadata = _DataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{path} is not a table of tensors; load another checkpoint")
        classes = {type(entry) for entry in metadata.state_dict_metadata.values()}
        files = {str(storage.relative_path) for storage in metadata.storage_data.values()}
        located = {index.fqn for index in metadata.storage_data}
        missing = metadata.state_dict_metadata.keys() - located
        possible = _sizes_possible(metadata, manifest)
    except CheckpointError:
        raise
    except Exception as error:
        # A corrupt pickle can raise nearly anything.
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {error}); load another checkpoint"
        ) from error

    if classes - {TensorStorageMetadata}:
        raise CheckpointError(
            f"{path} holds objects besides tensors, which could run code when read; do not trust it"
        )
    strange = files - manifest.files.keys()
    if strange:
        raise CheckpointError(
            f"{path} points at {min(strange)!r}, which is not a file of the checkpoint; do not "
            "trust it"
        )
    if not possible:
        raise CheckpointError(
            f"{path} has tensors larger than its files, or offsets outside of any file; load "
            "another checkpoint"
        )
    if missing:
        raise CheckpointError(
            f"{path} does not say where all of its tensors are stored; load another checkpoint"
        )
    return metadata


def _sizes_possible(metadata: Metadata, manifest: Manifest) -> bool:
    """Return True if offsets and sizes are whole numbers, and no tensor exceeds all files."""
    counts: list[object] = []
    for storage in metadata.storage_data.values():
        counts += [storage.offset, storage.length]

    largest = 0
    for entry in metadata.state_dict_metadata.values():
        if isinstance(entry, TensorStorageMetadata):
            counts += entry.size
            largest = max(largest, entry.size.numel() * entry.properties.dtype.itemsize)

    total = sum(size for size, _ in manifest.files.values())
    return all(map(is_count, counts)) and largest <= total


class _DataUnpickler(pickle.Unpickler):
    """Unpickle only DCP's own tables; see "Restricting Globals" in the documentation of pickle."""

    def find_class(self, module: str, name: str) -> Any:
        if self._is_data_class(module, name):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        raise CheckpointError(
            f"the checkpoint's {METADATA} asks for {module}.{name}, which no checkpoint needs; do "
            "not trust it"
        )

    @staticmethod
    def _is_data_class(module: str, name: str) -> bool:
        if (module, name) in _DATA_CLASSES:
            return True
        if module == "torch":
            return isinstance(vars(torch).get(name), torch.dtype)
        if module != dcp.metadata.__name__:
            return False
        attribute = vars(dcp.metadata).get(name)
        return is_dataclass(attribute) or isinstance(attribute, EnumType)


def _enum_member(enumeration: Any, name: str) -> Any:
    """Return a member of an enumeration, in place of getattr.

    Python 3.11.2 (Debian's) pickles a member as a call of getattr, which must not reach any other
    attribute.
    """
    if not (isinstance(enumeration, EnumType) and name in enumeration.__members__):
        raise CheckpointError(
            f"the checkpoint's {METADATA} asks for {name} of {enumeration}, which no checkpoint "
            "needs; do not trust it"
        )
    return enumeration[name]
