"""Attention backends, keyed by name; --attention-backend chooses one."""

from typing import TYPE_CHECKING, Literal, TypeAlias

from kernels.backends.aten import Aten
from kernels.backends.base import Backend
from kernels.backends.chunked import Chunked
from kernels.backends.cudnn import Cudnn
from kernels.backends.flash_attention import FlashAttention3, FlashAttention4
from kernels.backends.reference import Reference
from kernels.backends.triton import Triton

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Aten(),
        Cudnn(),
        FlashAttention3(),
        FlashAttention4(),
        Chunked(),
        Triton(),
        Reference(),
    )
}
"""All backends; ``auto`` takes the first whose ``is_automatic`` is True on this device."""
SOFTMAX = {name: backend for name, backend in BACKENDS.items() if backend.softmax}
"""Backends for softmax attention."""
LINEAR = {name: backend for name, backend in BACKENDS.items() if backend.linear}
"""Backends for linear attention and the delta rule."""
RATED = {backend.rate_name or name: backend for name, backend in SOFTMAX.items() if backend.shares}
"""Backends whose speed the planner knows, keyed by their names in a cluster file."""

if TYPE_CHECKING:
    BackendName: TypeAlias = str
    SoftmaxBackendName: TypeAlias = str
else:  # read at run time as the choices of a flag
    BackendName = Literal["auto", *BACKENDS]
    SoftmaxBackendName = Literal["auto", *SOFTMAX]


def listed(names: dict[str, Backend]) -> str:
    """List auto and the names of these backends in words, for a message."""
    *first, last = ["auto", *names]
    return f"{', '.join(first)} or {last}"
