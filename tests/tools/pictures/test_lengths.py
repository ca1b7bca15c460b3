"""Shares of tokens by the lengths of their documents are what counting them gives."""

import numpy as np

from tools.pictures.lengths import LONGER, lines, shares


def test_shares_are_those_of_counting():
    lengths = np.random.default_rng(0).integers(0, 200_000, 300).astype(np.int32)
    lengths[:4] = LONGER  # a document of just so many tokens is not longer
    longer = np.array([0, 1, *LONGER, 199_999, 10**6])
    want = [sum(int(length) for length in lengths if length > one) / int(lengths.sum()) for one in longer]
    assert np.allclose(shares(lengths, longer), want, rtol=0, atol=1e-12)


def test_lines_have_figures_and_bars():
    assert list(lines(np.array([1024, 1025, 5000, 92951]))) == [
        "tokens in documents longer than",
        "    1,024  98.98% ████████████████████████████████████████",
        "    4,096  97.95% ███████████████████████████████████████",
        "   32,768  92.95% █████████████████████████████████████",
        "  131,072   0.00%",
    ]
