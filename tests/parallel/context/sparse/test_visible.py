"""Rows seen, a few pairs of pieces at a time; that they are those that some query sees is what ``play`` checks."""

import pytest

from parallel.context import make_plan
from parallel.context.sparse import visible as module
from parallel.context.sparse.visible import Seen, as_columns, rows_seen


def test_pieces_compared_a_few_at_a_time_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan("striped", seq_len=60, size=6, documents=(0, 3, 11, 30, 31, 60), window=(20, 0))
    everything, nothing = as_columns([plan.real_pieces((rank,)) for rank in range(6)]), as_columns([[]])

    def seen() -> list[tuple[int, ...]]:
        columns: Seen = rows_seen(everything, everything, plan.layout.stride, plan.mask.reach)
        return sorted(zip(*(column.tolist() for column in columns), strict=True))

    at_once = seen()
    for few in (1, 2, 7, 100):
        monkeypatch.setattr(module, "AT_ONCE", few)
        assert seen() == at_once
    assert rows_seen(nothing, everything, 1, (None, 0)).who.size == 0
    assert rows_seen(everything, nothing, 1, (None, 0)).who.size == 0
