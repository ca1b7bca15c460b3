"""Choose a configuration's context parallelism and the attention that its model calls.

The model takes its attention as an argument and does not know of ranks. The functions here choose
that argument: a method's attention over the context-parallel ranks, a local kernel, or, for a
hybrid of softmax and linear attention, both.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.attention import select_backend, takes_whole
from kernels.backends import advice, cudnn
from kernels.delta.rule import select_delta_backend
from kernels.gpu import gpu
from kernels.linear_attention import select_linear_backend
from kernels.ops import linear_attention
from model.dit import full_sdpa
from model.parts.attention import Attend, HybridAttention, LinearAttend, sdpa
from model.parts.delta import DeltaAttend, OneDevice
from parallel.context import ContextConfig, ContextParallel, context_parallel
from parallel.context.linear.inside import InsideAttention
from parallel.context.plan import PLANS, PlanHandle
from parallel.context.transport import Transport
from train.config.common import CommonConfig
from train.config.entries import Config, DiTRunConfig
from train.config.flags import ConfigError

Context = tuple[ContextParallel, Attend | LinearAttend | HybridAttention]
"""Context parallelism, and the attention that the model calls."""


def context_of(
    config: Config, group: dist.ProcessGroup | None, like: Context | None = None
) -> Context:
    """Return the configuration's context parallelism and attention.

    Args:
        like: earlier result, for another sequence length, to share process groups with; without it
            new groups are created, which is collective.
    """
    links = None if like is None else like[0].transport
    if config.model.own_softmax_layout:
        return _hybrid_context_of(config, group, like)
    if config.model.delta_rule:
        return _delta_context_of(config, group, links)
    if config.model.linear_attention:
        return _linear_context_of(config, group, config.mesh.tensor_model_parallel_size, links)
    return softmax_context(config, group, sdpa, links)


def diffusion_context(
    config: DiTRunConfig, group: dist.ProcessGroup | None
) -> tuple[ContextParallel, Attend]:
    """Return a diffusion transformer's context parallelism, and attention inside each sample."""
    cp, attend = softmax_context(config, group, full_sdpa)
    if not config.packed:
        return cp, attend
    cp = cp.under(documents=config.sample_ends)
    return cp, cp.attend


def _delta_context_of(
    config: Config, group: dist.ProcessGroup | None, links: Transport | None
) -> tuple[ContextParallel, HybridAttention]:
    """Set up delta-rule layers in a model whose softmax layers have the same token layout."""
    cp, softmax = softmax_context(config, group, sdpa, links)
    backend = "reference" if config.context.attention_backend == "reference" else "auto"
    local_rule = OneDevice(_cu_seqlens, backend)
    if config.slice_len:
        return cp, HybridAttention(cp.delta_of_slices(local_rule, backend), softmax)
    if config.mesh.context_parallel_size > 1:
        return cp, HybridAttention(_uncompiled(cp.attend_delta, cp.convolve), softmax)
    if config.packed and config.train.compile:
        return cp, HybridAttention(_uncompiled(local_rule, local_rule.convolve), softmax)
    return cp, HybridAttention(local_rule, softmax)


def _hybrid_context_of(
    config: Config, group: dist.ProcessGroup | None, like: Context | None
) -> tuple[ContextParallel, HybridAttention]:
    """Set up a hybrid whose softmax and linear layers may have different token layouts.

    The residual stream has the layout of linear attention, which passes states from rank to rank.
    Softmax layers exchange queries, keys and values into their own layout, and the output back.
    Both layouts are padded to the same length, so that every token has a place in each.
    """
    is_local = config.mesh.context_parallel_size == 1
    if is_local:
        # SDPA cannot mask documents, so packed ones need a method even on one rank.
        method: Literal["ring", "none"] = "ring" if config.packed else "none"
        context = ContextConfig(context_parallel_method=method)
    else:
        # An "auto" layout has been replaced before, by the planner or for generation.
        (layout,) = config.hybrid.layouts(config.context.context_parallel_layout)
        context = config.hybrid.context(layout)
        if config.context.attention_backend == "reference":
            context = replace(context, attention_backend="reference")

    outer_links = None
    inner_links = None
    if (
        like is not None
        and isinstance(like[1], HybridAttention)
        and isinstance(like[1].softmax, InsideAttention)
    ):
        outer_links = like[0].transport
        inner_links = like[1].softmax.inside.transport
    inner, softmax = softmax_context(config, group, sdpa, inner_links, context)
    outer, linear = _linear_context_of(config, group, inner.plan.local_len, outer_links)
    return outer, HybridAttention(linear, softmax if is_local else InsideAttention(inner, outer))


