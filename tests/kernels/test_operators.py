"""Products by oneDNN against torch's own, in float64 and beside its float32.

The gate is compared with torch's operators.
"""

from itertools import product

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from kernels import operators
from kernels.operators import ACTIVATIONS, gated

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch was built without oneDNN"
)

SHAPES = [((2, 700), 24, 56), ((4096,), 96, 64), ((40,), 512, 8), ((33,), 8, 8)]
"""Rows, and widths in and out: sums over many rows and over many channels."""


@pytest.fixture(autouse=True)
def _onednn(monkeypatch):
    monkeypatch.setattr(operators, "ONEDNN", True)


def made(rows, inside, outside):
    torch.manual_seed(7)
    shapes = (*rows, inside), (outside, inside), (outside,), (*rows, outside)
    x, weight, bias, grad = (torch.randn(shape) for shape in shapes)
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), grad


def with_gradients(function, x, weight, bias, grad):
    out = function(x, weight, bias)
    inputs = [tensor for tensor in (x, weight, bias) if tensor is not None]
    return [out, *torch.autograd.grad(out, inputs, grad)]


def off(actual, truth):
    return max(
        float((a - b).detach().norm() / b.detach().norm())
        for a, b in zip(actual, truth, strict=True)
    )


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "inside", "outside"), SHAPES)
def test_is_as_exact_as_torchs(rows, inside, outside, biased):
    x, weight, bias, grad = made(rows, inside, outside)
    tensors = x, weight, bias if biased else None, grad
    truth = with_gradients(
        F.linear,
        *(
            None if tensor is None else tensor.detach().double().requires_grad_()
            for tensor in tensors
        ),
    )
    actual, theirs = with_gradients(operators.linear, *tensors), with_gradients(F.linear, *tensors)
    assert "_Linear" in type(actual[0].grad_fn.next_functions[0][0]).__name__  # it went to oneDNN
    assert off(actual, truth) < 3 * max(off(theirs, truth), 2e-7)
    assert [(a.shape, a.dtype) for a in actual] == [(b.shape, b.dtype) for b in theirs]
    actual[2][0] += 0.01  # negative control
    assert off(actual, truth) > 1e-5


def test_takes_tensors_of_any_strides():
    x, weight, _, grad = made((64,), 16, 24)
    turned = (
        x.detach().t().contiguous().t().requires_grad_(),
        weight.detach().t().contiguous().t().requires_grad_(),
    )
    actual = with_gradients(operators.linear, *turned, None, grad.t().contiguous().t())
    assert off(actual, with_gradients(F.linear, x, weight, None, grad)) < 1e-6
    (spread,) = torch.autograd.grad(
        operators.linear(x, weight).sum(), weight
    )  # a gradient that is one number
    assert off([spread], list(torch.autograd.grad(F.linear(x, weight).sum(), weight))) < 1e-6


def test_computes_no_gradient_that_is_not_asked_for(monkeypatch):
    x, weight, _, grad = made((64,), 16, 24)
    monkeypatch.setattr(operators, "weight_gradient", None)
    operators.linear(x, weight.detach()).backward(grad)
    assert x.grad is not None


def test_keeps_the_input_of_trained_weights_alone():
    x, weight, _, _ = made((64,), 16, 24)
    for inputs, num_saved in (
        ((x, weight), 2),
        ((x, weight.detach()), 1),
        ((x.detach(), weight), 1),
    ):
        saved = []
        with saved_tensors_hooks(
            lambda tensor, into=saved: into.append(tensor) or tensor, lambda tensor: tensor
        ):
            operators.linear(*inputs)
        assert len(saved) == num_saved


@pytest.mark.parametrize("change", ["float64", "bfloat16", "few rows", "another processor"])
def test_leaves_all_else_to_torch(change, monkeypatch):
    x, weight, _, _ = made((4,) if change == "few rows" else (64,), 16, 24)
    if change == "another processor":
        monkeypatch.setattr(operators, "ONEDNN", False)
    elif change != "few rows":
        x, weight = (
            tensor.detach().to(getattr(torch, change)).requires_grad_() for tensor in (x, weight)
        )
    monkeypatch.setattr(operators, "product", None)
    assert torch.equal(operators.linear(x, weight), F.linear(x, weight))


def test_counts_its_operations():
    counts = []
    for function in (operators.linear, F.linear):
        with FlopCounterMode(display=False) as counter:
            with_gradients(function, *made((700,), 24, 56))
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] == 3 * 2 * 700 * 24 * 56


@pytest.mark.slow
@pytest.mark.needs("g++", "as", "ld")
def test_compiles_as_one_graph():
    x, weight, bias, grad = made((700,), 24, 56)
    compiled = torch.compile(
        lambda *args: F.silu(operators.linear(*args)), fullgraph=True, dynamic=False
    )
    eager = with_gradients(lambda *args: F.silu(operators.linear(*args)), x, weight, bias, grad)
    assert off(with_gradients(compiled, x, weight, bias, grad), eager) < 1e-6


def kept(gate, up, activation, fused):
    """The result and the gradients of gate and up, and how many tensors were kept for them."""
    saved = []
    with saved_tensors_hooks(lambda x: saved.append(x.data_ptr()) or x, lambda x: x):
        out = gated(gate, up, activation) if fused else ACTIVATIONS[activation][0](gate) * up
    return [out.detach(), *torch.autograd.grad(out, (gate, up), out.detach().cos())], len(
        set(saved)
    )


def test_the_gate_keeps_its_inputs_alone_and_changes_no_bit():
    for dtype, activation in product((torch.float64, torch.float32, torch.bfloat16), ACTIVATIONS):
        gate, up = (torch.randn(3, 50, dtype=dtype, requires_grad=True) for _ in range(2))
        (got, ours), (want, torchs) = (kept(gate, up, activation, fused) for fused in (True, False))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert (ours, torchs) == (2, 3)
