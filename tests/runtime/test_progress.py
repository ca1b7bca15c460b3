"""In a log a line a minute and none before; on a terminal one line that moves, and is gone at the end."""

from itertools import count
from types import SimpleNamespace

import pytest

from runtime import progress


def told(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell how far it is, a step a second."""
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=count().__next__))
    with progress.Progress() as tell:
        for number in range(1, steps + 1):
            tell(f"{number} of {steps}")


def test_a_log_has_a_line_a_minute_and_none_in_the_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told(150, monkeypatch)
    found = capsys.readouterr()
    assert (found.out, found.err) == ("", "61 of 150, 61 s\n122 of 150, 122 s\n")


def test_on_a_terminal_one_line_moves_and_is_gone_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "10")
    told(3, monkeypatch)
    clear = progress.CLEAR
    assert capsys.readouterr().err == f"{clear}1 of 3, 1{clear}2 of 3, 2{clear}3 of 3, 3{clear}"
