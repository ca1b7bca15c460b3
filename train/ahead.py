"""Make a step's batches while the step before runs."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Ahead(Iterator[T], Generic[T]):
    """The items of an iterator, each made in a thread while its predecessor is in use.

    The first is made by the caller's thread, which then is the one that starts a loader's processes. An error is raised
    where its item is taken. A context manager, which waits for the thread to end.
    """

    def __init__(self, items: Iterator[T], device: torch.device) -> None:
        """``device`` is the one that items are made on."""
        self._items = items
        start = (torch.cuda.set_device, (device,)) if device.type == "cuda" else ()
        self._thread = ThreadPoolExecutor(1, "ahead", *start)
        self._next: Future[T] | None = None

    def __next__(self) -> T:
        item = next(self._items) if self._next is None else self._next.result()
        self._next = self._thread.submit(next, self._items)
        return item

    def wait(self) -> None:
        """Wait until the next item is made, so that no thread runs while processes are forked."""
        if self._next is not None:
            self._next.exception()

    def __enter__(self) -> "Ahead[T]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown()
