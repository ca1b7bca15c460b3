"""The delta rule in chunks against the recurrence by tokens: outputs, states, every gradient."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference
from kernels.backends import triton
from kernels.delta import rule
from kernels.delta.rule import gates_with_resets, select_delta_backend
from kernels.ops import delta_rule
from runtime.errors import UserError
from tests.kernels.delta.cases import PACKED, Case, errors, inputs, results

CASES = [
    Case(length, shared, per_channel, cu_seqlens)
    for shared, per_channel in ((1, False), (3, False), (1, True))
    for length, cu_seqlens in (
        *((length, None) for length in (1, 63, 64, 65, 200)),
        (7, (0, 3, 7)),
        (200, PACKED),
        (70, tuple(range(71))),
    )
]
HARD = [
    case._replace(per_channel=per_channel)
    for per_channel in (False, True)
    for case in (
        *(Case(200, gate=gate, beta=1.0, width=32) for gate in (10.0, 100.0, 1000.0)),
        Case(200, beta=1.0, equal_keys=True),
        Case(200, gate=0.0, beta=2.0, equal_keys=True),
        Case(200, gate=100.0, beta=2.0, equal_keys=True, cu_seqlens=PACKED),
    )
]


@pytest.mark.parametrize("case", CASES)
def test_chunks_equal_the_recurrence(case):
    errors_by_name = errors(case, results(case, "auto"))
    assert max(errors_by_name.values()) <= 1e-13, errors_by_name


@pytest.mark.parametrize("case", HARD)
def test_strong_gates_and_equal_keys_cost_no_digits(case):
    """A gate's gradient too, which is small beside that of the tokens around it.

    Differences of sums had 6e-6 of it.

    It has 1.1e-6 on a processor without AVX.
    """
    errors_by_name = errors(case, results(case, "chunked", torch.float32))
    assert max(errors_by_name.values()) <= 3e-6, errors_by_name


@pytest.mark.parametrize("case", CASES[-3:])
def test_slabs_of_one_chunk_change_nothing(case, monkeypatch):
    monkeypatch.setattr(rule, "CPU_CHUNKS", 1)
    errors_by_name = errors(case, results(case, "chunked"))
    assert max(errors_by_name.values()) <= 1e-13, errors_by_name


@pytest.mark.parametrize("per_channel", [False, True])
def test_bfloat16_is_as_exact_as_its_inputs(per_channel):
    case = Case(130, per_channel=per_channel, beta=1.0)
    outputs = results(case, "chunked", torch.bfloat16)
    assert [x.dtype for x in outputs] == [
        torch.bfloat16,
        torch.float32,
        *[torch.bfloat16] * 5,
        torch.float32,
    ]
    assert max(errors(case, outputs).values()) <= 3e-2


def test_autocast_and_gates_of_another_dtype_change_nothing():
    """Layers hold queries, keys and values in bfloat16, gates in float32."""
    *leaves, _ = inputs(Case(130, 3, beta=1.0))
    leaves = [*(x.bfloat16() for x in leaves[:3]), *(x.float() for x in leaves[3:])]
    leaves = [x.requires_grad_() for x in leaves]
    plain, _ = delta_rule(*leaves)
    want = torch.autograd.grad(plain.float().sum(), leaves)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = delta_rule(*leaves)
        actual = torch.autograd.grad(out.float().sum(), leaves)
    assert torch.equal(out, plain)
    assert all(torch.equal(*pair) for pair in zip(actual, want, strict=True))
    naive, _ = delta_rule(*leaves, backend="reference")
    assert naive.dtype == torch.bfloat16
    assert (naive.float() - out.float()).norm() <= 5e-3 * naive.float().norm()


@pytest.mark.parametrize("case", [Case(1), Case(130, 3), Case(200, 1, True)])
def test_a_wide_scan_is_the_map_of_any_state(case):
    *leaves, state = inputs(case)
    leaves[3] *= 0.01  # so that much of the state reaches the end
    want, final = reference.delta_rule(*leaves, state)
    out, reads, states = rule.wide_scan(*leaves)
    added, through = states[-1].split([case.values, case.width], -1)
    out = out + torch.einsum("bthd,bhde->bthe", reads, state)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-13)
    torch.testing.assert_close(through @ state + added, final, rtol=0, atol=1e-13)
    assert torch.linalg.matrix_norm(through, 2).max() <= 1 + 1e-12
    # A decay alone, as linear attention's states have it, is another map.
    decay = leaves[3].sum(1).exp() if case.per_channel else leaves[3].sum(1).exp()[..., None]
    if case.length > 1:
        assert (decay[..., None] * state + added - final).norm() > 0.05 * final.norm()


@pytest.mark.parametrize("fault", ["differences", "documents"])
def test_faults_show(fault, monkeypatch):
    """Gates by differences of sums from the chunk's start, as others take them.

    The second fault is a state that crosses documents.
    """
    if fault == "documents":
        case = Case(200, cu_seqlens=PACKED)
        monkeypatch.setattr("kernels.delta.rule.gates_with_resets", lambda g, cu_seqlens: g)
        assert errors(case, results(case, "chunked"))["out"] > 0.05
        return
    case = HARD[1]
    monkeypatch.setattr(Tensor, "cumsum_", _differences)
    assert errors(case, results(case, "chunked", torch.float32))["out"] > 5e-6


def _differences(x, dim):
    """Replace the sums of gates j + 1 to i.

    They come from a matrix whose first column has all but the first gate.
    """
    sums = F.pad(x[..., 1:, 0].cumsum(-1), (1, 0))
    return x.copy_(sums[..., :, None] - sums[..., None, :])


def test_one_document_is_one_sequence_and_others_are_apart():
    *leaves, state = inputs(Case(130, cu_seqlens=(0, 50, 130)))
    out, final = delta_rule(*leaves, state, cu_seqlens=(0, 50, 130))
    first, _ = delta_rule(*(x[:, :50] for x in leaves), state)
    second, last = delta_rule(*(x[:, 50:] for x in leaves))
    torch.testing.assert_close(out, torch.cat((first, second), 1), rtol=0, atol=1e-14)
    torch.testing.assert_close(final, last, rtol=0, atol=1e-14)
    assert gates_with_resets(leaves[3], (0, 130)) is leaves[3]


@pytest.mark.parametrize("per_channel", [False, True])
def test_what_another_document_holds_costs_no_digits(per_channel):
    """Keys of norm 25 let a state grow without bounds.

    In the same chunk lies a document with ordinary ones.
    """
    *leaves, _ = (
        x.requires_grad_()
        for x in inputs(Case(50, per_channel=per_channel, cu_seqlens=(0, 20, 50)))
    )
    want = torch.autograd.grad(delta_rule(*(x[:, :20] for x in leaves))[0].sum(), leaves)
    wild = [leaves[0], torch.cat((leaves[1][:, :20], 25 * leaves[1][:, 20:]), 1), *leaves[2:]]
    actual = torch.autograd.grad(delta_rule(*wild, cu_seqlens=(0, 20, 50))[0].sum(), leaves)
    for a, b in zip(actual, want, strict=True):
        torch.testing.assert_close(a[:, :20], b[:, :20], rtol=0, atol=1e-13)


@pytest.mark.parametrize("case", [Case(70, 3), Case(70, 1, True)])
def test_operators_are_as_their_fakes_say(case):
    leaves = inputs(case)
    leaves = [x.float().contiguous().requires_grad_() for x in leaves]
    torch.library.opcheck(torch.ops.longmesh.delta_rule.default, (*leaves, "chunked"))
    compiled = torch.compile(lambda *x: delta_rule(*x)[0], backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*leaves), delta_rule(*leaves)[0])


@pytest.mark.parametrize(
    ("index", "shape", "message"),
    [
        (1, (2, 7, 1, 16), "q and k"),
        (2, (2, 7, 3, 24), "H a multiple of K"),
        (3, (2, 7, 1), "g has shape"),
        (4, (2, 7, 2, 16), "beta"),
        (5, (2, 2, 24, 16), "the state has shape"),
    ],
)
def test_wrong_shapes_are_named(index, shape, message):
    leaves = inputs(Case(7))
    leaves[index] = torch.zeros(shape, dtype=torch.float64)
    with pytest.raises(ValueError, match=message):
        delta_rule(*leaves)


def test_wrong_documents_and_backends_are_named():
    *leaves, _ = inputs(Case(7))
    for cu_seqlens in ((0,), (1, 7), (0, 3), (0, 3, 3, 7)):
        with pytest.raises(ValueError, match="cumulative lengths"):
            delta_rule(*leaves, cu_seqlens=cu_seqlens)
    for empty in ([x[:, :0] for x in leaves], [x[:0] for x in leaves]):
        with pytest.raises(ValueError, match="give at least one of each"):
            delta_rule(*empty)
    with pytest.raises(UserError, match="cudnn"):
        select_delta_backend("cudnn")


def test_a_backend_fits_its_inputs():
    auto = partial(select_delta_backend, "auto")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "has_triton", lambda: True)
        assert auto("cuda", torch.bfloat16) == "triton"
        assert auto("cuda", torch.bfloat16, per_channel=True) == "chunked"
        assert auto("cuda", torch.bfloat16, width=264) == "chunked"
        assert auto("cuda", torch.float32) == auto("cpu", torch.bfloat16) == "chunked"
        refused = partial(select_delta_backend, "triton")
        for device, dtype, more, reason in (
            ("cpu", torch.float32, {}, "needs a cuda device, but this one is cpu"),
            ("cuda", torch.float64, {}, "does not support torch.float64"),
            ("cuda", torch.float32, {"per_channel": True}, "these are per channel"),
            ("cuda", torch.float32, {"width": 264}, "these have 264"),
        ):
            with pytest.raises(UserError, match=reason):
                refused(device, dtype, **more)
        patch.setattr(triton, "has_triton", lambda: False)
        with pytest.raises(UserError, match="not installed"):
            refused("cuda", torch.float16)
