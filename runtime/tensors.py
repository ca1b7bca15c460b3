"""Tensors that the host makes: random weights in parts, cached copies on the device; and operators
of our own.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, wraps
from itertools import count, product
from typing import Any, Generic, TypeVar, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

M = TypeVar("M", bound=Callable[..., Any])
R = TypeVar("R")
T = TypeVar("T")
Part = tuple[slice, ...]
"""First and last + 1 of each dimension; () is the whole."""
WHOLE = 1 << 20
"""Values of the largest weight that is drawn whole, in about 5 ms."""
TILE = (64, 512)
"""Rows and columns that a larger one is drawn in: as few rows as FSDP leaves a rank of many,
columns tp one of 8.
"""
FORGET: list[Callable[[], None]] = []
"""Let go of what each function of `cached_on_device` keeps: the next call copies, as for another
micro-batch.
"""


def initial_weight_slice(
    draw: Callable[..., Tensor], name: str, shape: Sequence[int], seed: int, part: Part = ()
) -> Tensor:
    """Return a part (float32, on the CPU) of the random weight ``name``, which is the same whatever
    part is asked for.

    A weight has a generator of its own. One of more than WHOLE values has one for each tile of its
    last two dimensions, and only the tiles are drawn that the part has a share of. ``draw`` fills a
    tensor by a ``generator``, and returns it, as the functions of ``torch.nn.init`` do.
    """
    if math.prod(shape) <= WHOLE:
        return draw(torch.empty(*shape), generator=generator_of(seed, name))[part]
    part = part or tuple(slice(0, length) for length in shape)
    edges = (*[1] * (len(shape) - 2), *TILE)[-len(shape) :]
    found = torch.empty([own.stop - own.start for own in part])
    touched = [
        range(own.start // edge, -(-own.stop // edge))
        for own, edge in zip(part, edges, strict=True)
    ]
    for numbers in product(*touched) if found.numel() else ():
        tile = tuple(
            slice(number * edge, min((number + 1) * edge, length))
            for number, edge, length in zip(numbers, edges, shape, strict=True)
        )
        values = draw(
            torch.empty([of.stop - of.start for of in tile]),
            generator=generator_of(seed, f"{name} {numbers}"),
        )
        both = tuple(
            slice(max(a.start, b.start), min(a.stop, b.stop))
            for a, b in zip(part, tile, strict=True)
        )
        found[_within(both, part)] = values[_within(both, tile)]
    return found


def _within(inner: Part, outer: Part) -> Part:
    """Return where ``inner`` lies in a tensor that has ``outer`` alone."""
    return tuple(
        slice(a.start - b.start, a.stop - b.start) for a, b in zip(inner, outer, strict=True)
    )


def generator_of(seed: int, name: str) -> torch.Generator:
    """Return the random generator of one parameter, or of any other name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def title_of_owner(model: torch.nn.Module, name: str) -> str:
    """Return the class that states a parameter, and its file.

    A module of torch states nothing: the class around it does.
    """
    path = name.rpartition(".")[0]
    while path and type(model.get_submodule(path)).__module__.startswith("torch."):
        path = path.rpartition(".")[0]
    owner = type(model.get_submodule(path))
    return f"{owner.__name__} ({owner.__module__.replace('.', '/')}.py)"


def accum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of this one are summed: float32, or float64 of float64."""
    return torch.promote_types(dtype, torch.float32)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host; on a GPU in order with the current stream alone."""
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)


