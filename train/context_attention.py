"""Context parallelism of a configuration, and the attention that its model calls."""

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
        like: what this returned for another length, whose groups are taken; without it they are
            made, which is collective.
    """
    outer = None if like is None else like[0].transport
    if config.model.own_softmax_layout:
        return _hybrid_context_of(config, group, like)
    if config.model.delta_rule:
        cp, softmax = softmax_context(config, group, sdpa, outer)
        if config.mesh.context_parallel_size > 1:
            return cp, HybridAttention(_uncompiled(cp.attend_delta, cp.convolve), softmax)
        alone = OneDevice(
            _documents, "reference" if config.context.attention_backend == "reference" else "auto"
        )
        compiled = config.packed and config.train.compile
        return cp, HybridAttention(
            _uncompiled(alone, alone.convolve) if compiled else alone, softmax
        )
    if config.model.linear_attention:
        return _linear_context_of(config, group, config.mesh.tensor_model_parallel_size, outer)
    return softmax_context(config, group, sdpa, outer)


def diffusion_context(
    config: DiTRunConfig, group: dist.ProcessGroup | None
) -> tuple[ContextParallel, Attend]:
    """Return a diffusion transformer's context parallelism, under the bounds of joined samples, and
    its attention.
    """
    cp, attend = softmax_context(config, group, full_sdpa)
    if not config.packed:
        return cp, attend
    cp = cp.under(documents=config.sample_ends)
    return cp, cp.attend


def _hybrid_context_of(
    config: Config, group: dist.ProcessGroup | None, like: Context | None
) -> tuple[ContextParallel, HybridAttention]:
    """Set up a hybrid: tokens lie as linear attention needs them; softmax attention may have its
    own layout.
    """
    alone = config.mesh.context_parallel_size == 1
    if alone:
        method: Literal["ring", "none"] = (
            "ring" if config.packed else "none"
        )  # SDPA knows no documents
        context = ContextConfig(context_parallel_method=method)
    else:
        (layout,) = config.hybrid.layouts(
            config.context.context_parallel_layout
        )  # train.config.derive has left one
        context = config.hybrid.context(layout)
        if config.context.attention_backend == "reference":
            context = replace(context, attention_backend="reference")
    outer, inner = None, None
    if (
        like is not None
        and isinstance(like[1], HybridAttention)
        and isinstance(like[1].softmax, InsideAttention)
    ):
        outer, inner = like[0].transport, like[1].softmax.inside.transport
    inside, softmax = softmax_context(config, group, sdpa, inner, context)
    # Padded to the same length, so that tokens can change layout.
    outside, linear = _linear_context_of(config, group, inside.plan.local_len, outer)
    return outside, HybridAttention(linear, softmax if alone else InsideAttention(inside, outside))


def _uncompiled(rule: Callable[..., Tensor], convolve: Callable[..., Tensor]) -> DeltaAttend:
    """Return a delta rule with the convolution before it, neither of them compiled, as each mask is
    another.
    """
    attend: Any = torch.compiler.disable(rule)
    attend.convolve = torch.compiler.disable(convolve)
    return attend


def _documents(mask: PlanHandle | None) -> tuple[int, ...] | None:
    """Return the cumulative lengths of a mask's documents, padding among them, on one process; None
    without any.
    """
    plan = None if mask is None else PLANS[mask.tensor]
    return (0, *plan.boundaries, plan.padded_len) if plan and plan.boundaries else None


def _linear_context_of(
    config: Config, group: dist.ProcessGroup | None, multiple: int, links: Transport | None
) -> tuple[ContextParallel, LinearAttend]:
    """Set up linear attention by the method, or on one process with whole sequences."""
    dtype = config.train.dtype
    backend = select_linear_backend(
        config.context.attention_backend, config.mesh.device_type, dtype
    )

    def attend(
        q: Tensor, k: Tensor, v: Tensor, log_decay: Sequence[float], mask: PlanHandle | None = None
    ) -> Tensor:
        return linear_attention(q, k, v, log_decay, documents=_documents(mask), backend=backend)[0]

    length = config.joined_length
    if config.mesh.context_parallel_size == 1:
        alone = torch.compiler.disable(attend) if config.packed and config.train.compile else attend
        return context_parallel("ring", seq_len=length, multiple=multiple), alone
    timeout = timedelta(minutes=config.mesh.distributed_timeout_minutes)
    method, layout = config.context.context_parallel_method, config.context.context_parallel_layout
    ranks: dict[str, Any] = {"group": group, "timeout": timeout, "links": links}
    cp = context_parallel(
        method, seq_len=length, multiple=multiple, layout=layout, backend=backend, **ranks
    )
    return cp, cp.attend_linear


def plan_ahead(
    config: Config, attend: Attend | LinearAttend | HybridAttention, cp: ContextParallel
) -> None:
    """Make ahead all that this rank's layers will need under the mask of a micro-batch.

    ``cp`` is the context parallelism of ``context_of`` under that mask; ``attend`` is the attention
    from there.
    """
    softmax = attend.softmax if isinstance(attend, HybridAttention) else attend
    if isinstance(softmax, InsideAttention):
        cp = softmax.under(cp.plan)
    cp.plan_ahead(config.windows)


def softmax_context(
    config: CommonConfig,
    group: dist.ProcessGroup | None,
    alone: Attend,
    links: Transport | None = None,
    context: ContextConfig | None = None,
) -> tuple[ContextParallel, Attend]:
    """Return context parallelism of softmax attention, and the attention that the model calls.

    Args:
        alone: the attention of one process without a method.
        context: the method, by default the configuration's.

    Raises UserError if the backend cannot run here.
    """
    context = context or config.context
    method, backend = context.context_parallel_method, context.attention_backend
    length, tp = config.joined_length, config.mesh.tensor_model_parallel_size
    if method == "none":
        cp = context_parallel("ring", seq_len=length, multiple=tp, causal=config.causal)
        # Without a causal mask, tokens would attend to the padding that tp asks for.
        return cp, alone if config.causal or cp.plan.padded_len == length else cp.attend
    select_backend(backend, config.mesh.device_type, config.train.dtype)
    width = config.model.head_dim
    if config.mesh.device_type == "cuda" and backend != "reference" and width > 256:
        raise ConfigError(
            f"the heads are {width} wide, and attention on cuda takes up to 256; change kv_channels or "
            "num_attention_heads"
        )
    recurrent = config.model.recurrent
    cp = context_parallel(
        method,
        seq_len=length,
        group=group,
        causal=config.causal,
        window=config.windows[0]
        if len(config.windows) == 1 and not recurrent
        else None,  # or layers that see all
        multiple=tp,
        backend=backend,
        timeout=timedelta(minutes=config.mesh.distributed_timeout_minutes),
        links=links,
        **context.plan_arguments(config.mesh.context_ranks_per_node),
    )
    if (
        config.mesh.context_parallel_size > 1
        or config.packed
        or not takes_whole(backend, config.mesh.device_type, config.train.dtype)
    ):
        return cp, cp.attend
    return cp, _whole(cp, alone) if config.causal or cp.plan.padded_len == length else cp.attend


def kernel_lines(config: CommonConfig) -> list[str]:
    """Say in a line which attention kernel runs and, on a GPU, which cuDNN is loaded; in another,
    if it is slow.
    """
    device, asked, model = config.mesh.device_type, config.context.attention_backend, config.model
    dtype = config.train.dtype
    linear, own = model.linear_attention, model.own_softmax_layout
    said = [f"{select_linear_backend(asked, device, dtype)} (linear attention)"] if linear else []
    if config.delta:
        name, per_channel = (
            "reference" if asked == "reference" else "auto",
            model.linear_gate == "per_channel",
        )
        found = select_delta_backend(
            name, device, dtype, per_channel=per_channel, width=model.key_dim
        )
        said = [f"{found} (delta rule)"]
    warned, here = None, gpu()
    if not linear or own:
        softmax = (
            asked if not own or asked == "reference" else "auto"
        )  # a hybrid's backend is the linear one's
        kernel = _softmax_kernel(config, softmax, dtype)
        said.append(advice.describe_kernel(kernel, here) if device == "cuda" else kernel)
        if device == "cuda":
            warned = advice.warning(
                kernel, here, softmax, documents=config.packed, head_dim=model.head_dim
            )
    return [f"attention kernel: {'; '.join(said)}", *([f"WARNING: {warned}"] if warned else [])]


def _softmax_kernel(config: CommonConfig, backend: str, dtype: torch.dtype) -> str:
    """Return the kernel that softmax attention's whole tiles run by, or torch's where it is called
    without a method.
    """
    device, here = config.mesh.device_type, gpu()
    hybrid_alone = config.model.own_softmax_layout and config.mesh.context_parallel_size == 1
    if config.context.context_parallel_method != "none" and (config.packed or not hybrid_alone):
        kernel = select_backend(backend, device, dtype, config.packed).name
    elif device == "cuda" and dtype == torch.float32:
        kernel = "scaled_dot_product_attention"
    else:
        kernel = "cudnn" if device == "cuda" and cudnn.prefers_cudnn(here) else "aten"
    return "aten" if kernel == "cudnn" and config.model.head_dim > cudnn.max_head_dim() else kernel


def _whole(cp: ContextParallel, alone: Attend) -> Attend:
    """Return the attention of one process: ``alone``'s kernel, or the method's tiles where there is
    more to know.
    """

    def attend(
        q: Tensor, k: Tensor, v: Tensor, mask: PlanHandle | None = None, **seen: Any
    ) -> Tensor:
        if mask is None and all(value is None for value in seen.values()):
            return alone(q, k, v)
        return cp.attend(q, k, v, mask, **seen)

    return attend
