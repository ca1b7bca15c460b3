import pytest
import torch
import torch.nn.functional as F

import kernels.loss
from kernels.loss import cross_entropy_sum


def naive(logits, labels, ignore_index=-100):
    """The definition, a token at a time, in float64."""
    losses = [
        -torch.log_softmax(row.double(), dim=-1)[label]
        for row, label in zip(logits.reshape(-1, logits.shape[-1]), labels.flatten().tolist(), strict=True)
        if label != ignore_index
    ]
    return sum(losses, torch.zeros((), dtype=torch.float64)), len(losses)


def problem(dtype, shape=(3, 7), vocabulary=50):
    torch.manual_seed(0)
    logits = (4 * torch.randn(*shape, vocabulary)).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, shape)
    labels[0, 2:5] = -100
    return logits, labels


# Gradients are rounded to the logits' dtype once: at most 2^-8 of an entry for bf16, and entries are at most 1.
@pytest.mark.parametrize(
    ("dtype", "loss_bound", "grad_bound"),
    [(torch.float64, 1e-13, 1e-14), (torch.float32, 1e-6, 5e-7), (torch.bfloat16, 1e-6, 2**-8)],
)
@pytest.mark.parametrize("chunk", [1, 170, 1 << 24])  # a row, some rows with a rest, everything at a time
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


def test_no_valid_token_at_all():
    logits, labels = problem(torch.float32)
    loss, valid = cross_entropy_sum(logits, torch.full_like(labels, -100))
    loss.backward()
    assert (loss.item(), valid.item(), logits.grad.abs().max().item()) == (0, 0, 0)


def test_extreme_logits_do_not_overflow():
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    loss, _ = cross_entropy_sum(logits, torch.tensor([1]))
    loss.backward()
    assert loss.item() == 2e4
    assert logits.grad.tolist() == [[1.0, -1.0, 0.0]]


def test_other_ignore_index():
    logits, labels = problem(torch.float32)
    loss, valid = cross_entropy_sum(logits, labels.where(labels != -100, 7), ignore_index=7)
    expected, count = naive(logits, labels.where((labels != -100) & (labels != 7), -100))
    assert valid.item() == count
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_keeps_nothing_of_the_logits_size_but_the_logits():
    logits, labels = problem(torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        cross_entropy_sum(logits, labels)
    large = [x for x in kept if x.numel() >= logits.numel()]
    assert [x.data_ptr() for x in large] == [logits.data_ptr()]


def test_bad_input():
    logits, labels = problem(torch.float32)
    with pytest.raises(ValueError, match="must agree"):
        cross_entropy_sum(logits, labels[:, 1:])
    labels[1, 1] = 50
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        cross_entropy_sum(logits, labels)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; make gpu-check runs it")
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
    assert torch.cuda.max_memory_allocated() - before < gradient + 3 * 4 * kernels.loss.LOSS_CHUNK["cuda"]
    assert valid.item() == 2 * 2048 - 800
    assert abs(loss.item() - expected.item()) < 1e-6 * expected.item()
    assert (logits.grad - exact.grad).abs().max() < grad_bound
