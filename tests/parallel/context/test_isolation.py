"""Documents know nothing of each other: one that changes makes no difference to the bits of the others."""

import pytest
import torch

from runtime.ranks import run_ranks
from tests.parallel.context.attended import DOCUMENTS, LENGTH, Masked, Ranks, inputs, sinks_of
from tests.parallel.context.test_packed import by_turns

CHANGED = slice(DOCUMENTS[3], DOCUMENTS[4])
MASKS = (Masked(DOCUMENTS, sinks=True), Masked(DOCUMENTS, (9, 0)), Masked(DOCUMENTS, causal=False))


def same_and_changed(rank, world_size, cases):
    """Per case: whether this rank's rows of the other documents are the same to the bit in out, dq, dk and dv.

    And, of each of the four, whether any row of the changed document differs.
    """
    ranks, found = Ranks(), []
    for method, options, masked in cases:
        one, cp = ranks.under(method, options, masked)
        results = []
        for change in (0, 1):
            whole = [x.float() for x in inputs(masked, torch.float32)]
            for x in whole:
                x[:, CHANGED] += change
            *leaves, dout = (cp.shard(x, dim=1) for x in whole)
            leaves = [x.requires_grad_() for x in leaves]
            out = one.attend(*leaves, cp.handle, sinks=sinks_of(masked, torch.float32))
            results.append([out, *torch.autograd.grad(out, leaves, dout)])
        inside = (cp.positions >= CHANGED.start) & (cp.positions < CHANGED.stop)
        others = ~inside & (cp.positions < LENGTH)
        pairs = list(zip(*results, strict=True))
        found.append(
            (
                [torch.equal(a[:, others], b[:, others]) for a, b in pairs],
                [not torch.equal(a[:, inside], b[:, inside]) for a, b in pairs],
            )
        )
    return found


def test_a_document_that_changes_changes_no_bit_of_the_others():
    cases = by_turns(4, MASKS)
    for case, by_rank in zip(cases, zip(*run_ranks(same_and_changed, 4, cases), strict=True), strict=True):
        for same, _ in by_rank:
            assert same == [True] * 4, case
        assert [any(changed) for changed in zip(*(changed for _, changed in by_rank), strict=True)] == [True] * 4, case


@pytest.mark.parametrize("documents", [None, (0, 7, 30, 123)])
def test_without_its_boundaries_it_would_be_seen(documents):
    """Negative control: ranks that know fewer boundaries."""
    cases = [("exchange", {}, Masked(documents, causal=False)), ("zigzag", {}, Masked(documents, causal=False))]
    for by_rank in zip(*run_ranks(same_and_changed, 2, cases), strict=True):
        assert not any(all(same) for same, _ in by_rank)
