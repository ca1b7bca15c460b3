"""Errors of a backend of linear attention against the float64 reference.

An error is the larger of two: Frobenius' relative to the result's norm, and the largest relative to
the largest value.
"""

import math
from functools import cache
from typing import Any, NamedTuple

import torch

from kernels import reference
from kernels.ops import linear_attention

NAMES = ("out", "final", "dq", "dk", "dv", "dstate")
BOUND = 1e-5


class Case(NamedTuple):
    """One input, with three kinds of decay.

    Decay 1 has no forgetting, 0.2 has forgotten all after a few tokens, and one head is in between.
    """

    length: int
    dtype: str = "float32"
    cu_seqlens: tuple[int, ...] | None = None
    decays: tuple[float, ...] = (1.0, 0.93, 0.2)
    width: int = 16
    value_width: int = 24
    batch: int = 1
    programs: int = 1
    """The scan of Triton is cut for so many programs; 1 leaves each document in one piece."""


LENGTHS = (1, 63, 64, 65, 200)
PACKED = (0, 1, 64, 130, 131, 200)
CASES = [
    *(Case(length, batch=1 + (length == 65)) for length in LENGTHS),
    *(Case(length, "bfloat16") for length in (1, 65, 200)),
    Case(200, cu_seqlens=PACKED, decays=(1.0, 0.93)),
    Case(
        70, width=20, value_width=70
    ),  # more value channels than one program takes, and neither a power of two
    Case(70, dtype="bfloat16", width=256, value_width=33),
]
CUT = [  # with decays that remember more than a segment
    Case(
        200, decays=(1.0, 0.99), programs=6
    ),  # segments of 2, 2 and 3 chunks, the last of 8 tokens
    Case(
        200, cu_seqlens=(0, 20, 64, 190, 200), decays=(0.99,), programs=3
    ),  # 1; 2, without a state; 2, 2; 1
    Case(130, "bfloat16", (0, 1, 64, 130), (0.99,), programs=528),  # every chunk alone
]
"""Documents in several segments.

A few bounds of segments are ends of documents; none lies within one.
"""
INTERPRETED = [*(case for case in CASES if (case.length, case.dtype) != (200, "bfloat16")), *CUT]
FAR = [
    *(
        Case(length, dtype)
        for length in (2, 127, 128, 129, 1000, 2048, 4095, 4096, 4097)
        for dtype in ("float32", "bfloat16")
    ),
    *(Case(4097, dtype, (0, 1000, 3000, 4097)) for dtype in ("float32", "bfloat16")),
]
CUT_FAR = [
    Case(length, dtype, cu_seqlens, (1.0, 0.999, 0.93), value_width=70, programs=528)
    for length, cu_seqlens in (
        (129, None),
        (1000, None),
        (4097, None),
        (4097, (0, 1, 64, 1000, 4096, 4097)),
    )
    for dtype in ("float32", "bfloat16")
]


def inputs(case):
    """q, k, v, state, and the gradients of out and final; states in float32 or wider."""
    generator = torch.Generator().manual_seed(case.length)
    heads, dtype = len(case.decays), getattr(torch, case.dtype)
    accum_dtype = torch.promote_types(dtype, torch.float32)

    def draw(*shape, dtype=dtype):
        return torch.randn(case.batch, *shape, generator=generator, dtype=torch.float64).to(dtype)

    keys, values = (case.length, heads, case.width), (case.length, heads, case.value_width)
    state = (heads, case.width, case.value_width)
    leaves = [draw(*keys), draw(*keys), draw(*values), draw(*state, dtype=accum_dtype)]
    return leaves, [draw(*values), draw(*state, dtype=accum_dtype)]


def results(case, backend, dtype=None, device="cpu"):
    """The tensors in ``NAMES`` by a backend; with a dtype, from inputs of that dtype."""
    leaves, gradients = ([x.to(device, dtype or x.dtype) for x in group] for group in inputs(case))
    leaves = [x.requires_grad_() for x in leaves]
    log_decay = [math.log(decay) for decay in case.decays]
    outputs = linear_attention(
        *leaves[:3], log_decay, leaves[3], cu_seqlens=case.cu_seqlens, backend=backend
    )
    matching = [gradient.to(x.dtype) for gradient, x in zip(gradients, outputs, strict=True)]
    return [*outputs, *torch.autograd.grad(outputs, leaves, matching)]


