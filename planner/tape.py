"""What a dry run records of storages and bytes sent; an operator's call is recorded once and replayed for its like."""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary


class Tape(NamedTuple):
    """What a call of an operator did, with storages numbered from its first one."""

    events: list[tuple[int, int]]
    kinds: list[str]
    sizes: list[int]
    sent: "Counter[str]"
    outs: list[tuple[Any, ...]]
    """Of each output: its storage, shape, strides, dtype and device."""
    spec: Any
    held: list[Tensor]
    """What it was called with besides fake tensors, held so that no other has its identity."""


def key_of(func: Any, leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Return what two calls have in common that do the same: fake tensors count by their layout."""
    from torch._subclasses.fake_tensor import FakeTensor

    def one(x: Any) -> Any:
        if isinstance(x, FakeTensor):
            return x.shape, x.stride(), x.dtype
        return id(x) if isinstance(x, Tensor) else (type(x), x)

    return func, *map(one, leaves)


class Tapes(TorchDispatchMode):
    """What happens to storages, in order, and what is sent; an operator's call is kept, to replay it."""

    def __init__(self) -> None:
        super().__init__()
        self.kind, self.sent = "weights", Counter[str]()
        self.events: list[tuple[int, int]] = []
        """(number of a storage, bytes more or less)"""
        self._kinds, self._sizes = list[str](), list[int]()
        self._numbers = WeakIdKeyDictionary()
        self._tapes: dict[Any, Tape] = {}

    def _by_its_code(self, func: Any, code: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an operator's own code, or replay an earlier call with the same layouts, as each layer has.

        A call can be replayed if it leaves nothing but its outputs behind.
        """
        from torch._subclasses.fake_tensor import FakeTensor

        leaves = tree_leaves((args, kwargs))
        key = key_of(func, leaves)
        first, start, sent = len(self._sizes), len(self.events), Counter(self.sent)
        if (tape := self._tapes.get(key)) is not None:
            self._kinds += tape.kinds
            self._sizes += tape.sizes
            self.events += [(first + number, change) for number, change in tape.events]
            self.sent += tape.sent
            outs = [torch.empty_strided(*like, dtype=dtype, device=device) for _, *like, dtype, device in tape.outs]
            for x, (number, *_) in zip(outs, tape.outs, strict=True):
                self._follow(x.untyped_storage(), first + number)
            return tree_unflatten(outs, tape.spec)
        kind, self.kind = self.kind, "attention"
        try:
            with self:
                out = code(*args, **kwargs)
        finally:
            self.kind = kind
        outs, spec = tree_flatten(out)
        alive = [number for number in range(first, len(self._sizes)) if self._sizes[number]]
        numbers = [self._numbers.get(x.untyped_storage(), -1) if isinstance(x, FakeTensor) else -1 for x in outs]
        if sorted(numbers) == alive:
            self._tapes[key] = Tape(
                [(number - first, change) for number, change in self.events[start:] if number >= first],
                self._kinds[first:],
                self._sizes[first:],
                self.sent - sent,
                [(n - first, x.shape, x.stride(), x.dtype, x.device) for n, x in zip(numbers, outs, strict=True)],
                spec,
                [x for x in leaves if isinstance(x, Tensor) and not isinstance(x, FakeTensor)],
            )
        return out

    def _made(self, storage: torch.UntypedStorage, kind: str) -> None:
        number = len(self._sizes)
        self._kinds.append(kind)
        self._sizes.append(0)
        self._set(number, storage.nbytes())
        self._follow(storage, number)

    def _follow(self, storage: torch.UntypedStorage, number: int) -> None:
        self._numbers[storage] = number
        weakref.finalize(storage, partial(self._set, number, 0)).atexit = False

    def _set(self, number: int, size: int) -> None:
        self.events.append((number, size - self._sizes[number]))
        self._sizes[number] = size
