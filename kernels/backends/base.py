"""Base of the attention backends: what each takes, where it runs, and its kernels."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from kernels.blocks import Gradients, Keys, Rows, Tile
from kernels.cuda import Kernel, Packed
from kernels.gpu import Family, Gpu
from runtime.simulation import Setting

HALVES = (torch.bfloat16, torch.float16)
Shares = Mapping[Family, float]
Scan = Callable[..., tuple[Tensor, Tensor]]
"""One pass of linear attention over the tokens, as ``kernels.linear_scan.scan``."""
Slab = tuple[Callable[..., None], Callable[..., Tensor]]
"""Forward and backward of a delta rule's slab, as ``kernels.delta.chunks`` has them."""


class Tiled(Protocol):
    """A kernel that takes lists of tiles by itself, as ``kernels.attention.attend_tiles_``."""

    def attend_(
        self, out: Tensor, lse: Tensor, q: Tensor, keys: Keys, tiles: Sequence[Tile], scale: float
    ) -> None:
        """Fold the attention of these tiles into running results, in place."""

    def add_gradients_(
        self, sums: Gradients, rows: Rows, keys: Keys, tiles: Sequence[Tile], scale: float
    ) -> None:
        """Add the gradients through these tiles to (dq, dk, dv), in place."""


@dataclass(frozen=True)
class AttentionKernel:
    """A forward and its backward of one tile, or ``tiled`` in their place.

    The forward maps (q, k, v, causal, scale) to (out, lse). ``tiled`` takes all tiles at once,
    ``packed`` the small ones; the others are taken one by one.
    """

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]] | None = None
    backward: Callable[[Rows, Keys, bool, float], Gradients] | None = None
    tiled: Tiled | None = None
    packed: Packed | None = None


SIMULATED_KERNEL = Setting[AttentionKernel]()
"""Softmax attention in shapes alone, in the place of any backend's."""
SIMULATED_SLAB = Setting[Slab]()
"""The same of a delta rule's slab."""


def pair_of(kernel: AttentionKernel | Packed | None) -> Kernel | None:
    """Return a kernel's forward and backward; None if it has none of their own."""
    if kernel is None or kernel.forward is None or kernel.backward is None:
        return None
    return kernel.forward, kernel.backward


class Backend:
    """Attention kernels of one origin, as ``--attention-backend`` names them."""

    name: str
    title: str = ""
    """Its name in text, where that differs."""
    rate_name: str = ""
    """Its name in a cluster file's ``<name>_fraction``, where that differs."""
    shares: ClassVar[Shares] = {}
    """Share of a GPU's peak that it reaches, forward and backward, where a cluster file has none.
    """
    softmax: bool = False
    """True if ``softmax_kernel`` is there."""
    linear: bool = False
    """True if ``linear_scan`` and ``delta_slab`` are there."""
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32, *HALVES)

    def refusal(self, requested: str, device_type: str, dtype: torch.dtype) -> str | None:
        """Say why it cannot run here, with the fix; None if it can.

        ``requested`` is the name that was asked for: ``auto`` may have chosen this one.
        """
        return None

    def is_automatic(self, here: Gpu, documents: bool) -> bool:
        """Return whether ``auto`` takes it for softmax attention on this GPU.

        The first in the table is taken. With ``documents``, tiles have other shapes in each
        micro-batch.
        """
        return False

    def softmax_kernel(
        self, device_type: str, dtype: torch.dtype, other: AttentionKernel | None
    ) -> AttentionKernel:
        """Return the kernel of softmax attention; ``other`` takes the shapes that it does not take."""
        raise NotImplementedError

    def is_automatic_linear(self, device_type: str, dtype: torch.dtype) -> bool:
        """Return whether ``auto`` takes it for linear attention, and for a delta rule that fits."""
        return False

    def linear_scan(self) -> Scan:
        """Return the scan of linear attention."""
        raise NotImplementedError

    def delta_refusal(self, *, per_channel: bool, key_dim: int) -> str | None:
        """Say which gates or keys of a delta rule it does not take; None if it takes them."""
        return None

    def delta_slab(self) -> Slab:
        """Return the forward and backward of a delta rule's slab."""
        raise NotImplementedError


class GpuBackend(Backend):
    """A library's softmax attention, for a GPU and 16 bits alone."""

    softmax = True
    dtypes: tuple[torch.dtype, ...] = HALVES

    def refusal(self, requested: str, device_type: str, dtype: torch.dtype) -> str | None:
        """Say what the device or the dtype lacks."""
        if device_type == "cpu":
            return f"attention_backend {requested} needs a cuda device and this one is cpu; use auto or aten"
        if dtype not in HALVES:
            return (
                f"attention_backend {requested} on {device_type} takes bfloat16 or float16 and got {dtype}; "
                "use --bf16, or --attention-backend reference for a small exact run"
            )
        return None
