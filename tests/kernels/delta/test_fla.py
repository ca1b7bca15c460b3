"""The delta rule by flash-linear-attention: a stand-in of its signature (0.6) that computes by the recurrence."""

import sys
from itertools import pairwise
from types import ModuleType

import pytest
import torch

from kernels import installed, reference
from kernels.delta import rule
from kernels.delta.rule import by_fla, select_delta_backend
from runtime.errors import UserError
from tests.kernels.delta.cases import Case, inputs


def stand_in(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None,
):  # fmt: skip
    """Queries are scaled by it unless told otherwise; of several documents, each in a row of one has its state."""
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    if cu_seqlens is None:
        out, final = reference.delta_rule(q, k, v, g, beta, initial_state)
        return out, final if output_final_state else None
    assert len(q) == 1
    assert cu_seqlens.dtype == torch.long
    found = []
    for n, (a, b) in enumerate(pairwise(cu_seqlens.tolist())):
        state = None if initial_state is None else initial_state[n : n + 1]
        found.append(reference.delta_rule(*(x[:, a:b] for x in (q, k, v, g, beta)), state))
    out, final = (torch.cat(parts, axis) for parts, axis in zip(zip(*found, strict=True), (1, 0), strict=True))
    return out, final


@pytest.fixture
def library(monkeypatch):
    for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["fla.ops.gated_delta_rule"].chunk_gated_delta_rule = stand_in


@pytest.mark.parametrize("documents", [None, (0, 20), (0, 3, 4, 20)])
@pytest.mark.parametrize("with_state", [False, True])
def test_it_is_asked_for_what_the_recurrence_computes(documents, with_state, library):
    *leaves, state = inputs(Case(20, 3))
    state = state if with_state else None
    found = by_fla(tuple(leaves), state, documents)
    for a, b in zip(found, reference.delta_rule(*leaves, state, documents=documents), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_it_is_refused_where_it_cannot_run(monkeypatch):
    *leaves, _ = inputs(Case(7))
    with pytest.raises(UserError, match="fla is not installed; use auto or chunked"):
        select_delta_backend("fla", "cuda", torch.bfloat16)
    monkeypatch.setattr(installed, "has_fla", lambda: True)
    assert select_delta_backend("fla", "cuda", torch.bfloat16) == "fla"
    for device, more, reason in (("cpu", {}, "fla needs a cuda device"), ("cuda", {"per_channel": True}, "per head")):
        with pytest.raises(UserError, match=reason):
            select_delta_backend("fla", device, torch.bfloat16, **more)
    monkeypatch.setattr(rule, "select_delta_backend", lambda *_, **__: "fla")
    with pytest.raises(UserError, match="passes no states between ranks"):
        rule.scan(*leaves, backend="fla")