@cache
def constants(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return these numbers as a tensor, which is kept."""
    return torch.tensor(values, dtype=dtype, device=device)


def cached_on_device(maxsize: int) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Keep what a function of hashable arguments returns, the device last: for each stream apart,
    as another one would not wait for the copy."""

    def decorate(make: Callable[..., R]) -> Callable[..., R]:
        cached = lru_cache(maxsize)(lambda stream, *arguments: make(*arguments))

        @wraps(make)
        def found(*arguments: Any) -> R:
            device = arguments[-1]
            stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
            return cached(stream, *arguments)

        found.cache_clear = cached.cache_clear  # type: ignore[attr-defined]
        FORGET.append(cached.cache_clear)
        return found

    return decorate


def kept_in_object(method: M) -> M:
    """Keep in the object what its method returns for these arguments, hashable ones by position."""
    function: Any = method
    defaults, most = function.__defaults__ or (), function.__code__.co_argcount - 1

    @wraps(method)
    def found(self: Any, *arguments: Any) -> Any:
        kept = self.__dict__.setdefault(f"_kept_{function.__name__}", {})
        whole = (*arguments, *defaults[len(defaults) - most + len(arguments) :])
        if whole not in kept:
            kept[whole] = function(self, *arguments)
        return kept[whole]

    return cast(M, found)


class Handles(Generic[T]):
    """A table of objects by number. It holds them weakly: the caller keeps each object alive as
    long as it is used.
    """

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

        Equal things share a number, and stand for each other. The tensor keeps the thing alive, so
        a backward that saves the tensor can still use it.
        """
        number = self._tensors.get(thing)
        if number is None:
            number = self._tensors[thing] = self.add(thing)
        handle = torch.full(shape, number, dtype=torch.int64, device="cpu")
        handle.stands_for = self._objects[number]  # type: ignore[attr-defined]
        return handle

    def __getitem__(self, handle: int | Tensor) -> T:
        """Return the object of a handle. Raises KeyError: no object has this handle, or it is no
        longer alive.
        """
        return self._objects[int(handle)]

    def __len__(self) -> int:
        """Return the number of objects alive."""
        return len(self._objects)


def differentiable(
    name: str,
    tensors: str,
    others: str,
    forward: Callable[..., tuple[Tensor, Tensor]],
    fake: Callable[..., tuple[Tensor, Tensor]],
    backward: Callable[..., Sequence[Tensor | None]],
    *,
    unsaved: str = "",
    saves: Sequence[int] = (),
    owner: Callable[..., object] = lambda *others: None,
) -> None:
    """Register an operator ``(*tensors, *others) -> (out, more)``, and its backward as the operator
    ``name_backward``.

    Results are made dense, and gradients cast to the dtypes of their inputs. Differentiable once.

    Args:
        name: namespace and name, such as longmesh::delta_rule.
        tensors: types and names of those that have gradients, such as "Tensor q, Tensor? state".
        others: those of the other arguments; ``unsaved``: of the last ones, which the forward alone
            takes.
        forward: computes the results; ``fake`` returns tensors like them.
        backward: ``(dout, dmore or None, *tensors, *saved results, *others)`` -> the gradient of
            each tensor, whatever that of one that is None.
        saves: which of the two results the backward needs.
        owner: returns, given the others, an object to keep alive until the backward.
    """
    count, end = tensors.count(",") + 1, f"{tensors}, {others}".count(",") + 1
    saved = "".join(f"Tensor saved{index}, " for index in saves)

    def dense(*given: Any) -> tuple[Tensor, Tensor]:
        out, more = forward(*given)
        return out.contiguous(), more.contiguous()

    def gradients(dout: Tensor, dmore: Tensor | None, *given: Any) -> list[Tensor]:
        found = zip(backward(dout, dmore, *given), given[:count], strict=True)
        there = [(dx, x) for dx, x in found if x is not None and dx is not None]
        return [
            dx.to(x.dtype, memory_format=torch.contiguous_format).contiguous() for dx, x in there
        ]

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.others = inputs[count:end]  # the handle of a plan among them keeps the plan alive
        ctx.unsaved = len(inputs) - end
        ctx.owner = owner(*ctx.others)
        ctx.like = {"size": output[0].shape, "dtype": output[0].dtype, "device": output[0].device}
        ctx.save_for_backward(*inputs[:count], *(output[index] for index in saves))
        ctx.set_materialize_grads(False)

    def differentiate(
        ctx: Any, dout: Tensor | None, dmore: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        dout = torch.zeros(**ctx.like) if dout is None else dout
        kept = ctx.saved_tensors  # asked for once: a checkpoint gives them once
        found = iter(reverse(dout, dmore, *kept, *ctx.others))
        into = [None if x is None else next(found) for x in kept[:count]]
        return *into, *[None] * (len(ctx.others) + ctx.unsaved)

    operator = torch.library.custom_op(
        name, dense, mutates_args=(), schema=f"({tensors}, {others}{unsaved}) -> (Tensor, Tensor)"
    )
    operator.register_fake(fake)
    operator.register_autograd(differentiate, setup_context=save)
    reverse: Any = torch.library.custom_op(
        f"{name}_backward",
        gradients,
        mutates_args=(),
        schema=f"(Tensor dout, Tensor? dmore, {tensors}, {saved}{others}) -> Tensor[]",
    )
    reverse.register_fake(
        lambda _, __, *given: [x.new_empty(x.shape) for x in given[:count] if x is not None]
    )
