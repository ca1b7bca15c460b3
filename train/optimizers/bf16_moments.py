"""Moments in bfloat16, rounded stochastically.

bfloat16 has 8 bits of precision, so rounding to nearest loses every change below 1/512 of a moment.
With beta2 0.95 the second moment changes by (1 - beta2) (g^2 - v), and with beta2 0.999 by at most
1/1000 of it as long as g^2 < 2 v: the moment would stay where it is. Stochastic rounding goes up or
down with probabilities that make the expected value exact, so that small changes add up.

The random bits are a function of the run's seed, the step, the parameter's name and the element's
position in the whole parameter. They do not depend on the mesh: with equal gradients, moments are
the same to the bit on any number of ranks, and copies of a weight on several ranks stay equal.
"""

import hashlib

import torch
from torch import Tensor

from parallel.data import local_shard
from train.optimizers.moment_formats import MomentFormat

LOW_32 = 0xFFFFFFFF


class BFloat16(MomentFormat):
    """Moments in bfloat16; 16 random bits are added below its last bit, and cut off."""

    name = "bf16"
    dtype = torch.bfloat16
    random = True
    rounding_bytes = 40

    def unpack(self, stored: tuple[Tensor, ...], moment: str) -> Tensor:
        return stored[0].float()

    def pack(
        self, values: Tensor, stored: tuple[Tensor, ...], moment: str, bits: Tensor | None = None
    ) -> None:
        if bits is not None:
            values = stochastically_rounded(values, bits)
        stored[0].copy_(values)


def stochastically_rounded(values: Tensor, bits: Tensor) -> Tensor:
    """Round float32 values to numbers of bfloat16, away from zero with the fraction's probability.

    Args:
        bits: uniform numbers from 0 to 65535, int64, of the same shape.

    A finite number stays finite; infinities and NaN stay as they are.
    """
    largest = torch.finfo(torch.bfloat16).max
    words = values.clamp(-largest, largest).view(torch.int32)
    rounded = words.add_(bits.int()).bitwise_and_(-(1 << 16)).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values)


def mixed(x: Tensor) -> Tensor:
    """Map 32-bit numbers, int64, one to one to 32-bit numbers that look random.

    This is ``lowbias32`` of Chris Wellons' hash-prospector. The second factor is 0x846CA68B less
    2**32, so that no product exceeds int64.
    """
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & LOW_32
    x = x ^ (x >> 15)
    x = (x * (0x846CA68B - (1 << 32))) & LOW_32
    return x ^ (x >> 16)


def key_of(seed: int, name: str) -> tuple[int, int]:
    """Return two 32-bit numbers for a parameter of a run."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4]), int.from_bytes(digest[4:])


def keys_of_step(keys: Tensor, steps: Tensor) -> Tensor:
    """Return the keys of parameters for a step, int64 ``[P, 2]``.

    Args:
        keys: keys of the parameters, int64 ``[P, 2]``.
        steps: number of the step of each parameter, ``[P]``.
    """
    return mixed(keys ^ mixed(steps.long() & LOW_32).unsqueeze(1))


def random_words(key: Tensor, positions: Tensor) -> Tensor:
    """Return 32 random bits for each position, int64 of the same shape; ``key`` is int64 ``[2]``.

    The second round keeps two keys from drawing the same numbers in another order.
    """
    words = mixed((positions & LOW_32) ^ key[0])
    return mixed(words ^ key[1] ^ (positions >> 32))


def positions_of(parameter: Tensor, start: int, count: int) -> Tensor:
    """Return the positions in the whole parameter of ``count`` elements of this rank's shard.

    Both count elements row by row; ``start`` is the first one's position in the shard.
    """
    local, slices = local_shard(parameter)
    index = torch.arange(start, start + count, device=parameter.device)
    strides = [parameter.shape[dim + 1 :].numel() for dim in range(parameter.ndim)]
    inner_is_whole = all(
        part.stop - part.start == length
        for part, length in zip(slices[1:], parameter.shape[1:], strict=True)
    )
    if inner_is_whole:
        return index + slices[0].start * strides[0] if slices else index

    positions = torch.zeros_like(index)
    for dim in reversed(range(parameter.ndim)):
        positions += (index % local.shape[dim] + slices[dim].start) * strides[dim]
        index //= local.shape[dim]
    return positions
