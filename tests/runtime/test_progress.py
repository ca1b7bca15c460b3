"""A line every few seconds, and none before."""

from itertools import count
from types import SimpleNamespace

import pytest

from runtime import progress


def test_a_line_every_few_seconds_and_none_in_the_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=count().__next__))
    tell = progress.Progress(every=3)
    for number in range(1, 10):
        tell(f"{number} of 9")
    found = capsys.readouterr()
    assert (found.out, found.err) == ("", "4 of 9, 4 s\n8 of 9, 8 s\n")
