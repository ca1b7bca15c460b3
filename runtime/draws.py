"""Random initial weights: the same numbers whole and in parts, so that a rank draws little more than its shard."""

import hashlib
import math
from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor

Part = tuple[slice, ...]
"""First and last + 1 of each dimension; () is the whole."""
WHOLE = 1 << 20
"""Values of the largest weight that is drawn whole, in about 5 ms."""
TILE = (64, 512)
"""Rows and columns that a larger one is drawn in: as few rows as FSDP leaves a rank of many, columns tp one of 8."""


def initial_weight_slice(
    draw: Callable[[Tensor, torch.Generator], Tensor], name: str, shape: Sequence[int], seed: int, part: Part = ()
) -> Tensor:
    """Return a part (float32, on the CPU) of the random weight ``name``, which is the same whatever part is asked for.

    A weight has a generator of its own. One of more than WHOLE values has one for each tile of its last two
    dimensions, and only the tiles are drawn that the part has a share of.

    Args:
        draw: fills a tensor by a generator, and returns it.
    """
    if math.prod(shape) <= WHOLE:
        return draw(torch.empty(*shape), generator_of(seed, name))[part]
    part = part or tuple(slice(0, length) for length in shape)
    edges = (*[1] * (len(shape) - 2), *TILE)[-len(shape) :]
    found = torch.empty([own.stop - own.start for own in part])
    touched = [range(own.start // edge, -(-own.stop // edge)) for own, edge in zip(part, edges, strict=True)]
    for numbers in product(*touched) if found.numel() else ():
        tile = tuple(
            slice(number * edge, min((number + 1) * edge, length))
            for number, edge, length in zip(numbers, edges, shape, strict=True)
        )
        values = draw(torch.empty([of.stop - of.start for of in tile]), generator_of(seed, f"{name} {numbers}"))
        both = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(part, tile, strict=True))
        found[_within(both, part)] = values[_within(both, tile)]
    return found


def _within(inner: Part, outer: Part) -> Part:
    """Return where ``inner`` lies in a tensor that has ``outer`` alone."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(inner, outer, strict=True))


def generator_of(seed: int, name: str) -> torch.Generator:
    """Return the random generator of one parameter, or of any other name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
