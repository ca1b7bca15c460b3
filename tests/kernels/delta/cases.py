"""Inputs of the delta rule, and errors of a backend.

The errors are against the recurrence token by token in float64.
"""

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference
from kernels.delta import rule
from kernels.ops import delta_rule

NAMES = ("out", "final", "dq", "dk", "dv", "dg", "dbeta", "dstate")
BOUND = 5e-6
"""Error relative to the norm, in float32."""


class Case(NamedTuple):
    """Inputs of a rule with 2 key heads."""

    length: int
    shared: int = 1
    """Value heads of a key head."""
    per_channel: bool = False
    cu_seqlens: tuple[int, ...] | None = None
    gate: float = 0.3
    """The gate of every eighth token; 0.3 times a random number elsewhere."""
    beta: float = 2.0
    equal_keys: bool = False
    width: int = 16
    values: int = 24
    batch: int = 2
    dtype: str = "float32"
    """Inputs of Triton's kernels."""


PACKED = (0, 1, 64, 130, 131, 200)
TRITON = [
    Case(1),
    Case(65, batch=1),
    Case(130, cu_seqlens=(0, 1, 63, 129, 130), batch=1),
    Case(66, cu_seqlens=(0, 1, 63, 66), batch=1, dtype="bfloat16"),
    Case(10, 3, cu_seqlens=(0, 3, 10), batch=1),
    Case(66, width=40, values=70, batch=1),  # more channels than a block, and no power of two
    Case(40, width=130, batch=1),  # chunks of 32 tokens
    Case(70, gate=1000.0, beta=1.0, width=32, batch=1),
    Case(70, gate=0.0, beta=2.0, equal_keys=True, batch=1),
    Case(70, gate=100.0, beta=2.0, equal_keys=True, cu_seqlens=(0, 1, 64, 70), batch=1),
]
TRITON_ON_A_GPU = [
    *TRITON,
    Case(70, 3, cu_seqlens=(0, 3, 7, 70), batch=1),
    Case(130, cu_seqlens=(0, 1, 63, 129, 130), batch=1, dtype="bfloat16"),
    Case(70, gate=100.0, beta=1.0, width=32, batch=1),
    Case(70, beta=1.0, equal_keys=True, batch=1),
    *(Case(1000, 2, width=128, values=128, dtype=dtype) for dtype in ("float32", "bfloat16")),
]


def inputs(case):
    """q, k, v, g, beta and state, in float64."""
    generator = torch.Generator().manual_seed(case.length)

    def draw(*shape: int) -> Tensor:
        return torch.randn(case.batch, *shape, generator=generator, dtype=torch.float64)

    heads = 2 * case.shared
    q, k = (F.normalize(draw(case.length, 2, case.width), dim=-1) for _ in range(2))
    k = k[:, :1].expand_as(k) if case.equal_keys else k
    g = -0.3 * draw(case.length, heads, *([case.width] if case.per_channel else [])).abs()
    g[:, ::8] = -case.gate
    g = 0 * g if case.gate == 0 else g
    beta = case.beta * torch.sigmoid(draw(case.length, heads))
    v, state = draw(case.length, heads, case.values), draw(heads, case.width, case.values)
    return [q * case.width**-0.5, k, v, g, beta, state]


def results(case, backend, dtype=torch.float64, device="cpu"):
    """Compute ``NAMES`` from inputs in a dtype, with the state's in float32 or wider."""
    leaves = inputs(case)
    leaves = [x.to(device, dtype).contiguous().requires_grad_() for x in leaves[:5]] + [
        leaves[5].to(device, wide(dtype))
    ]
    state = leaves[5].requires_grad_()
    outputs = delta_rule(*leaves[:5], state, cu_seqlens=case.cu_seqlens, backend=backend)
    generator = torch.Generator().manual_seed(1)
    gradients = [
        torch.randn(x.shape, generator=generator, dtype=torch.float64).to(device, x.dtype)
        for x in outputs
    ]
    return [*outputs, *torch.autograd.grad(outputs, leaves, gradients)]


def wide(dtype):
    return torch.promote_types(dtype, torch.float32)


@cache
def _truth(case):
    return results(case, "reference")


def errors(case, actual):
    """Errors relative to the norms of the recurrence in float64."""
    return {
        name: ((a.cpu().double() - b).norm() / b.norm().clamp(min=1e-30)).item()
        for name, a, b in zip(NAMES, actual, _truth(case._replace(dtype="float64")), strict=True)
    }


def errors_of_triton(case, device="cpu"):
    """The same of Triton's kernels in the case's dtype."""
    return errors(case, results(case, "triton", getattr(torch, case.dtype), device))


def errors_of_a_wide_scan(backend):
    """Errors of outputs, states and gradients over two slabs, from the map of any state."""
    *leaves, state = (x.float() for x in inputs(Case(130, batch=1)))
    leaves[3] *= 0.01  # so that much of the state reaches the end
    want, final = reference.delta_rule(*(x.double() for x in (*leaves, state)))
    out, reads, states = rule.wide_scan(*leaves, backend=backend)
    added, through = states[-1].split([24, 16], -1)
    outputs = out + torch.einsum("bthd,bhde->bthe", reads, state), through @ state + added
    return len(states), [
        ((a - b).norm() / b.norm()).item() for a, b in zip(outputs, (want, final), strict=True)
    ]


def _faults():
    """Errors with a fault each.

    The faults are documents that are not apart, and gates by differences of sums as others take
    them.
    """
    from kernels.triton import delta

    errors_by_fault, gates_with_resets, between = {}, rule.gates_with_resets, delta.decay_between
    rule.gates_with_resets = lambda g, cu_seqlens: g
    errors_by_fault["documents"] = errors_of_triton(Case(20, cu_seqlens=(0, 7, 20), batch=1))["out"]
    rule.gates_with_resets = gates_with_resets
    delta.decay_between = differences
    errors_by_fault["differences"] = errors_of_triton(TRITON[7])["out"]
    delta.decay_between = between
    return errors_by_fault


def differences(gates, C):
    """In the place of Triton's decays from token to token, from sums from the chunk's start."""
    import triton.language as tl

    sums, c = tl.cumsum(gates, 0), tl.arange(0, C)
    return tl.where(c[:, None] >= c[None, :], tl.exp(sums[:, None] - sums[None, :]), 0.0)


def report():
    """Return the errors of all cases, of a wide scan, and with faults."""
    summary = {"errors": [errors_of_triton(case) for case in TRITON], "faults": _faults()}
    rule.CPU_CHUNKS = 2  # a chunk of two heads in a slab
    summary["wide"] = errors_of_a_wide_scan("triton")
    summary["slabs"] = errors_of_triton(Case(66, batch=1))
    return summary
