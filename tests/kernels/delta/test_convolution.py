"""The short causal convolution against torch's, one document at a time, in float64."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from kernels.delta import convolution
from kernels.ops import causal_convolution

CHANNELS = 5
CASES = [
    (length, taps, cu_seqlens)
    for taps in (4, 2, 1)
    for length, cu_seqlens in (
        (1, None),
        (2, None),
        (37, None),
        (37, (0, 37)),
        (37, (0, 1, 2, 4, 7, 20, 37)),
        (6, tuple(range(7))),
    )
]


def inputs(length, taps, dtype=torch.float64):
    """x, weight, the tokens before, and the gradient of out."""
    generator = torch.Generator().manual_seed(3)
    shapes = (2, length, CHANNELS), (CHANNELS, taps), (2, taps - 1, CHANNELS), (2, length, CHANNELS)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    ]


def truth(x, weight, before=None, cu_seqlens=None):
    """torch's convolution of each document."""
    outputs = []
    for first, end in pairwise(cu_seqlens or (0, x.shape[1])):
        gap = (
            x.new_zeros(len(x), weight.shape[1] - 1, x.shape[2])
            if first or before is None
            else before
        )
        rows = torch.cat((gap, x[:, first:end]), 1).transpose(1, 2)
        outputs.append(F.conv1d(rows, weight[:, None], groups=x.shape[2]).transpose(1, 2))
    return torch.cat(outputs, 1)


def with_gradients(function, x, weight, before, dout, cu_seqlens=None):
    leaves = [
        y.detach().requires_grad_()
        for y in ((x, weight) if before is None else (x, weight, before))
    ]
    out = function(*leaves, cu_seqlens=cu_seqlens)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize(("length", "taps", "cu_seqlens"), CASES)
@pytest.mark.parametrize("continues", [False, True])
@pytest.mark.parametrize("slab", [7, convolution._SLAB])
def test_out_and_every_gradient_equal_torch(length, taps, cu_seqlens, continues, slab, monkeypatch):
    monkeypatch.setattr(convolution, "_SLAB", slab)
    x, weight, before, dout = inputs(length, taps)
    arguments = x, weight, before if continues else None, dout, cu_seqlens
    actual = with_gradients(causal_convolution, *arguments)
    torch.testing.assert_close(actual, with_gradients(truth, *arguments), rtol=1e-13, atol=1e-13)


def test_documents_and_tokens_before_are_seen():
    x, weight, before, _ = inputs(37, 4)
    whole, bounds = causal_convolution(x, weight), (0, 20, 37)
    apart = causal_convolution(x, weight, cu_seqlens=bounds)
    changed = (whole - apart).abs().amax((0, 2)) > 1e-6
    assert changed.nonzero().flatten().tolist() == [20, 21, 22]
    changed = (causal_convolution(x, weight, before, bounds) - apart).abs().amax((0, 2)) > 1e-6
    assert changed.nonzero().flatten().tolist() == [0, 1, 2]


def test_sums_of_bfloat16_are_in_float32():
    x, weight, before, dout = inputs(200, 4, torch.bfloat16)
    actual = with_gradients(causal_convolution, x, weight, before, dout)
    exact = with_gradients(truth, *(y.double() for y in (x, weight, before, dout)))
    for got, want in zip(actual, exact, strict=True):
        torch.testing.assert_close(
            got.double(), want, rtol=2**-8, atol=1e-5
        )  # half a unit in the last place


def test_it_compiles_whole():
    x, weight, before, dout = inputs(37, 4)
    bounds = (0, 1, 2, 4, 7, 20, 37)
    compiled = torch.compile(causal_convolution, fullgraph=True, backend="aot_eager")
    actual = with_gradients(compiled, x, weight, before, dout, bounds)
    want = with_gradients(causal_convolution, x, weight, before, dout, bounds)
    torch.testing.assert_close(actual, want, rtol=0, atol=0)


def test_calls_that_do_not_fit_are_named():
    x, weight, before, _ = inputs(8, 4)
    with pytest.raises(ValueError, match=r"x \(2, 8, 5\) and weight \(4, 4\)"):
        causal_convolution(x, weight[:4])
    with pytest.raises(ValueError, match=r"before has shape \(2, 2, 5\).* must be \(2, 3, 5\)"):
        causal_convolution(x, weight, before[:, 1:])
    with pytest.raises(ValueError, match="rising from 0 to the number of tokens, 8"):
        causal_convolution(x, weight, cu_seqlens=(0, 9))