def _uncompiled(rule: Callable[..., Tensor], convolve: Callable[..., Tensor]) -> DeltaAttend:
    """Exclude a delta rule and its convolution from torch.compile, which would recompile them for
    every mask."""
    attend: Any = torch.compiler.disable(rule)
    attend.convolve = torch.compiler.disable(convolve)
    return attend


def _cu_seqlens(mask: PlanHandle | None) -> tuple[int, ...] | None:
    """Return a mask's cu_seqlens without context parallelism; None if the mask has no documents.

    Padding counts as a document.
    """
    if mask is None:
        return None
    plan = PLANS[mask.tensor]
    if plan.boundaries:
        return (0, *plan.boundaries, plan.padded_len)
    return None


def _linear_context_of(
    config: Config, group: dist.ProcessGroup | None, multiple: int, links: Transport | None
) -> tuple[ContextParallel, LinearAttend]:
    """Set up linear attention: the method's, or a local one if a process has whole sequences."""
    backend = select_linear_backend(
        config.context.attention_backend, config.mesh.device_type, config.train.dtype
    )

    def attend_locally(
        q: Tensor, k: Tensor, v: Tensor, log_decay: Sequence[float], mask: PlanHandle | None = None
    ) -> Tensor:
        cu_seqlens = _cu_seqlens(mask)
        return linear_attention(q, k, v, log_decay, cu_seqlens=cu_seqlens, backend=backend)[0]

    length = config.joined_length
    if config.mesh.context_parallel_size == 1:
        attend: Any = attend_locally
        if config.packed and config.train.compile:
            attend = torch.compiler.disable(attend_locally)
        return context_parallel("ring", seq_len=length, multiple=multiple), attend

    cp = context_parallel(
        config.context.context_parallel_method,
        seq_len=length,
        multiple=multiple,
        layout=config.context.context_parallel_layout,
        backend=backend,
        group=group,
        timeout=timedelta(minutes=config.mesh.distributed_timeout_minutes),
        links=links,
    )
    return cp, cp.attend_linear


def plan_ahead(
    config: Config, attend: Attend | LinearAttend | HybridAttention, cp: ContextParallel
) -> None:
    """Precompute this rank's attention plans for a micro-batch's mask.

    ``cp`` is the context parallelism of ``context_of`` under that mask; ``attend`` is the attention
    that it returned.
    """
    softmax = attend.softmax if isinstance(attend, HybridAttention) else attend
    if isinstance(softmax, InsideAttention):
        cp = softmax.under(cp.plan)
    cp.plan_ahead(config.windows)


