"""A function over chunks of rows is the function: results, gradients, and what is kept."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from kernels.chunks import over_chunks, sum_over_chunks

ROWS, WIDTH, INSIDE = 13, 6, 40  # of which no size but 1 and all divides the rows


def problem(dtype=torch.float64):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, INSIDE), nn.GELU(), nn.Linear(INSIDE, WIDTH)).to(dtype)
    return module, torch.randn(ROWS, WIDTH, dtype=dtype, requires_grad=True), torch.randn(ROWS, WIDTH, dtype=dtype)


def gradients(out, dout, module, x):
    return [out, *torch.autograd.grad(out, [x, *module.parameters()], dout)]


def chunked(module, x, size):
    return over_chunks(lambda part, _: module(part), x, size, tuple(module.parameters()))


def furthest(got, want):
    return max(((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("size", [1, 4, ROWS, 100])
def test_equals_the_whole_at_once(size):
    module, x, dout = problem()
    want = gradients(module(x), dout, module, x)
    assert furthest(gradients(chunked(module, x, size), dout, module, x), want) < 1e-14


def summed(module, x, dout, size):
    parameters = tuple(module.parameters())
    return sum_over_chunks(lambda part, rows: (module(part) * dout[rows]).sum(), x, size, parameters)


@pytest.mark.parametrize("size", [1, 4, 100])
def test_a_sum_and_the_rows_it_is_told(size):
    module, x, dout = problem()
    factor = torch.tensor(3.0).double()
    want = gradients((module(x) * dout).sum(), factor, module, x)
    assert furthest(gradients(summed(module, x, dout, size), factor, module, x), want) < 1e-14


def test_a_sum_computes_its_chunks_once():
    _, x, _ = problem()
    weight = torch.randn(INSIDE, WIDTH, dtype=x.dtype, requires_grad=True)  # no module, whose calls the counter follows

    def squares(part, _=slice(None)):
        return (part @ weight.t()).square().sum()

    counts = []
    for run in (lambda: squares(x), lambda: sum_over_chunks(squares, x, 4, (weight,))):
        with FlopCounterMode(display=False) as counter:
            run().backward()
        counts.append(counter.get_total_flops())
    assert counts == [3 * 2 * ROWS * WIDTH * INSIDE] * 2


def test_a_sum_that_needs_no_gradient_computes_none():
    module, x, dout = problem()
    seen = []

    def noted(part, _):
        seen.append(torch.is_grad_enabled())
        return module(part).sum()

    with torch.no_grad():
        sum_over_chunks(noted, x, 4, tuple(module.parameters()))
    sum_over_chunks(noted, x, 4, tuple(module.parameters()))
    assert seen == [False] * 4 + [True] * 4
    module.requires_grad_(False)
    (dx,) = torch.autograd.grad(summed(module, x, dout, 4), x)
    assert furthest([dx], list(torch.autograd.grad((module(x) * dout).sum(), x))) < 1e-14


def test_a_sum_in_a_checkpoint_computes_each_chunk_once():
    _, x, _ = problem()
    weight, calls = torch.randn(INSIDE, WIDTH, dtype=x.dtype, requires_grad=True), list[slice]()

    def squares(part, rows):
        calls.append(rows)
        return (part @ weight.t()).square().sum()

    found = checkpoint(lambda given: sum_over_chunks(squares, given, 4, (weight,)), x, use_reentrant=False)
    (got,) = torch.autograd.grad(found, weight)
    assert len(calls) == 4  # what checkpoints keep for the backward is not asked for
    assert furthest([got], list(torch.autograd.grad((x @ weight.t()).square().sum(), weight))) < 1e-14


def test_a_sum_has_one_backward():
    module, x, dout = problem()
    total = summed(module, x, dout, 4)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="kept for one backward"):
        total.backward()


def test_what_needs_no_gradient_gets_none():
    module, x, dout = problem()
    module[0].weight.requires_grad_(False)
    chunked(module, x.detach(), 4).backward(dout)
    assert module[0].weight.grad is None
    want = torch.autograd.grad(module(x), module[2].weight, dout)[0]
    assert torch.allclose(module[2].weight.grad, want, rtol=1e-13)
    with torch.no_grad():
        assert not chunked(module, x, 4).requires_grad


def test_keeps_its_rows_alone():
    module, x, _ = problem()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        chunked(module, x, 4)
    assert [t.data_ptr() for t in kept] == [x.data_ptr()]


def by_autograd(module, x, size):
    """Autograd's own sum over the chunks, in the weights' dtype, which over_chunks improves on."""
    return torch.cat([module(part) for part in x.split(size)])


def test_gradients_of_bfloat16_weights_are_rounded_once():
    torch.manual_seed(0)
    module = nn.Linear(WIDTH, INSIDE, bias=False).bfloat16()
    x, dout = (torch.randn(512, width).abs().bfloat16() for width in (WIDTH, INSIDE))  # sums that grow
    errors = {}
    exact = dout.double().T @ x.double()
    for run in (chunked, by_autograd):
        errors[run] = furthest(list(torch.autograd.grad(run(module, x, 1), module.weight, dout)), [exact])
    assert errors[chunked] < 2**-8
    assert errors[by_autograd] > 4 * errors[chunked]


def test_a_dropped_chunk_is_noticed(monkeypatch):
    """Negative control: the comparison above fails where the backward leaves out the last chunk."""
    module, x, dout = problem()
    want = gradients(module(x), dout, module, x)
    out = chunked(module, x, 4)
    import kernels.chunks

    chunks = kernels.chunks._chunks
    monkeypatch.setattr(kernels.chunks, "_chunks", lambda x, size: list(chunks(x, size))[:-1])
    assert furthest(gradients(out, dout, module, x)[2:], want[2:]) > 1e-2
