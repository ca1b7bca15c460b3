"""Linear attention against the float64 reference: outputs, outgoing state, every gradient."""

import math

import pytest
import torch

from kernels import linear_scan as linear
from kernels import reference
from kernels.backends import chunked
from kernels.linear_attention import select_linear_backend
from kernels.ops import linear_attention
from tests.kernels.linear_cases import (
    BOUND,
    CASES,
    FAR,
    LENGTHS,
    PACKED,
    Case,
    errors,
    inputs,
    results,
    within_bounds,
)


def recurrent(case):
    """The definition, one token after the other, float64: out and the outgoing state."""
    (q, k, v, state), _ = ([x.double() for x in group] for group in inputs(case))
    decay = torch.tensor(case.decays, dtype=torch.float64)[:, None, None]
    out = []
    for t in range(case.length):
        if case.cu_seqlens and t in case.cu_seqlens[1:]:
            state = torch.zeros_like(state)
        state = decay * state + k[:, t, :, :, None] * v[:, t, :, None, :]
        out.append((q[:, t, :, :, None] * state).sum(-2))
    return [torch.stack(out, 1), state]


@pytest.mark.parametrize("case", [Case(1), Case(65), Case(200, cu_seqlens=PACKED)])
def test_the_reference_is_the_recurrence(case):
    for a, b in zip(results(case, "reference", torch.float64), recurrent(case), strict=False):
        assert (a - b).norm() <= 1e-14 * b.norm()


@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-13), ("float32", BOUND)])
@pytest.mark.parametrize(
    "case",
    [*(Case(length) for length in LENGTHS), *(case for case in CASES if case.dtype == "float32")],
)
def test_chunked_equals_the_reference(case, dtype, bound):
    errors_by_name = errors(case._replace(dtype=dtype), "chunked")
    assert max(errors_by_name.values()) <= bound, errors_by_name


@pytest.mark.parametrize(
    "case",
    [
        *(case for case in CASES if case.dtype == "bfloat16"),
        *(pytest.param(case, marks=pytest.mark.slow) for case in FAR),
    ],
)
def test_chunked_bfloat16_is_as_good_as_the_naive_form_and_so_is_all_far_away(case):
    errors_by_name = errors(case, "chunked")
    assert within_bounds(case, errors_by_name), (case, errors_by_name)


@pytest.mark.parametrize(
    "fault",
    ["decay at the boundary", "mask", "state not handed on", "documents", "gradient of the state"],
)
def test_the_bounds_see_a_fault(fault, monkeypatch):
    """Negative controls: each breaks one factor of the chunked form."""
    case = Case(200, cu_seqlens=(0, 100, 200) if fault == "documents" else None)
    power, carry, chunks_of = linear._power, linear._carry, linear.chunks_of
    if fault == "decay at the boundary":
        monkeypatch.setattr(linear, "_power", lambda rates, exponents: power(rates, exponents + 1))
    elif fault == "mask":
        monkeypatch.setattr(
            linear, "constants", lambda rates, dtype, device: torch.zeros(len(rates), dtype=dtype)
        )
    elif fault == "state not handed on":
        monkeypatch.setattr(linear, "_carry", lambda a, c, s, b, r: carry(a, c * 0, s, b, r))
    elif fault == "documents":
        monkeypatch.setattr(
            linear, "chunks_of", lambda length, _, device: chunks_of(length, None, device)
        )
    else:
        run = linear.scan
        monkeypatch.setattr(chunked, "scan", lambda *a, **named: run(*a[:4], None, a[5], **named))
    assert max(errors(case, "chunked").values()) > 100 * BOUND


def test_strong_decay_over_a_long_chunk_overflows_nowhere():
    """decay^-64 would be 1e64 here, which float32 does not have."""
    errors_by_name = errors(Case(200, decays=(0.1, 1e-4, 1e-30)), "chunked")
    assert max(errors_by_name.values()) <= BOUND
    for x in results(Case(200, decays=(0.1, 1e-4, 1e-30)), "chunked"):
        assert x.isfinite().all()


def test_memory_between_forward_and_backward_is_the_inputs():
    saved = []
    (q, k, v, state), _ = inputs(Case(300))
    leaves = [x.requires_grad_() for x in (q, k, v, state)]

    def pack(x):
        saved.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        linear_attention(*leaves[:3], (0.0, -0.1, -2.0), leaves[3])
    assert sum(saved) == sum(x.numel() for x in leaves)


def test_a_loss_of_the_state_alone_and_inputs_without_gradients():
    (q, k, v, _), _ = inputs(Case(70, dtype="float64"))
    for name in ("chunked", "reference"):
        k.requires_grad_()
        (gradient,) = torch.autograd.grad(
            linear_attention(q, k, v, (0.0, -0.1, -2.0), backend=name)[1].sum(), k
        )
        want = (
            v.sum(-1)[..., None]
            * torch.tensor([0.0, -0.1, -2.0], dtype=torch.float64)[:, None]
            .mul(torch.arange(69, -1, -1)[:, None, None])
            .exp()
        )
        assert (gradient - want).norm() <= 1e-13 * want.norm()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_decay": (0.0, 0.1, -1.0)}, r"decay of head 1 is 1\.105.* at most 1"),
        ({"log_decay": (0.0, -math.inf, -1.0)}, r"decay of head 1 is 0\.0"),
        ({"log_decay": (0.0, math.nan, -1.0)}, "decay of head 1 is nan"),
        ({"log_decay": (0.0, 1e9, -1.0)}, "decay of head 1 is inf"),
        ({"log_decay": (0.0,)}, "1 numbers for 3 heads"),
        ({"state": torch.zeros(2, 3, 24, 16)}, "state has shape"),
        ({"cu_seqlens": (0, 4)}, "rising from 0 to the number of tokens, 5"),
        ({"cu_seqlens": (0, 3, 3, 5)}, "rising from 0"),
        ({"k": torch.zeros(2, 4, 3, 16)}, "of one dtype, but got q"),
        ({"backend": "aten"}, "attention_backend 'aten' has no linear"),
        ({"backend": "triton"}, "triton"),
    ],
)
def test_bad_input_is_named(change, message):
    (q, k, v, state), _ = inputs(Case(5))
    arguments = {"q": q, "k": k, "v": v, "log_decay": (0.0, -0.1, -1.0), "state": state} | change
    with pytest.raises(ValueError, match=message):
        linear_attention(**arguments)


def test_backends_by_device_and_dtype():
    assert select_linear_backend("auto", "cpu", torch.bfloat16) == "chunked"
    assert select_linear_backend("auto", "cuda", torch.float32) == "chunked"
    assert reference.linear_attention(*inputs(Case(3, batch=2))[0][:3], (0.0, 0.0, 0.0))[
        1
    ].shape == (2, 3, 16, 24)
