"""Random weights drawn in slices, cached copies on the device, and differentiable operators."""

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, wraps
from itertools import count, product
from typing import Any, Generic, TypeVar, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

M = TypeVar("M", bound=Callable[..., Any])
R = TypeVar("R")
T = TypeVar("T")
Part = tuple[slice, ...]
"""The slice of each dimension of a tensor; () is the whole tensor."""
WHOLE = 1 << 20
"""Maximum number of values of a weight that is drawn at once (about 5 ms)."""
TILE = (64, 512)
"""Rows and columns of a tile, the part of a larger weight that is drawn at once. A tile has about
the rows of one rank in a large FSDP group, and the columns of one of 8 tp ranks.
"""
FORGET: list[Callable[[], None]] = []
"""Functions that empty the caches of `cached_on_device`, so that later calls copy again, as for a
new micro-batch.
"""


def initial_weight_slice(
    draw: Callable[..., Tensor], name: str, shape: Sequence[int], seed: int, part: Part = ()
) -> Tensor:
    """Return slices of the random weight ``name``, float32 on the CPU.

    The values do not depend on the requested slices, so every mesh starts with the same weights.
    Drawing all of a large weight to use one shard would take most of the startup time, so a weight
    of more than WHOLE values has a generator per tile of its last two dimensions, and only the
    tiles that intersect the slices are drawn.

    Args:
        draw: fills a tensor by a ``generator`` and returns it, like ``torch.nn.init``'s functions.
    """
    if math.prod(shape) <= WHOLE:
        return draw(torch.empty(*shape), generator=generator_of(seed, name))[part]

    part = part or tuple(slice(0, length) for length in shape)
    tile_shape = (*[1] * (len(shape) - 2), *TILE)[-len(shape) :]
    values = torch.empty([dim.stop - dim.start for dim in part])
    if not values.numel():
        return values

    tiles_per_dim = []
    for dim, size in zip(part, tile_shape, strict=True):
        tiles_per_dim.append(range(dim.start // size, -(-dim.stop // size)))
    for indices in product(*tiles_per_dim):
        tile = _tile_slices(indices, tile_shape, shape)
        tile_values = draw(
            torch.empty([dim.stop - dim.start for dim in tile]),
            generator=generator_of(seed, f"{name} {indices}"),
        )
        overlap = _intersection(part, tile)
        values[_relative(overlap, part)] = tile_values[_relative(overlap, tile)]
    return values


def _tile_slices(indices: Sequence[int], tile_shape: Sequence[int], shape: Sequence[int]) -> Part:
    """Return the slices of a tile; the last tile of a dimension may be shorter."""
    slices = []
    for index, size, length in zip(indices, tile_shape, shape, strict=True):
        slices.append(slice(index * size, min((index + 1) * size, length)))
    return tuple(slices)


def _intersection(a: Part, b: Part) -> Part:
    slices = []
    for x, y in zip(a, b, strict=True):
        slices.append(slice(max(x.start, y.start), min(x.stop, y.stop)))
    return tuple(slices)


def _relative(inner: Part, outer: Part) -> Part:
    """Return the slices ``inner`` relative to a tensor that holds only the slices ``outer``."""
    slices = []
    for x, y in zip(inner, outer, strict=True):
        slices.append(slice(x.start - y.start, x.stop - y.start))
    return tuple(slices)


def generator_of(seed: int, name: str) -> torch.Generator:
    """Return the random generator for a name, such as that of a parameter."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def title_of_owner(model: torch.nn.Module, name: str) -> str:
    """Return the class that defines a parameter, with its file, for error messages.

    For a parameter of a torch module this is the Longmesh class that contains the module.
    """
    path = name.rpartition(".")[0]
    while path and type(model.get_submodule(path)).__module__.startswith("torch."):
        path = path.rpartition(".")[0]
    owner = type(model.get_submodule(path))
    return f"{owner.__name__} ({owner.__module__.replace('.', '/')}.py)"


def accum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which to sum values of this dtype: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device; on a GPU, ordered only with the current stream."""
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)


@cache
def constants(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a tensor on the device, cached."""
    return torch.tensor(values, dtype=dtype, device=device)


def cached_on_device(maxsize: int) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Cache a function of hashable arguments (the last is the device), separately per CUDA stream.

    The cached tensor is copied to the device in order with one stream; another stream would not
    wait for that copy.
    """

    def decorate(make: Callable[..., R]) -> Callable[..., R]:
        cached = lru_cache(maxsize)(lambda stream, *arguments: make(*arguments))

        @wraps(make)
        def call(*arguments: Any) -> R:
            device = arguments[-1]
            stream = 0
            if device.type == "cuda":
                stream = torch.cuda.current_stream(device).cuda_stream
            return cached(stream, *arguments)

        call.cache_clear = cached.cache_clear  # type: ignore[attr-defined]
        FORGET.append(cached.cache_clear)
        return call

    return decorate


def kept_in_object(method: M) -> M:
    """Cache a method's results in its object, keyed by its hashable positional arguments.

    Unlike ``lru_cache`` the cache ends with the object, and does not keep it alive.
    """
    function: Any = method
    defaults = function.__defaults__ or ()
    num_arguments = function.__code__.co_argcount - 1

    @wraps(method)
    def call(self: Any, *arguments: Any) -> Any:
        cache_of_method = self.__dict__.setdefault(f"_kept_{function.__name__}", {})
        num_missing = num_arguments - len(arguments)
        key = (*arguments, *defaults[len(defaults) - num_missing :])
        if key not in cache_of_method:
            cache_of_method[key] = function(self, *arguments)
        return cache_of_method[key]

    return cast(M, call)


class Handles(Generic[T]):
    """A table of objects keyed by number, for operators that take only numbers and tensors.

    It holds the objects weakly: the caller keeps each one alive as long as it is used.
    """

    def __init__(self) -> None:
        self._numbers = count()
        self._objects: WeakValueDictionary[int, T] = WeakValueDictionary()
        self._tensors: WeakKeyDictionary[T, int] = WeakKeyDictionary()

    def add(self, item: T) -> int:
        """Return a new handle of ``item``, an int, on which torch.compile specialises."""
        handle = next(self._numbers)
        self._objects[handle] = item
        return handle

    def tensor(self, item: T, shape: tuple[int, ...] = ()) -> Tensor:
        """Return a handle of ``item`` as an int64 tensor on the CPU.

        torch.compile does not specialise on the tensor. Equal items share a number, so one stands
        for the others. The tensor keeps the item alive for a backward that saves the tensor.
        """
        number = self._tensors.get(item)
        if number is None:
            number = self.add(item)
            self._tensors[item] = number
        # From numpy, since a rehearsal makes all tensors that torch allocates fake.
        handle = torch.from_numpy(np.full(shape, number, np.int64))
        handle.stands_for = self._objects[number]  # type: ignore[attr-defined]
        return handle

    def __getitem__(self, handle: int | Tensor) -> T:
        """Return the object with this handle. Raises KeyError if it never existed or was freed."""
        return self._objects[int(handle)]

    def __len__(self) -> int:
        """Return the number of live objects."""
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
    """Register an operator ``(*tensors, *others) -> (out, more)`` with a backward.

    The backward is the operator ``name_backward``. Results are made contiguous, and gradients cast
    to the dtypes of their inputs. Differentiable once.

    Args:
        name: namespace and name, such as longmesh::delta_rule.
        tensors: types and names of the differentiable arguments, such as "Tensor q, Tensor? state".
        others: types and names of the other arguments.
        forward: computes the results.
        fake: returns tensors of the results' shapes and dtypes.
        backward: ``(dout, dmore or None, *tensors, *saved results, *others)`` -> the gradient of
            each tensor; the gradient of a tensor that is None is ignored.
        unsaved: types and names of the last arguments, which only the forward takes.
        saves: indices of the results that the backward needs.
        owner: returns, given the others, an object to keep alive until the backward.
    """
    num_tensors = tensors.count(",") + 1
    num_saved_arguments = f"{tensors}, {others}".count(",") + 1
    saved_schema = "".join(f"Tensor saved{index}, " for index in saves)

    def dense(*arguments: Any) -> tuple[Tensor, Tensor]:
        out, second_out = forward(*arguments)
        return out.contiguous(), second_out.contiguous()

    def gradients(dout: Tensor, dmore: Tensor | None, *arguments: Any) -> list[Tensor]:
        results = []
        for dx, x in zip(backward(dout, dmore, *arguments), arguments[:num_tensors], strict=True):
            if x is not None and dx is not None:
                dx = dx.to(x.dtype, memory_format=torch.contiguous_format)
                results.append(dx.contiguous())
        return results

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        # The handle of a plan (among the other arguments) keeps the plan alive.
        ctx.others = inputs[num_tensors:num_saved_arguments]
        ctx.unsaved = len(inputs) - num_saved_arguments
        ctx.owner = owner(*ctx.others)
        ctx.like = {"size": output[0].shape, "dtype": output[0].dtype, "device": output[0].device}
        ctx.save_for_backward(*inputs[:num_tensors], *(output[index] for index in saves))
        ctx.set_materialize_grads(False)

    def differentiate(
        ctx: Any, dout: Tensor | None, dmore: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        dout = torch.zeros(**ctx.like) if dout is None else dout
        saved = ctx.saved_tensors  # read once: a checkpoint returns them only once
        results = iter(reverse(dout, dmore, *saved, *ctx.others))
        gradient_of = [None if x is None else next(results) for x in saved[:num_tensors]]
        return *gradient_of, *[None] * (len(ctx.others) + ctx.unsaved)

    def fake_gradients(_: Tensor, __: Tensor | None, *arguments: Any) -> list[Tensor]:
        return [x.new_empty(x.shape) for x in arguments[:num_tensors] if x is not None]

    operator = torch.library.custom_op(
        name, dense, mutates_args=(), schema=f"({tensors}, {others}{unsaved}) -> (Tensor, Tensor)"
    )
    operator.register_fake(fake)
    operator.register_autograd(differentiate, setup_context=save)
    reverse: Any = torch.library.custom_op(
        f"{name}_backward",
        gradients,
        mutates_args=(),
        schema=f"(Tensor dout, Tensor? dmore, {tensors}, {saved_schema}{others}) -> Tensor[]",
    )
    reverse.register_fake(fake_gradients)
