"""The summed cross entropy is its definition, also over chunks of rows.

A function over chunks is the function, in what it keeps too.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import kernels.loss
from kernels.loss import cross_entropy_sum, over_chunks, sum_over_chunks

ROWS, WIDTH, INSIDE = 13, 6, 40  # of which no size but 1 and all divides the rows


def naive(logits, labels, ignore_index=-100):
    """The definition, a token at a time, in float64."""
    losses = [
        -torch.log_softmax(row.double(), dim=-1)[label]
        for row, label in zip(
            logits.reshape(-1, logits.shape[-1]), labels.flatten().tolist(), strict=True
        )
        if label != ignore_index
    ]
    return sum(losses, torch.zeros((), dtype=torch.float64)), len(losses)


def problem(dtype, shape=(3, 7), vocabulary=50):
    torch.manual_seed(0)
    logits = (4 * torch.randn(*shape, vocabulary)).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, shape)
    labels[0, 2:5] = -100
    return logits, labels


# Gradients are rounded to the logits' dtype once: at most 2^-8 of an entry for bf16, and entries
# are at most 1.
@pytest.mark.parametrize(
    ("dtype", "loss_bound", "grad_bound"),
    [(torch.float64, 1e-13, 1e-14), (torch.float32, 1e-6, 5e-7), (torch.bfloat16, 1e-6, 2**-8)],
)
@pytest.mark.parametrize(
    "chunk", [1, 170, 1 << 24]
)  # a row, some rows with a rest, everything at a time
def test_matches_the_definition(monkeypatch, dtype, loss_bound, grad_bound, chunk):
    monkeypatch.setitem(kernels.loss.LOSS_CHUNK, "cpu", chunk)
    logits, labels = problem(dtype)
    expected, count = naive(logits, labels)
    expected_grad = torch.autograd.grad(3.0 * expected, logits)[0]
    loss, valid = cross_entropy_sum(logits, labels)
    (3.0 * loss).backward()
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert valid.dtype == torch.int64
    assert valid.item() == count == 18
    assert abs(loss.item() - expected.item()) <= loss_bound * expected.item()
    assert logits.grad.dtype == dtype
    assert (logits.grad - expected_grad).abs().max() <= 3 * grad_bound


def test_bound_sees_a_loss_in_bf16():
    """Negative control: the same loss computed in bf16 is outside the bound."""
    logits, labels = problem(torch.bfloat16)
    expected, _ = naive(logits, labels)
    rounded = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    assert abs(rounded.item() - expected.item()) > 1e-6 * expected.item()


def test_ignored_tokens_carry_neither_loss_nor_gradient():
    logits, labels = problem(torch.float32)
    with torch.no_grad():
        logits[0, 2] = float("inf")  # nan wherever it is computed with
        logits[0, 3] = float("nan")
    loss, _ = cross_entropy_sum(logits, labels)
    loss.backward()
    assert loss.isfinite()
    assert logits.grad.isfinite().all()
    assert not logits.grad[labels == -100].any()
    assert logits.grad[labels != -100].any(dim=-1).all()


def test_no_valid_token_extreme_logits_and_another_ignore_index():
    logits, labels = problem(torch.float32)
    loss, valid = cross_entropy_sum(logits, torch.full_like(labels, -100))
    loss.backward()
    assert (loss.item(), valid.item(), logits.grad.abs().max().item()) == (0, 0, 0)

    extreme = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    loss, _ = cross_entropy_sum(extreme, torch.tensor([1]))
    loss.backward()
    assert (loss.item(), extreme.grad.tolist()) == (2e4, [[1.0, -1.0, 0.0]])

    loss, valid = cross_entropy_sum(logits, labels.where(labels != -100, 7), ignore_index=7)
    expected, count = naive(logits, labels.where((labels != -100) & (labels != 7), -100))
    assert valid.item() == count
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    with pytest.raises(ValueError, match="must agree"):
        cross_entropy_sum(logits, labels[:, 1:])


def test_keeps_nothing_of_the_logits_size_but_the_logits():
    logits, labels = problem(torch.bfloat16)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        cross_entropy_sum(logits, labels)
    large = [x for x in saved if x.numel() >= logits.numel()]
    assert [x.data_ptr() for x in large] == [logits.data_ptr()]


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device; make gpu-check runs it"
)
@pytest.mark.parametrize(("dtype", "grad_bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_cuda_matches_float64_with_little_memory(dtype, grad_bound):
    torch.manual_seed(0)
    logits = (4 * torch.randn(2, 2048, 32_000, device="cuda")).to(dtype).requires_grad_()
    labels = torch.randint(32_000, (2, 2048), device="cuda")
    labels[1, 100:900] = -100
    exact = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(exact.flatten(0, 1), labels.flatten(), reduction="sum")
    expected.backward()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss, valid = cross_entropy_sum(logits, labels)
    loss.backward()
    # The gradient, and two float32 chunks at most (the copy and what logsumexp needs inside).
    gradient = logits.numel() * logits.element_size()
    assert (
        torch.cuda.max_memory_allocated() - before
        < gradient + 3 * 4 * kernels.loss.LOSS_CHUNK["cuda"]
    )
    assert valid.item() == 2 * 2048 - 800
    assert abs(loss.item() - expected.item()) < 1e-6 * expected.item()
    assert (logits.grad - exact.grad).abs().max() < grad_bound


def feed_forward(dtype=torch.float64):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, INSIDE), nn.GELU(), nn.Linear(INSIDE, WIDTH)).to(dtype)
    return (
        module,
        torch.randn(ROWS, WIDTH, dtype=dtype, requires_grad=True),
        torch.randn(ROWS, WIDTH, dtype=dtype),
    )


def gradients(out, dout, module, x):
    return [out, *torch.autograd.grad(out, [x, *module.parameters()], dout)]


def chunked(module, x, size):
    return over_chunks(lambda part, _: module(part), x, size, tuple(module.parameters()))


def furthest(got, want):
    return max(
        ((a.double() - b.double()).norm() / b.double().norm()).item()
        for a, b in zip(got, want, strict=True)
    )


@pytest.mark.parametrize("size", [1, 4, ROWS, 100])
def test_equals_the_whole_at_once(size):
    module, x, dout = feed_forward()
    want = gradients(module(x), dout, module, x)
    assert furthest(gradients(chunked(module, x, size), dout, module, x), want) < 1e-14


def summed(module, x, dout, size):
    parameters = tuple(module.parameters())
    return sum_over_chunks(
        lambda part, rows: (module(part) * dout[rows]).sum(), x, size, parameters
    )


@pytest.mark.parametrize("size", [1, 4, 100])
def test_a_sum_and_the_rows_it_is_told(size):
    module, x, dout = feed_forward()
    factor = torch.tensor(3.0).double()
    want = gradients((module(x) * dout).sum(), factor, module, x)
    assert furthest(gradients(summed(module, x, dout, size), factor, module, x), want) < 1e-14


def test_a_sum_that_needs_no_gradient_computes_none():
    module, x, dout = feed_forward()
    grad_modes = []

    def noted(part, _):
        grad_modes.append(torch.is_grad_enabled())
        return module(part).sum()

    with torch.no_grad():
        sum_over_chunks(noted, x, 4, tuple(module.parameters()))
    sum_over_chunks(noted, x, 4, tuple(module.parameters()))
    assert grad_modes == [False] * 4 + [True] * 4
    module.requires_grad_(False)
    (dx,) = torch.autograd.grad(summed(module, x, dout, 4), x)
    assert furthest([dx], list(torch.autograd.grad((module(x) * dout).sum(), x))) < 1e-14


def test_a_sum_in_a_checkpoint_computes_each_chunk_once():
    _, x, _ = feed_forward()
    weight, calls = torch.randn(INSIDE, WIDTH, dtype=x.dtype, requires_grad=True), list[slice]()

    def squares(part, rows):
        calls.append(rows)
        return (part @ weight.t()).square().sum()

    total = checkpoint(
        lambda chunk_rows: sum_over_chunks(squares, chunk_rows, 4, (weight,)),
        x,
        use_reentrant=False,
    )
    (got,) = torch.autograd.grad(total, weight)
    assert len(calls) == 4  # what checkpoints keep for the backward is not asked for
    assert (
        furthest([got], list(torch.autograd.grad((x @ weight.t()).square().sum(), weight))) < 1e-14
    )


def test_a_sum_has_one_backward():
    module, x, dout = feed_forward()
    total = summed(module, x, dout, 4)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="gradients for one backward"):
        total.backward()


def test_what_needs_no_gradient_gets_none():
    module, x, dout = feed_forward()
    module[0].weight.requires_grad_(False)
    chunked(module, x.detach(), 4).backward(dout)
    assert module[0].weight.grad is None
    want = torch.autograd.grad(module(x), module[2].weight, dout)[0]
    assert torch.allclose(module[2].weight.grad, want, rtol=1e-13)
    with torch.no_grad():
        assert not chunked(module, x, 4).requires_grad


def test_keeps_its_rows_alone():
    module, x, _ = feed_forward()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        chunked(module, x, 4)
    assert [t.data_ptr() for t in saved] == [x.data_ptr()]


def by_autograd(module, x, size):
    """Autograd's own sum over the chunks, in the weights' dtype, which over_chunks improves on."""
    return torch.cat([module(part) for part in x.split(size)])


def test_gradients_of_bfloat16_weights_are_rounded_once():
    torch.manual_seed(0)
    module = nn.Linear(WIDTH, INSIDE, bias=False).bfloat16()
    x, dout = (
        torch.randn(512, width).abs().bfloat16() for width in (WIDTH, INSIDE)
    )  # sums that grow
    errors = {}
    exact = dout.double().T @ x.double()
    for run in (chunked, by_autograd):
        errors[run] = furthest(
            list(torch.autograd.grad(run(module, x, 1), module.weight, dout)), [exact]
        )
    assert errors[chunked] < 2**-8
    assert errors[by_autograd] > 4 * errors[chunked]


def test_a_dropped_chunk_is_noticed(monkeypatch):
    """Negative control: the comparison above fails where the backward leaves out the last chunk."""
    module, x, dout = feed_forward()
    want = gradients(module(x), dout, module, x)
    out = chunked(module, x, 4)
    chunks = kernels.loss._chunks
    monkeypatch.setattr(kernels.loss, "_chunks", lambda x, size: list(chunks(x, size))[:-1])
    assert furthest(gradients(out, dout, module, x)[2:], want[2:]) > 1e-2
