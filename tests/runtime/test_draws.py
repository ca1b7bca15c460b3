"""Random weights are the same numbers whole and in parts."""

from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from runtime import draws
from runtime.draws import generator_of, initial_weight_slice


def normal(tile: Tensor, generator: torch.Generator) -> Tensor:
    return tile.normal_(0.0, 2.0, generator=generator)


@pytest.mark.parametrize("shape", [(100,), (13, 37), (5, 6, 19), (2, 3, 4, 5)])
def test_parts_are_those_of_the_whole(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "WHOLE", 64)
    monkeypatch.setattr(draws, "TILE", (4, 16))
    whole = initial_weight_slice(normal, "w", shape, 3)
    assert whole.shape == shape
    assert whole.std().item() == pytest.approx(2, rel=0.2)
    assert len(whole.unique()) == whole.numel()  # no two tiles have the same numbers
    cuts = [[slice(*cut) for cut in pairwise(sorted({0, 1, n // 3, n - 1, n}))] for n in shape]
    for part in [*product(*cuts), (slice(1, 1), *(cut[0] for cut in cuts[1:]))]:
        assert torch.equal(initial_weight_slice(normal, "w", shape, 3, part), whole[part])


def test_a_weight_of_up_to_a_million_values_has_one_generator() -> None:
    """So the curves of small models that are written down still hold."""
    want = torch.empty(1024, 1024).normal_(0.0, 2.0, generator=generator_of(3, "w"))
    assert torch.equal(initial_weight_slice(normal, "w", (1024, 1024), 3), want)
    assert not torch.equal(initial_weight_slice(normal, "w", (1025, 1024), 3)[:1024], want)
