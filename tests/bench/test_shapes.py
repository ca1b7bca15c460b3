"""Documents of drawn lengths."""

from itertools import pairwise

import pytest

from bench.shapes import LENGTHS, documents_of


@pytest.mark.parametrize("name", LENGTHS)
def test_documents_fill_the_sequence_and_are_the_same_in_every_process(name):
    found = documents_of(name, 16384)
    assert found == documents_of(name, 16384) != documents_of(name, 16384, seed=4)
    lengths = [b - a for a, b in pairwise(found)]
    assert sum(lengths) == 16384
    least, most = {"lognormal": (64, 4096), "short": (100, 1500), "chat": (32, 8192)}[name]
    assert min(lengths[:-1]) >= least
    assert max(lengths) <= most
    assert documents_of(name, 1) == (0, 1)
