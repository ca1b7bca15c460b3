"""Errors of the rotation and the gate in one launch each, against torch's operators in float64."""

import torch

from kernels import operators
from tests.kernels.attention_cases import error

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def rotary_error(dtype, device="cpu", width=20):
    """The largest error of the rotation in one launch, and of its gradient.

    The input is a slice whose tokens are its third dimension.

    Angles are each sequence's own, or those of all, with and without a first dimension.
    """
    generator = torch.Generator().manual_seed(6)
    x, dout = (
        torch.randn(2, 3, 40, width, generator=generator).to(device, dtype) for _ in range(2)
    )
    each = 9 * torch.randn(2, 37, 1, width // 2, generator=generator).to(device)
    x, dout = (tensor[:, :, 2:39].transpose(1, 2) for tensor in (x, dout))
    worst = 0.0
    for angles in (each, each[:1], each[0]):
        results = []
        for turn, accum_dtype in (
            (operators._Rotated.apply, dtype),
            (operators.rotate_unfused, torch.float64),
        ):
            leaf, exact = (
                x.detach().to(accum_dtype).requires_grad_(),
                angles.to(torch.promote_types(accum_dtype, torch.float32)),
            )
            out = turn(leaf, exact.cos(), exact.sin())
            results.append((out.detach(), *torch.autograd.grad(out, leaf, dout.to(accum_dtype))))
        assert results[0][0].dtype == results[0][1].dtype == dtype
        worst = max(worst, *(error(a, b) for a, b in zip(*results, strict=True)))
    return worst


def gate_errors(dtype, device="cpu", faulty=False, activation="silu"):
    """The errors of the gate in one launch and of both gradients, on numbers that no block divides.

    With ``faulty``, up and gate are in each other's place.
    """
    from kernels.triton import pointwise as launched

    generator = torch.Generator().manual_seed(8)
    gate, up, dout = (
        4 * torch.randn(3, 7, 150, generator=generator).to(device, dtype) for _ in range(3)
    )
    exact = [x.double().requires_grad_() for x in (gate, up)]
    out = operators.ACTIVATIONS[activation][0](exact[0]) * exact[1]
    want = out.detach(), *torch.autograd.grad(out, exact, dout.double())
    if faulty:
        gate, up = up, gate
    dout = dout.mT.contiguous().mT
    actual = (
        launched.gated(gate, up, activation),
        *launched.gated_backward(dout, gate, up, activation),
    )
    assert {x.dtype for x in actual} == {dtype}
    return [error(a, b) for a, b in zip(actual, want, strict=True)]


def report():
    """Return the errors, and those of two faults."""
    summary = {f"rotary {name}": rotary_error(dtype) for name, dtype in DTYPES.items()}
    summary |= {f"gate {name}": max(gate_errors(dtype)) for name, dtype in DTYPES.items()}
    summary |= {
        f"gelu {name}": max(gate_errors(dtype, activation="gelu")) for name, dtype in DTYPES.items()
    }
    return summary | {"faulty": min(gate_errors(torch.float32, faulty=True))}
