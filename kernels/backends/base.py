"""Base of the attention backends: what each supports, where it runs, and its kernels."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from kernels.blocks import Gradients, Keys, Rows, Tile
from kernels.cuda import Kernel, PackedKernel
from kernels.gpu import Family, Gpu
from runtime.simulation import Setting

HALVES = (torch.bfloat16, torch.float16)
Shares = Mapping[Family, float]
Scan = Callable[..., tuple[Tensor, Tensor]]
"""Function that scans the tokens for linear attention, like ``kernels.linear_scan.scan``."""
SlabKernel = tuple[Callable[..., None], Callable[..., Tensor]]
"""Functions that run the delta rule forward and backward over a slab (a range of chunks), as in
``kernels.delta.chunks``."""


class Tiled(Protocol):
    """A kernel that processes lists of tiles, like ``kernels.attention.attend_tiles_``."""

    def attend_(
        self, out: Tensor, lse: Tensor, q: Tensor, keys: Keys, tiles: Sequence[Tile], scale: float
    ) -> None:
        """Merge the attention of these tiles into running results, in place."""

    def add_gradients_(
        self, sums: Gradients, rows: Rows, keys: Keys, tiles: Sequence[Tile], scale: float
    ) -> None:
        """Add the gradients through these tiles to (dq, dk, dv), in place."""


@dataclass(frozen=True)
class AttentionKernel:
    """Kernels of an attention backend.

    ``forward`` and ``backward`` compute one tile at a time; ``packed``, if set, computes all small
    tiles in one call; ``tiled``, if set, computes all tiles in one call and replaces the others.
    ``forward`` maps (q, k, v, causal, scale) to (out, lse).
    """

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]] | None = None
    backward: Callable[[Rows, Keys, bool, float], Gradients] | None = None
    tiled: Tiled | None = None
    packed: PackedKernel | None = None


SIMULATED_KERNEL = Setting[AttentionKernel]()
"""Softmax attention that computes shapes only and replaces every backend's in a simulation."""
SIMULATED_SLAB = Setting[SlabKernel]()
"""Delta rule that computes shapes only and replaces every backend's in a simulation."""


def pair_of(kernel: AttentionKernel | PackedKernel | None) -> Kernel | None:
    """Return a kernel's forward and backward functions; None if it has no such functions."""
    if kernel is None or kernel.forward is None or kernel.backward is None:
        return None
    return kernel.forward, kernel.backward


class Backend:
    """Attention kernels from one library, which ``--attention-backend`` chooses by its name."""

    name: str
    title: str = ""
    """Name of the backend in text, if it differs from the flag's value."""
    rate_name: str = ""
    """Name of the backend in a cluster file's ``<name>_fraction``, if it differs from ``name``."""
    shares: ClassVar[Shares] = {}
    """Fraction of a GPU's peak FLOP/s that the backend reaches, forward and backward, keyed by GPU
    family; used if a cluster file gives none."""
    softmax: bool = False
    """True if the backend has ``softmax_kernel``."""
    linear: bool = False
    """True if the backend has ``linear_scan`` and ``delta_slab``."""
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32, *HALVES)

    def refusal(self, requested: str, device_type: str, dtype: torch.dtype) -> str | None:
        """Return why the backend cannot run on this device, with the fix; None if it can.

        ``requested`` is the name in the configuration: ``auto`` may have chosen this backend.
        """
        return None

    def is_automatic(self, this_gpu: Gpu, is_packed: bool) -> bool:
        """Return True if ``auto`` may choose this backend for softmax attention on this GPU.

        The first such backend in the table is used. With ``is_packed``, tiles have different shapes
        in each micro-batch.
        """
        return False

    def softmax_kernel(
        self, device_type: str, dtype: torch.dtype, fallback: AttentionKernel | None
    ) -> AttentionKernel:
        """Return the softmax attention kernel; ``fallback`` computes unsupported shapes."""
        raise NotImplementedError

    def is_automatic_linear(self, device_type: str, dtype: torch.dtype) -> bool:
        """Return True if ``auto`` may choose this backend for linear attention and delta rules."""
        return False

    def linear_scan(self) -> Scan:
        """Return the function that scans the tokens for linear attention."""
        raise NotImplementedError

    def delta_refusal(self, *, per_channel: bool, key_dim: int) -> str | None:
        """Return why these gates or keys of a delta rule are not supported; None if they are."""
        return None

    def delta_slab(self) -> SlabKernel:
        """Return the functions that run the delta rule forward and backward over a slab (a range
        of chunks).
        """
        raise NotImplementedError


class GpuBackend(Backend):
    """Softmax attention of a library that supports only GPUs and 16-bit dtypes."""

    softmax = True
    dtypes: tuple[torch.dtype, ...] = HALVES

    def refusal(self, requested: str, device_type: str, dtype: torch.dtype) -> str | None:
        """Return why the backend cannot run with this device or dtype; None if it can."""
        if device_type == "cpu":
            return (
                f"attention_backend {requested} needs a cuda device, but this one is cpu; use auto"
                " or aten"
            )
        if dtype not in HALVES:
            return (
                f"attention_backend {requested} on {device_type} takes bfloat16 or float16, but got"
                f" {dtype}; use --bf16, or --attention-backend reference for a small exact run"
            )
        return None
