"""In a log a line after ten seconds, then one a minute.

On a terminal one line that moves, and is gone at the end.
"""

from itertools import count
from types import SimpleNamespace

import pytest

from runtime import progress


def told(steps, monkeypatch):
    """Tell how far it is, a step a second."""
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=count().__next__))
    with progress.Progress() as tell:
        for number in range(1, steps + 1):
            tell(f"{number} of {steps}")


def test_a_log_has_lines_and_a_terminal_one_line_that_moves(monkeypatch, capsys):
    told(150, monkeypatch)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == (
        "",
        "11 of 150, 11 s\n72 of 150, 72 s\n133 of 150, 133 s\n",
    )
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "10")
    told(3, monkeypatch)
    clear = progress.CLEAR
    assert capsys.readouterr().err == f"{clear}1 of 3, 1{clear}2 of 3, 2{clear}3 of 3, 3{clear}"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.00123456, "1.235 ms"),
        (119.96, "120.0 s"),
        (120, "2.000 min"),
        (8622.199, "2.395 h"),
        (1e8, "27,778 h"),
    ],
)
def test_seconds_have_the_unit_that_suits_them(seconds, expected):
    assert progress.duration(seconds) == expected
