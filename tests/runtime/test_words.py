"""Durations as a person says them."""

import pytest

from runtime.words import duration


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.0, "0.000 ms"),
        (0.00123456, "1.235 ms"),
        (0.6108, "610.8 ms"),
        (1, "1.000 s"),
        (22.399, "22.40 s"),
        (119.96, "120.0 s"),
        (120, "2.000 min"),
        (7199, "120.0 min"),
        (8622.199, "2.395 h"),
        (8e6, "2222 h"),
        (1e8, "27,778 h"),
    ],
)
def test_seconds_have_the_unit_that_suits_them(seconds: float, said: str) -> None:
    assert duration(seconds) == said
