"""Processes and the device mesh they form."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How the processes are arranged: data parallel (dp, what is left over) x context parallel (cp)."""

    context_parallel_size: int = 1
    """Processes that share each sequence."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device that every process computes on; auto takes cuda where it is available."""
    distributed_backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Collective library; auto takes nccl on cuda and gloo on cpu."""
    distributed_timeout_minutes: float = 10.0
    """How long a collective may wait for its peers before the run fails."""

    def __post_init__(self) -> None:
        if self.context_parallel_size < 1:
            raise ValueError(f"context_parallel_size is {self.context_parallel_size}; it must be 1 or more")
        if self.distributed_timeout_minutes <= 0:
            raise ValueError(
                f"distributed_timeout_minutes is {self.distributed_timeout_minutes}; it must be above 0"
            )
