"""Tape of an operator's effects, to replay them for calls with the same layouts."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Tape(NamedTuple):
    """Recorded effects of an operator's call; the call's storages are numbered from 0."""

    events: list[tuple[int, int]]
    kinds: list[str]
    sizes: list[int]
    sent: Counter[str]
    outs: list[tuple[Any, ...]]
    """Storage number, shape, strides, dtype and device of each output."""
    spec: Any
    real_tensors: list[Tensor]
    """Arguments that are not fake, kept alive so that no other tensor gets their id."""


def key_of(func: Any, leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Return a call's key: calls with equal keys have equal effects.

    Fake tensors count by their layout, real ones by their identity.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    def leaf_key(leaf: Any) -> Any:
        if isinstance(leaf, FakeTensor):
            return leaf.shape, leaf.stride(), leaf.dtype
        return id(leaf) if isinstance(leaf, Tensor) else (type(leaf), leaf)

    return func, *map(leaf_key, leaves)
