"""Moments in 8 bits, by blocks of up to 256 elements with a float32 scale each.

The numbers are those of torchao's optimizers ``AdamW8bit`` and ``AdamWFp8``, which take them from
bitsandbytes (Dettmers et al. 2022, section 2.1): int8 is a code of 8 bits into a table of 256
numbers, denser near zero, and fp8 is float8 e4m3. torchao's classes are not used themselves. They
cut blocks from each rank's flattened shard, so that results depend on the mesh, cannot move to
another one, and leave some shards in float32 that another mesh would round; and they compile a
kernel for every shape. tests/train/optimizers/test_moments.py compares with them.

A second moment above 0 is never rounded to 0, unlike in torchao: the update divides by its square
root, so in the steps after, in which the first moment decays, a weight would move by that moment
over epsilon. The embeddings of tokens that are absent for some steps are such weights.

With equal gradients the moments are the same to the bit on every mesh in which ranks hold whole
rows, or parts of rows of a multiple of 256 elements. If tensor parallelism splits rows otherwise,
blocks are shorter, and the result differs by the error of rounding.
"""

import torch
from torch import Tensor

from runtime.tensors import kept_in_object
from train.optimizers.moment_formats import MomentFormat

SMALLEST_SCALE = 1e-12
"""Lower bound of a scale; it divides."""
SMALLEST_FLOAT8 = 2.0**-9
"""Smallest number of float8 e4m3 above 0."""


class Float8(MomentFormat):
    """Moments in float8 e4m3, scaled so that a block's largest magnitude is e4m3's largest."""

    name = "fp8"
    dtype = torch.float8_e4m3fn
    blocks = True
    rounding_bytes = 13

    def unpack(self, stored: tuple[Tensor, ...], moment: str) -> Tensor:
        values, scales = stored
        return _scaled(values.float(), scales)

    def pack(
        self, values: Tensor, stored: tuple[Tensor, ...], moment: str, bits: Tensor | None = None
    ) -> None:
        codes, scales = stored
        scales.copy_(_largest(values, scales) / torch.finfo(self.dtype).max)
        scaled = _scaled(values, scales, inverse=True)
        if moment == "exp_avg_sq":
            scaled = torch.where(values > 0, scaled.clamp(min=SMALLEST_FLOAT8), scaled)
        codes.copy_(scaled)


class Int8(MomentFormat):
    """Moments as codes into a table of numbers from -1 to 1, or from 0 to 1 for squares."""

    name = "int8"
    dtype = torch.uint8
    blocks = True
    rounding_bytes = 16

    def unpack(self, stored: tuple[Tensor, ...], moment: str) -> Tensor:
        codes, scales = stored
        table = self._table(moment, codes.device)
        return _scaled(table[codes.int()], scales)

    def pack(
        self, values: Tensor, stored: tuple[Tensor, ...], moment: str, bits: Tensor | None = None
    ) -> None:
        codes, scales = stored
        scales.copy_(_largest(values, scales))
        scaled = _scaled(values, scales, inverse=True)
        middles = self._middles(moment, codes.device)
        numbers = torch.bucketize(scaled, middles, out_int32=True, right=True)
        if moment == "exp_avg_sq":
            numbers = torch.maximum(numbers, (values > 0).int())
        codes.copy_(numbers)

    @kept_in_object
    def _table(self, moment: str, device: torch.device) -> Tensor:
        return dynamic_map(signed=moment == "exp_avg").to(device)

    @kept_in_object
    def _middles(self, moment: str, device: torch.device) -> Tensor:
        """Return the numbers from which on a value is rounded to the next number of the table."""
        table = dynamic_map(signed=moment == "exp_avg")
        return ((table[:-1] + table[1:]) / 2).to(device)


def dynamic_map(*, signed: bool) -> Tensor:
    """Return bitsandbytes' table of 256 numbers, ascending, float32 on the CPU.

    Each of seven powers of ten has twice as many numbers as the one below it.
    """
    parts = [torch.tensor([0.0, 1.0])]
    for power in range(7):
        count = 2**power if signed else 2 ** (power + 1)
        edges = torch.linspace(0.1, 1, count + 1)
        numbers = 10 ** (power - 6) * ((edges[:-1] + edges[1:]) / 2)
        parts.append(numbers)
        if signed:
            parts.append(-numbers)
    return torch.cat(parts).sort().values


def _largest(values: Tensor, scales: Tensor) -> Tensor:
    """Return the largest magnitude of each block, ``[blocks]``."""
    return values.view(scales.numel(), -1).abs().amax(1).clip(SMALLEST_SCALE)


def _scaled(values: Tensor, scales: Tensor, *, inverse: bool = False) -> Tensor:
    """Return values times the scale of their block, or divided by it."""
    blocks = values.view(scales.numel(), -1)
    factors = scales.view(-1, 1)
    return (blocks / factors if inverse else blocks * factors).view(values.shape)
