"""Recompute a layer's activations in the backward pass, and offload saved ones to host memory.

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
from parallel.layer_slices import LayerInSlices
from parallel.offload import Layer, Offload, OnHost, identity, unpack
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
"""Operators of attention's forward pass: Longmesh's own, including the gather before the attention
and the exchange of heads or tokens after it, and the fused kernels of torch's SDPA. The convolution
of a delta rule is excluded: saving its output, with all channels of all tokens, would take much
memory, while recomputing it sends only a few tokens.
"""


class RecomputeError(UserError):
    """The recompute policy cannot be applied to this model."""


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """Activations to recompute in the backward pass; no setting changes the result."""

    recompute_granularity: Literal["none", "full", "selective", "attention_boundary"] = "none"
    """Part of each layer to recompute in the backward pass: full is everything; attention_boundary
    (DistFlashAttention) is everything but the attention, whose output and lse are saved; selective,
    as in Megatron-LM, is only the core attention."""
    recompute_offload: bool = False
    """Keep saved activations in host memory between the forward and the backward pass, to save GPU
    memory. Needs recompute_granularity full or attention_boundary.
    """
    loss_chunk_size: int = 0
    """Number of tokens whose logits exist at once; the gradients of each chunk are computed right
    after its logits. 0 computes the logits of all tokens and saves them.
    """
    ffn_chunk_size: int = 0
    """Number of tokens that go through a feed-forward layer at once (blockwise, as in Ring
    Attention); the backward pass recomputes the layer's inner activations. 0 takes all tokens and
    leaves the inner activations to recompute_granularity."""
    layer_chunk_size: int = 0
    """Number of tokens of a rank's micro-batch that go through a layer at once (as in FPDT), to
    save GPU memory: of all tokens, only a layer's input, keys and values and their gradients exist
    at the same time. Needs recompute_granularity full and, over several ranks, the method ulysses
    or allgather_q (docs/concepts/layers_in_slices.md). 0 takes all tokens."""

    def __post_init__(self) -> None:
        for name in ("loss_chunk_size", "ffn_chunk_size", "layer_chunk_size"):
            value = getattr(self, name)
            if value < 0:
                raise RecomputeError(
                    f"{name} is {value}; set it to a number of tokens, or to 0 for all"
                )
        if self.layer_chunk_size and self.recompute_granularity != "full":
            raise RecomputeError(
                f"layer_chunk_size is {self.layer_chunk_size}, but recompute_granularity is "
                f"{self.recompute_granularity}: a layer in slices keeps only its input, and its "
                "backward pass recomputes every slice; set recompute_granularity to full, or "
                "leave out layer_chunk_size"
            )
        if self.recompute_offload and self.recompute_granularity in ("none", "selective"):
            raise RecomputeError(
                "recompute_offload is set, but recompute_granularity is "
                f"{self.recompute_granularity}: nearly all activations are saved, and moving them "
                "takes longer than computing them; set recompute_granularity to full or "
                "attention_boundary, or leave out recompute_offload"
            )


def recompute_layers(layers: nn.ModuleList, config: RecomputeConfig, slice_len: int = 0) -> None:
    """Apply the policy to every layer in place; call once, before the model is sharded.

    With ``attention_boundary`` the layers raise RecomputeError if their attention is not an
    operator of ``ATTENTION``, since it would silently be recomputed.

    Args:
        slice_len: number of this rank's tokens of each sequence that go through a layer at once; 0
            takes ``layer_chunk_size``, for micro-batches of one sequence.
    """
    offload = Offload() if config.recompute_offload else None
    for number, module in enumerate(layers):
        layer: Any = module
        if config.ffn_chunk_size:
            layer.mlp.forward = partial(
                _in_chunks, layer.mlp, layer.mlp.forward, config.ffn_chunk_size
            )
        begin_layer = partial(offload.layer, first=number == 0) if offload else None
        if config.layer_chunk_size:
            length = slice_len or config.layer_chunk_size
            layer.forward = LayerInSlices(layer, layer.forward, length, begin_layer)
        elif config.recompute_granularity == "selective":
            layer.attention.attend = partial(
                checkpoint, layer.attention.attend, use_reentrant=False
            )
        elif config.recompute_granularity != "none":
            save_attention = config.recompute_granularity == "attention_boundary"
            layer.forward = partial(_recomputed, layer.forward, save_attention, begin_layer)


def _in_chunks(
    module: nn.Module, forward: Callable[[Tensor], Tensor], size: int, x: Tensor
) -> Tensor:
    """Apply ``forward`` to x [B, T, C], ``size`` tokens at a time."""
    # Read in every call, since FSDP replaces the shards with whole weights while a layer runs.
    parameters = tuple(module.parameters())
    tokens = x.flatten(0, -2)  # [B T, C]
    out = over_chunks(lambda chunk, _: forward(chunk), tokens, size, parameters)
    return out.unflatten(0, x.shape[:-1])


def _recomputed(
    forward: Callable[..., Tensor],
    save_attention: bool,
    begin_layer: Callable[[], Layer] | None,
    *inputs: Any,
) -> Tensor:
    """Run ``forward``, so that the backward pass recomputes it from its saved inputs.

    With ``save_attention``, the results of its attention are saved too, instead of recomputed. With
    ``begin_layer``, everything that is saved goes to host memory.
    """
    saved: deque[Any] = deque()
    pack: Callable[[Any], Any] = identity
    unpack_saved: Callable[[Any], Any] = identity
    input_hooks: Any = nullcontext()
    if begin_layer is not None:
        pack = begin_layer().pack
        unpack_saved = unpack
        input_hooks = saved_tensors_hooks(pack, unpack_saved)  # moves the checkpoint's inputs

    def save(call: Callable[[], Any]) -> Any:
        out = call()
        # Detach the results: the tensors themselves would keep the graph, which should be freed.
        saved.append(tree_map_only(Tensor, lambda x: pack(x.detach()), out))
        return out

    def reuse(call: Callable[[], Any]) -> Any:
        if not saved:
            raise RuntimeError(
                "recompute_granularity attention_boundary saves each attention for one backward "
                "pass, but this is a second one; run the forward pass again"
            )
        return tree_map_only((Tensor, OnHost), unpack_saved, saved.popleft())

    with input_hooks:
        if not save_attention:
            return checkpoint(forward, *inputs, use_reentrant=False)
        contexts = (_AtAttentions(save), _AtAttentions(reuse))
        out = checkpoint(forward, *inputs, use_reentrant=False, context_fn=lambda: contexts)
    if torch.is_grad_enabled() and not saved:
        raise RecomputeError(
            "recompute_granularity is attention_boundary, but the attention here is not a single "
            "operator with a result to save (torch's SDPA has no fused kernel for this dtype and "
            "these heads); use --bf16 or a context_parallel_method, or set recompute_granularity "
            "to full"
        )
    return out


class _AtAttentions(TorchDispatchMode):
    """Passes every call of an attention operator to ``on_attention``, and runs the others.

    torch's create_selective_checkpoint_contexts does the same, but cannot save the results in host
    memory.
    """

    def __init__(self, on_attention: Callable[[Callable[[], Any]], Any]) -> None:
        super().__init__()
        self._on_attention = on_attention

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = partial(func, *args, **(kwargs or {}))
        return self._on_attention(call) if func.name() in ATTENTION else call()
