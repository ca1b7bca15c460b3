"""Products by oneDNN against torch's own, in float64 and beside its float32."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from kernels import products

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch was built without oneDNN")

SHAPES = [((2, 700), 24, 56), ((4096,), 96, 64), ((40,), 512, 8), ((33,), 8, 8)]
"""Rows, and widths in and out: sums over many rows and over many channels."""


@pytest.fixture(autouse=True)
def _onednn(monkeypatch):
    monkeypatch.setattr(products, "ONEDNN", True)


def made(rows, inside, outside):
    torch.manual_seed(7)
    shapes = (*rows, inside), (outside, inside), (outside,), (*rows, outside)
    x, weight, bias, grad = (torch.randn(shape) for shape in shapes)
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), grad


def with_gradients(function, x, weight, bias, grad):
    out = function(x, weight, bias)
    inputs = [one for one in (x, weight, bias) if one is not None]
    return [out, *torch.autograd.grad(out, inputs, grad)]


def off(found, truth):
    return max(float((a - b).detach().norm() / b.detach().norm()) for a, b in zip(found, truth, strict=True))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "inside", "outside"), SHAPES)
def test_is_as_exact_as_torchs(rows, inside, outside, biased):
    x, weight, bias, grad = made(rows, inside, outside)
    given = x, weight, bias if biased else None, grad
    truth = with_gradients(
        F.linear, *(None if one is None else one.detach().double().requires_grad_() for one in given)
    )
    found, theirs = with_gradients(products.linear, *given), with_gradients(F.linear, *given)
    assert "_Linear" in type(found[0].grad_fn.next_functions[0][0]).__name__  # it went to oneDNN
    assert off(found, truth) < 3 * max(off(theirs, truth), 2e-7)
    assert [(a.shape, a.dtype) for a in found] == [(b.shape, b.dtype) for b in theirs]
    found[2][0] += 0.01  # negative control
    assert off(found, truth) > 1e-5


def test_takes_tensors_of_any_strides():
    x, weight, _, grad = made((64,), 16, 24)
    turned = x.detach().t().contiguous().t().requires_grad_(), weight.detach().t().contiguous().t().requires_grad_()
    found = with_gradients(products.linear, *turned, None, grad.t().contiguous().t())
    assert off(found, with_gradients(F.linear, x, weight, None, grad)) < 1e-6
    (spread,) = torch.autograd.grad(products.linear(x, weight).sum(), weight)  # a gradient that is one number
    assert off([spread], list(torch.autograd.grad(F.linear(x, weight).sum(), weight))) < 1e-6


def test_may_be_added_to_in_place():
    x, weight, _, grad = made((4, 16), 16, 24)
    found = with_gradients(lambda *given: products.linear(*given).add_(1), x, weight, None, grad)
    assert off(found, with_gradients(lambda *given: F.linear(*given).add_(1), x, weight, None, grad)) < 1e-6


def test_computes_no_gradient_that_is_not_asked_for(monkeypatch):
    x, weight, _, grad = made((64,), 16, 24)
    monkeypatch.setattr(products, "weight_gradient", None)
    products.linear(x, weight.detach()).backward(grad)
    assert x.grad is not None


def test_keeps_the_input_of_trained_weights_alone():
    x, weight, _, _ = made((64,), 16, 24)
    for given, kept in (((x, weight), 2), ((x, weight.detach()), 1), ((x.detach(), weight), 1)):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda one, into=saved: into.append(one) or one, lambda one: one):
            products.linear(*given)
        assert len(saved) == kept


@pytest.mark.parametrize("change", ["float64", "bfloat16", "few rows", "another processor"])
def test_leaves_all_else_to_torch(change, monkeypatch):
    x, weight, _, _ = made((4,) if change == "few rows" else (64,), 16, 24)
    if change == "another processor":
        monkeypatch.setattr(products, "ONEDNN", False)
    elif change != "few rows":
        x, weight = (one.detach().to(getattr(torch, change)).requires_grad_() for one in (x, weight))
    monkeypatch.setattr(products, "product", None)
    assert torch.equal(products.linear(x, weight), F.linear(x, weight))


def test_counts_its_operations():
    counts = []
    for function in (products.linear, F.linear):
        with FlopCounterMode(display=False) as counter:
            with_gradients(function, *made((700,), 24, 56))
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] == 3 * 2 * 700 * 24 * 56


@pytest.mark.slow
@pytest.mark.needs("g++", "as", "ld")
def test_compiles_as_one_graph():
    x, weight, bias, grad = made((700,), 24, 56)
    compiled = torch.compile(lambda *given: F.silu(products.linear(*given)), fullgraph=True, dynamic=False)
    eager = with_gradients(lambda *given: F.silu(products.linear(*given)), x, weight, bias, grad)
    assert off(with_gradients(compiled, x, weight, bias, grad), eager) < 1e-6
