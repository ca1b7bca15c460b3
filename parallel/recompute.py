"""Recompute a layer's activations in the backward, and offload what is kept to host memory.

Applied in place to the layers of a plain model, before FSDP. A layer has ``attention.attend`` (the
core attention) and ``mlp``. No module is wrapped, so checkpoints keep the plain model's names.
"""

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from kernels.loss import over_chunks
from parallel.offload import Layer, Offload, OnHost, identity, take
from runtime.errors import UserError

ATTENTION = frozenset(
    {
        "longmesh::prefetch_kv",
        "longmesh::context_attention",
        "longmesh::linear_attention",
        "longmesh::state_attention",
        "longmesh::delta_rule",
        "longmesh::delta_attention",
        "longmesh::heads_to_tokens",
        "longmesh::relayout_out",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
    }
)
"""Operators of an attention forward: ours, with the gather before and the exchange of heads or
tokens after it, and the fused kernels of torch's SDPA. Not a delta rule's convolution: its rows are
all channels of all tokens, and what ranks send for it those of a few tokens."""


class RecomputeError(UserError):
    """A policy that cannot be applied to this model."""


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """Activations to compute again in the backward, which saves memory; no setting changes a
    result.
    """

    recompute_granularity: Literal["none", "full", "selective", "attention_boundary"] = "none"
    """Part of each layer to compute again: full is everything; attention_boundary
    (DistFlashAttention) everything but the attention forward, whose output and lse are kept;
    selective, as in Megatron-LM, the core attention alone."""
    recompute_offload: bool = False
    """Keep in host memory what full or attention_boundary keep between forward and backward; for a
    GPU.
    """
    loss_chunk_size: int = 0
    """Tokens whose logits exist at once; their gradients follow at once. 0 computes all logits and
    keeps them.
    """
    ffn_chunk_size: int = 0
    """Tokens that go through a feed-forward layer at once (blockwise, Ring Attention); the backward
    computes its inside again. 0 takes all tokens and leaves the inside to recompute_granularity."""

    def __post_init__(self) -> None:
        for name in ("loss_chunk_size", "ffn_chunk_size"):
            if getattr(self, name) < 0:
                raise RecomputeError(
                    f"{name} is {getattr(self, name)}; it must be a number of tokens, or 0 for all"
                )
        if self.recompute_offload and self.recompute_granularity in ("none", "selective"):
            raise RecomputeError(
                f"recompute_offload is set and recompute_granularity is {self.recompute_granularity}, which keeps "
                "nearly all activations: moving them takes longer than computing them; use full or attention_boundary"
            )


def recompute_layers(layers: nn.ModuleList, config: RecomputeConfig) -> None:
    """Apply the policy of ``config`` to every layer in place; call once, before the model is
    sharded.

    With ``attention_boundary`` the layers raise RecomputeError if their attention is not an
    operator of ``ATTENTION``: it would silently be recomputed.
    """
    offload = Offload() if config.recompute_offload else None
    for number, layer in enumerate(layers):
        parts: Any = layer
        if config.ffn_chunk_size:
            parts.mlp.forward = partial(
                _in_chunks, parts.mlp, parts.mlp.forward, config.ffn_chunk_size
            )
        if config.recompute_granularity == "selective":
            parts.attention.attend = partial(
                checkpoint, parts.attention.attend, use_reentrant=False
            )
        elif config.recompute_granularity != "none":
            keep_attention = config.recompute_granularity == "attention_boundary"
            begin = partial(offload.layer, first=number == 0) if offload else None
            parts.forward = partial(_recomputed, parts.forward, keep_attention, begin)


def _in_chunks(
    module: nn.Module, forward: Callable[[Tensor], Tensor], size: int, x: Tensor
) -> Tensor:
    """Apply ``forward`` to x [B, T, C], ``size`` tokens at a time."""
    # Read at every call: FSDP replaces the shards by whole weights while a layer runs.
    parameters = tuple(module.parameters())
    return over_chunks(lambda part, _: forward(part), x.flatten(0, -2), size, parameters).unflatten(
        0, x.shape[:-1]
    )


def _recomputed(
    forward: Callable[..., Tensor],
    keep_attention: bool,
    begin: Callable[[], Layer] | None,
    *inputs: Any,
) -> Tensor:
    """Run ``forward``, keeping only its inputs and, with ``keep_attention``, the results of its
    attention.

    With ``begin`` they are kept in host memory.
    """
    pack, unpack = (begin().pack, take) if begin else (identity, identity)
    kept: deque[Any] = deque()

    def keep(call: Callable[[], Any]) -> Any:
        out = call()
        # Detached: autograd ties the tensors themselves to the graph that is to be freed.
        kept.append(tree_map_only(Tensor, lambda x: pack(x.detach()), out))
        return out

    def reuse(call: Callable[[], Any]) -> Any:
        if not kept:
            raise RuntimeError(
                "attention_boundary keeps each attention for one backward, and this is another one"
            )
        return tree_map_only((Tensor, OnHost), unpack, kept.popleft())

    with (
        saved_tensors_hooks(pack, unpack) if begin else nullcontext()
    ):  # packs the checkpoint's inputs
        if not keep_attention:
            return checkpoint(forward, *inputs, use_reentrant=False)
        contexts = _AtAttentions(keep), _AtAttentions(reuse)
        out = checkpoint(forward, *inputs, use_reentrant=False, context_fn=lambda: contexts)
    if torch.is_grad_enabled() and not kept:
        raise RecomputeError(
            "recompute_granularity is attention_boundary, and the attention here is no single operator whose result "
            "could be kept (torch's SDPA has no fused kernel for this dtype and these heads); use --bf16, a "
            "context_parallel_method, or recompute_granularity full"
        )
    return out


class _AtAttentions(TorchDispatchMode):
    """Hand every call of an attention operator to ``take``, and let the others be.

    torch's create_selective_checkpoint_contexts does the same, but cannot keep what they return in
    host memory.
    """

    def __init__(self, take: Callable[[Callable[[], Any]], Any]) -> None:
        super().__init__()
        self._take = take

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = partial(func, *args, **(kwargs or {}))
        return self._take(call) if func.name() in ATTENTION else call()
