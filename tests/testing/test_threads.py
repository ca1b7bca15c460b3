"""Ranks as threads: every method against float64, and what happens where one fails."""

from typing import Any

import pytest
import torch

from parallel.context import METHODS, make_plan
from testing import threads
from tests.parallel.context.packed import MASKS, Masked, error, inputs, truth

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("ulysses", {}),
    ("wallfacer", {"team_size": 2}),
    ("double_ring", {"ranks_per_node": 2}),
    ("exchange", {"ranks_per_node": 2, "layout": "zigzag"}),
    ("striped", {"ulysses_degree": 2}),
]
CASES = [(method, {}, masked) for method in METHODS for masked in (Masked(), MASKS["window + documents"])]
CASES += [(method, options, masked) for method, options in VARIANTS for masked in (Masked(), MASKS["documents"])]


@pytest.mark.parametrize("size", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_every_method_equals_one_process(size: int) -> None:
    for method, options, masked in CASES:
        mask = {"documents": masked.documents, "window": masked.window}
        plan = make_plan(method, seq_len=masked.length, size=size, **mask, **options)
        found = threads.attend(plan, inputs(torch.float64))
        assert max(error(found, truth(masked, torch.float64))) < 1e-12, (method, options, masked)


def test_a_message_that_is_changed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = threads.ThreadTransport._send
    monkeypatch.setattr(
        threads.ThreadTransport,
        "_send",
        lambda self, tensors, *rest: plain(self, [x.roll(1, 1) for x in tensors] if self.rank == 2 else tensors, *rest),
    )
    found = threads.attend(make_plan("zigzag", seq_len=123, size=4), inputs(torch.float64))
    assert min(error(found, truth(Masked(), torch.float64))) > 1e-3


def test_a_rank_that_fails_or_says_nothing_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, plain = make_plan("ring", seq_len=123, size=4), threads.ThreadTransport._send

    def failing(self: threads.ThreadTransport, *given: Any) -> None:
        if self.rank == 1:
            raise ValueError("no link")
        plain(self, *given)

    monkeypatch.setattr(threads.ThreadTransport, "_send", failing)
    with pytest.raises(ValueError, match="no link"):
        threads.attend(plan, inputs(torch.float64))
    monkeypatch.setattr(threads, "PATIENCE", 0.3)
    monkeypatch.setattr(threads.ThreadTransport, "_send", lambda *given: None)
    with pytest.raises(TimeoutError, match=r"rank \d (waited for message 0 of rank|stops)"):
        threads.attend(plan, inputs(torch.float64))
