"""Measure layers without softmax attention, and optimizers, on one device."""

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.harness import forward_backward
from bench.linear import flops
from bench.shapes import MaskedShape
from kernels.ops import delta_rule, linear_attention
from model.parts.linear_attention import alibi_slopes
from runtime.machine import time_steps
from tests.gpu.rates import WORST_ERROR, relative_error
from tools.common.shapes import DTYPES
from train.optimizers.adamw import Backend
from train.optimizers.config import OptimizerConfig, build_optimizer

WORST_UPDATE = 1e-5
"""The same of two optimizers' updates."""


def timed(
    ways: dict[str, Callable[..., Tensor]], inputs: Sequence[Tensor], device: str, repeats: int
) -> tuple[dict[str, float], dict[str, list[Tensor]]]:
    """Return the seconds of each way's forward + backward, and its out and gradients.

    ``given`` ends with dout.
    """
    steps = {name: forward_backward(way, *inputs) for name, way in ways.items()}
    results = {name: step() for name, step in steps.items()}
    return {
        name: median(time_steps(step, device, repeats)) for name, step in steps.items()
    }, results


def linear_beside_the_limit(
    device: str, work: MaskedShape, limits: dict[str, Any], repeats: int
) -> dict[str, Any]:
    """Time what ``auto`` takes here, and flash-linear-attention's chunk_simple_gla.

    The latter is timed where it is installed.

    ``limit_seconds`` is the longer of the chunked form's operations at the rate of matrix products
    and of reading q, k, v and dout, each in forward and backward, and writing out, dq, dk and dv at
    that of copies.
    """
    q, k, v, dout = work.tensors(device)
    log_decay = [-slope for slope in alibi_slopes(work.num_heads)]
    ways: dict[str, Callable[..., Tensor]] = {
        "ours": lambda q, k, v: linear_attention(q, k, v, log_decay)[0]
    }
    if importlib.util.find_spec("fla") is not None:
        from fla.ops.simple_gla import chunk_simple_gla

        rates = torch.tensor(log_decay, device=device)
        ways["flash-linear-attention"] = lambda *x: chunk_simple_gla(*x, g_gamma=rates, scale=1.0)[
            0
        ]
    seconds, results = timed(ways, (q, k, v, dout), device, repeats)
    busy = flops("chunked", work) / limits["matmul_tflops"][work.dtype] / 1e12
    moved = 11 * q.nbytes / limits["copy_gb_per_s"] / 1e9
    row = {"length": work.seq_length, "seconds": seconds, "limit_seconds": max(busy, moved)}
    row["of_the_limit"] = row["limit_seconds"] / seconds["ours"]
    if "flash-linear-attention" in ways:
        row["times_as_fast"] = seconds["flash-linear-attention"] / seconds["ours"]
        error = relative_error(results["ours"][:1], results["flash-linear-attention"][:1])
        row |= {"error": error} | (
            {} if error < 2e-2 else {"wrong": f"outputs differ by {error:.1e}"}
        )
    return row


def rule(backend: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Return the gated delta rule's output ``[B, T, H, E]``; log gates, beta ``[B, T, H]``."""
    return delta_rule(q * q.shape[-1] ** -0.5, k, v, g, beta, backend=backend)[0]


def delta_rules(device: str, work: MaskedShape, repeats: int) -> dict[str, Any]:
    """Time the gated delta rule by ``auto`` and by torch's chunks.

    flash-linear-attention's is timed where it is installed.
    """
    q, k, v, dout = work.tensors()
    drawn = torch.Generator().manual_seed(1)
    rates, betas = torch.randn(2, *v.shape[:3], generator=drawn)
    tensors = [
        F.normalize(q, dim=-1),
        F.normalize(k, dim=-1),
        v,
        -F.softplus(rates - 3),
        betas.sigmoid(),
    ]
    half = DTYPES[work.dtype]
    inputs = [
        *(x.to(device, half if x.ndim == 4 else x.dtype) for x in tensors),
        dout.to(device, half),
    ]
    ways: dict[str, Callable[..., Tensor]] = {
        "ours": partial(rule, "auto"),
        "chunked": partial(rule, "chunked"),
    }
    if importlib.util.find_spec("fla") is not None:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        ways["flash-linear-attention"] = lambda *x: chunk_gated_delta_rule(*x)[0]
    seconds, results = timed(ways, inputs, device, repeats)
    row: dict[str, Any] = {"length": work.seq_length, "seconds": seconds}
    row["errors"] = {name: relative_error(got, results["chunked"]) for name, got in results.items()}
    row["times_as_fast"] = {
        name: seconds[name] / seconds["ours"] for name in ways if name != "ours"
    }
    if not row["errors"]["ours"] < WORST_ERROR:
        row["wrong"] = f"the delta rule differs from torch's chunks by {row['errors']['ours']:.1e}"
    return row


def optimizers(device: str, sizes: Sequence[tuple[int, ...]], repeats: int) -> dict[str, Any]:
    """Time a step of AdamW on weights of these sizes by each backend.

    Compare the updates of three steps.
    """
    seconds, updates = dict[str, float](), dict[str, Tensor]()
    for backend in get_args(Backend):
        drawn = torch.Generator(device).manual_seed(0)
        weights = nn.ParameterList(
            torch.randn(size, device=device, generator=drawn) for size in sizes
        )
        optimizer = build_optimizer(OptimizerConfig(lr=0.1, optimizer_backend=backend), weights)
        before = [p.detach().clone() for p in weights]
        for p in weights:
            p.grad = torch.randn(p.shape, device=device, generator=drawn)
        for _ in range(3):
            optimizer.step()
        pairs = zip(weights, before, strict=True)
        updates[backend] = torch.cat([(p.detach() - was).flatten() for p, was in pairs])
        seconds[backend] = median(time_steps(optimizer.step, device, repeats))
    error = relative_error([updates["apex"]], [updates["torch"]])
    row = {"parameters": updates["torch"].numel(), "seconds": seconds, "error": error}
    return row | {
        "wrong": [f"updates differ by {error:.1e} of the 2-norm"]
        if not error <= WORST_UPDATE
        else []
    }
