"""Settings of a rehearsal, which runs code on meta tensors that stand for another device's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Generic, TypeVar, cast

from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class Setting(Generic[T]):
    """A value that is set only during a rehearsal; otherwise None."""

    def __init__(self) -> None:
        self.value: T | None = None

    @contextmanager
    def set_to(self, value: T | None) -> Iterator[None]:
        """Set the value until the block ends."""
        previous = self.value
        self.value = value
        try:
            yield
        finally:
            self.value = previous


SIMULATED_DEVICE = Setting[str]()
"""Device type that the rehearsal's tensors stand for."""
ALLOCATION_CAUSE = Setting[str]()
"""Cause of the current allocations, if the allocating code states one."""


def device_type_of(x: Tensor) -> str:
    """Return the type of the device that a tensor is on, or stands for in a rehearsal."""
    return SIMULATED_DEVICE.value or x.device.type


def allocates(cause: str) -> Callable[[F], F]:
    """State, for a rehearsal, the cause of the memory that the decorated function allocates."""

    def decorate(function: F) -> F:
        @wraps(function)
        def call(*args: Any) -> Any:
            with ALLOCATION_CAUSE.set_to(cause):
                return function(*args)

        return cast(F, call)

    return decorate


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace a function that has no hook (for example one of torch) until the block ends."""
    inherited = name not in vars(owner)
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
