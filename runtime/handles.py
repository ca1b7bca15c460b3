"""Pass objects to custom operators by number, since an operator takes no Python object."""

from itertools import count
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

T = TypeVar("T")


class Handles(Generic[T]):
    """A table of objects by number. It holds them weakly: the caller keeps each object alive as long as it is used."""

    def __init__(self) -> None:
        self._numbers = count()
        self._objects: WeakValueDictionary[int, T] = WeakValueDictionary()
        self._tensors: WeakKeyDictionary[T, int] = WeakKeyDictionary()

    def add(self, thing: T) -> int:
        """Return a new handle of ``thing``, an int, on which torch.compile specialises."""
        handle = next(self._numbers)
        self._objects[handle] = thing
        return handle

    def tensor(self, thing: T, shape: tuple[int, ...] = ()) -> Tensor:
        """Return a handle of ``thing`` that torch.compile does not specialise on: int64 on the CPU.

        Equal things share a number, and stand for each other. The tensor keeps the thing alive, so a backward that
        saves the tensor can still use it.
        """
        number = self._tensors.get(thing)
        if number is None:
            number = self._tensors[thing] = self.add(thing)
        handle = torch.full(shape, number, dtype=torch.int64, device="cpu")
        handle.stands_for = self._objects[number]  # type: ignore[attr-defined]
        return handle

    def __getitem__(self, handle: int | Tensor) -> T:
        """Return the object of a handle.

        Raises:
            KeyError: no object has this handle, or it is no longer alive.
        """
        return self._objects[int(handle)]

    def __len__(self) -> int:
        """Return the number of objects alive."""
        return len(self._objects)
