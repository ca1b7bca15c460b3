"""Symbols (tensors without elements), operators on them, and settings of these operators."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Training:
    """Which weights are trained, in which dtype, and by which operators."""

    element_size: int = 2
    """Bytes of an element of activations, and of weights in matmuls."""
    lora_rank: int | None = None
    """Rank of the adapters; None trains all weights."""
    lora_targets: tuple[str, ...] = ()
    """Linear modules with an adapter: the last parts of their names, as peft takes them."""
    fused_norms: bool = True
    """True if torch's RMSNorm is one kernel, as on a GPU; on a CPU it is several operators."""
    sharded: bool = True
    """True if the attention is that of ``parallel.diffusers``, on any number of ranks."""
    attention_buffers: int = 0
    """Bytes that the backward pass of a joint attention needs, including its results."""
    attention_outputs: int = 1
    """Number of copies of its output that a joint attention keeps: two if heads are exchanged."""

    @property
    def trains_all(self) -> bool:
        """True if all weights are trained."""
        return self.lora_rank is None

    def has_adapter(self, name: str) -> bool:
        """Return True if the linear module of this name has an adapter."""
        if self.lora_rank is None:
            return False
        return any(name == target or name.endswith(f".{target}") for target in self.lora_targets)


@dataclass(eq=False)
class Storage:
    """Memory that several symbols may share."""

    bytes: int
    is_counted: bool = True
    """False for weights, and for tensors that all blocks share."""


@dataclass(frozen=True, eq=False)
class Symbol:
    """A tensor without elements, ``[rows, width]``."""

    rows: int
    width: int
    size: int
    """Bytes of an element."""
    is_tracked: bool
    """True if autograd computes its gradient."""
    storage: Storage

    @property
    def bytes(self) -> int:
        """Return the bytes of its elements."""
        return self.rows * self.width * self.size


@dataclass(frozen=True, eq=False)
class Operation:
    """A recorded operator: the tensors and bytes that its backward pass needs."""

    inputs: tuple[Symbol, ...]
    output: Symbol
    saved: tuple[Storage, ...]
    weight_gradient: int
    """Bytes of the gradient of its weights."""
    passed_to: tuple[Symbol, ...]
    """Inputs whose gradient is the output's or a view of it, as for sums and concatenations."""
    temporary: int
    """Bytes that its backward pass needs besides the gradients."""
    mask: int
    """Bytes of a mask that exists while it runs."""
