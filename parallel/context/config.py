"""What a user chooses about context parallelism."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ContextConfig:
    """How the context-parallel processes share one sequence's attention."""

    context_parallel_method: Literal["ring", "striped", "zigzag", "allgather", "none"] = "striped"
    """Layout and communication of the attention; none is plain SDPA in one process, to compare with."""
    attention_backend: Literal["auto", "aten", "cudnn", "flash_attn", "chunked", "triton", "reference"] = "auto"
    """Kernel of one attention block; auto takes flash-attn where it is installed, else aten. Of linear attention:
    chunked or triton; auto takes triton on a GPU in bfloat16, else chunked."""