def softmax_context(
    config: CommonConfig,
    group: dist.ProcessGroup | None,
    local_attend: Attend,
    links: Transport | None = None,
    context: ContextConfig | None = None,
) -> tuple[ContextParallel, Attend]:
    """Return context parallelism of softmax attention, and the attention that the model calls.

    Args:
        local_attend: the attention to use if one process needs no method.
        context: the method and its settings; by default the configuration's.

    Raises UserError if the backend cannot run here.
    """
    context = context or config.context
    method = context.context_parallel_method
    backend = context.attention_backend
    device_type = config.mesh.device_type
    length = config.joined_length
    tp = config.mesh.tensor_model_parallel_size
    if method == "none":
        cp = context_parallel("ring", seq_len=length, multiple=tp, causal=config.causal)
        return cp, local_attend if _ignores_padding(config, cp) else cp.attend

    select_backend(backend, device_type, config.train.dtype)
    head_dim = config.model.head_dim
    if device_type == "cuda" and backend != "reference" and head_dim > 256:
        raise ConfigError(
            f"attention heads have {head_dim} channels, but cuda kernels support at most 256; "
            "change kv_channels or num_attention_heads"
        )
    # Only a window that all layers share is set here: recurrent layers see all tokens, and layers
    # with different windows pass theirs at each call.
    window = None
    if len(config.windows) == 1 and not config.model.recurrent:
        window = config.windows[0]
    options = context.plan_arguments(config.mesh.context_ranks_per_node)
    if config.slice_len:
        options["slice_len"] = config.slice_len
        options["layout"] = config.layout_of_slices
    cp = context_parallel(
        method,
        seq_len=length,
        group=group,
        causal=config.causal,
        window=window,
        multiple=tp,
        backend=backend,
        timeout=timedelta(minutes=config.mesh.distributed_timeout_minutes),
        links=links,
        **options,
    )

    is_sharded = config.mesh.context_parallel_size > 1 or config.slice_len > 0
    local_kernel_fits = takes_whole(backend, device_type, config.train.dtype)
    if is_sharded or config.packed or not local_kernel_fits or not _ignores_padding(config, cp):
        return cp, cp.attend
    return cp, _local_or_planned(cp, local_attend)


def _ignores_padding(config: CommonConfig, cp: ContextParallel) -> bool:
    """Return True if no token can attend to padding, so that attention needs no plan.

    A causal mask hides the padding that tensor parallelism adds.
    """
    return config.causal or cp.plan.padded_len == config.joined_length


def kernel_lines(config: CommonConfig) -> list[str]:
    """Return a line that names the attention kernels (on a GPU with cuDNN's version), and any
    warning."""
    device = config.mesh.device_type
    dtype = config.train.dtype
    backend = config.context.attention_backend
    model = config.model
    kernels = []
    warning = None

    if config.delta:
        kernel = select_delta_backend(
            "reference" if backend == "reference" else "auto",
            device,
            dtype,
            per_channel=model.linear_gate == "per_channel",
            width=model.key_dim,
        )
        kernels.append(f"{kernel} (delta rule)")
    elif model.linear_attention:
        kernels.append(f"{select_linear_backend(backend, device, dtype)} (linear attention)")

    if not model.linear_attention or model.own_softmax_layout:
        # A hybrid's attention_backend is for its linear layers; its softmax layers use "auto".
        if model.own_softmax_layout and backend != "reference":
            backend = "auto"
        kernel = _softmax_kernel(config, backend, dtype)
        if device == "cuda":
            kernels.append(advice.describe_kernel(kernel, gpu()))
            warning = advice.warning(
                kernel, gpu(), backend, is_packed=config.packed, head_dim=model.head_dim
            )
        else:
            kernels.append(kernel)

    lines = [f"attention kernel: {'; '.join(kernels)}"]
    if warning:
        lines.append(f"WARNING: {warning}")
    return lines


def _softmax_kernel(config: CommonConfig, backend: str, dtype: torch.dtype) -> str:
    """Return the kernel's name for full tiles of softmax attention, or torch's without a method."""
    device = config.mesh.device_type
    is_local_hybrid = config.model.own_softmax_layout and config.mesh.context_parallel_size == 1
    if config.context.context_parallel_method != "none" and (config.packed or not is_local_hybrid):
        kernel = select_backend(backend, device, dtype, config.packed).name
    elif device == "cuda" and dtype == torch.float32:
        kernel = "scaled_dot_product_attention"
    elif device == "cuda" and cudnn.prefers_cudnn(gpu()):
        kernel = "cudnn"
    else:
        kernel = "aten"

    if kernel == "cudnn" and config.model.head_dim > cudnn.max_head_dim():
        return "aten"
    return kernel


def _local_or_planned(cp: ContextParallel, local_attend: Attend) -> Attend:
    """Return attention for one process; only calls with masks or options use the method's tiles."""

    def attend(
        q: Tensor, k: Tensor, v: Tensor, mask: PlanHandle | None = None, **options: Any
    ) -> Tensor:
        if mask is None and all(value is None for value in options.values()):
            return local_attend(q, k, v)
        return cp.attend(q, k, v, mask, **options)

    return attend
