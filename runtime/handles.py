"""Handles: numbers that stand for objects, since a custom operator takes no Python object."""

from itertools import count
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

T = TypeVar("T")


class Handles(Generic[T]):
    """Objects of one kind by number. An object lives no longer for it: whoever needs it later must keep it."""

    def __init__(self) -> None:
        self._numbers = count()
        self._objects: WeakValueDictionary[int, T] = WeakValueDictionary()

    def add(self, thing: T) -> int:
        """A new handle of ``thing``; torch.compile specialises on it, as on any int."""
        handle = next(self._numbers)
        self._objects[handle] = thing
        return handle

    def tensor(self, thing: T) -> Tensor:
        """A new handle of ``thing`` that torch.compile does not specialise on: int64 ``[]`` on the CPU.

        The tensor keeps ``thing`` alive, so that what saves the one for a backward saves the other.
        """
        handle = torch.tensor(self.add(thing), device="cpu")
        handle.stands_for = thing  # type: ignore[attr-defined]
        return handle

    def __getitem__(self, handle: int | Tensor) -> T:
        """The object of a handle.

        Raises:
            KeyError: it is gone, or there never was one.
        """
        return self._objects[int(handle)]

    def __len__(self) -> int:
        """How many are alive."""
        return len(self._objects)
