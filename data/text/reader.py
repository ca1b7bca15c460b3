"""Read the tokens of a `.bin`, and detect if the file is truncated during a run."""

import os

import numpy as np

from data.text.indexed import REWRITE
from runtime.errors import DataError


class TokenReader:
    """Reader of a `.bin` that replaces megatron.core's reader and detects changed files.

    If a file is truncated while a run reads it, a memory map kills the process by SIGBUS, and
    megatron.core's other reader returns stale memory. Here it is an error that names the file.
    """

    def __init__(self, prefix: str) -> None:
        self._paths = (f"{prefix}.bin", f"{prefix}.idx")
        self._files = [open(path, "rb", buffering=0) for path in self._paths]  # noqa: SIM115
        self._sizes = [os.fstat(file.fileno()).st_size for file in self._files]

    def check(self) -> None:
        """Raise DataError if a file's size has changed since the start."""
        for path, file, size in zip(self._paths, self._files, self._sizes, strict=True):
            new_size = os.fstat(file.fileno()).st_size
            if new_size != size:
                raise self._changed(path, size, new_size)

    def read(self, dtype: type[np.number], count: int, offset: int) -> np.ndarray:
        """Read `count` token ids from byte `offset`, as megatron.core's _BinReader does."""
        size = count * np.dtype(dtype).itemsize
        content = os.pread(self._files[0].fileno(), size, offset)
        if len(content) < size:
            self.check()
            raise self._changed(self._paths[0], offset + size, offset + len(content))
        return np.frombuffer(content, dtype=dtype)

    def _changed(self, path: str, size: int, new_size: int) -> DataError:
        return DataError(
            f"{path} has {new_size} bytes, but had {size}: it was changed while being read; "
            f"{REWRITE}"
        )