def errors(case, backend, device="cpu"):
    """Each result's error against the reference in float64."""
    if backend == "triton":
        from kernels.triton import linear_attention as fused

        fused.PROGRAMS = case.programs
    return _compared([x.cpu() for x in results(case, backend, device=device)], case)


@cache
def naive_errors(case):
    """The same of the naive form computed in the case's own dtype."""
    leaves, gradients = inputs(case)
    leaves = [x.to(leaves[0].dtype).requires_grad_() for x in leaves]
    log_decay = [math.log(decay) for decay in case.decays]
    outputs = reference.linear_attention(
        *leaves[:3], log_decay, leaves[3], cu_seqlens=case.cu_seqlens
    )
    return _compared([*outputs, *torch.autograd.grad(outputs, leaves, gradients)], case)


def within_bounds(case, errors_by_name):
    """Return whether errors are within ``BOUND`` in float32.

    In bfloat16 they are within twice the naive form's.

    States are float32 in both, and the naive form's can be exact by luck: its own rounding is
    always allowed.
    """
    if case.dtype == "float32":
        return max(errors_by_name.values()) <= BOUND
    return all(
        errors_by_name[name] <= max(2 * naive, BOUND / 10)
        for name, naive in naive_errors(case).items()
    )


@cache
def _truth(case):
    return results(case, "reference", torch.float64)


def _compared(got, case):
    return {name: error(a.double(), b) for name, a, b in zip(NAMES, got, _truth(case), strict=True)}


def error(a, b):
    """The relative difference of a from b, see above."""
    return max(((a - b).norm() / b.norm()).item(), ((a - b).abs().max() / b.abs().max()).item())


def report():
    """Return the errors of all cases, those with a fault each, and of outputs in both widths."""
    from kernels.triton import linear_attention as fused

    (q, k, v, _), _ = inputs(Case(65, "bfloat16"))
    want, _ = reference.linear_attention(q.double(), k.double(), v.double(), (0.0, -0.1, -0.2))
    outs = [fused.scan(q, k, v, (0.0, -0.1, -0.2), accum_out=accum)[0] for accum in (False, True)]
    widths = {str(out.dtype): ((out.double() - want).norm() / want.norm()).item() for out in outs}
    errors_by_case = [errors(case, "triton") for case in INTERPRETED]
    fused.PROGRAMS = 528
    pairs = [
        [fused.scan(x, k, v, (-0.01,) * 3, reverse=reverse)[1] for x in (q, None)]
        for reverse in (False, True)
    ]
    alone = [torch.equal(*pair) for pair in pairs]
    return {"errors": errors_by_case, "faults": _faults(fused), "widths": widths, "alone": alone}


def report_far():
    return {"errors": [errors(case, "triton") for case in (*FAR, *CUT_FAR)]}


def _faults(fused):
    """The errors with a fault each.

    Decays are wrong by a hundredth, or none from segment to segment, or documents are not apart.
    """
    constants, carry, segments_of = fused.constants, fused.carry_kernel, fused.segments_of
    cut = Case(70, cu_seqlens=(0, 33, 70), decays=(0.99,), programs=4)
    errors_by_fault = {}
    fused.constants = lambda *arguments: 1.01 * constants(*arguments)
    errors_by_fault["decay"] = errors(Case(65), "triton")
    fused.constants = constants
    fused.carry_kernel = _Undecayed(carry)
    errors_by_fault["carried"] = errors(cut, "triton")
    fused.carry_kernel = carry
    fused.segments_of = lambda *arguments: _joined(*segments_of(*arguments))
    errors_by_fault["documents"] = errors(cut, "triton")
    return errors_by_fault


def _joined(bounds, steps):
    """The same without starts of documents."""
    return bounds, steps * torch.tensor([[1], [0]], dtype=torch.int32)


class _Undecayed(NamedTuple):
    """The kernel that carries states, without their decay."""

    kernel: Any

    def __getitem__(self, grid):
        return lambda states, state, final, rates, *rest, **flags: self.kernel[grid](
            states, state, final, 0 * rates, *rest, **flags
        )
