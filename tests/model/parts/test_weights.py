"""Each part states how its weights begin.

A parameter of which none states anything is refused by its name.
"""

from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import nn

from model.parts.feed_forward import MLP
from model.parts.norms import RMSNorm, ZeroCentredRMSNorm
from model.parts.weights import (
    Beginning,
    Inits,
    constant,
    initial_value,
    normal_inits,
    xavier_inits,
)


class Residual(nn.Module):
    """A part as its author writes it.

    Its words about a norm and a feed-forward, which has words of its own.
    """

    INIT: ClassVar[Inits] = {"norm": "ones", "shift": partial(constant, 0.5)}

    def __init__(self, norm=RMSNorm, inits=None):
        super().__init__()
        self.inits = inits or normal_inits(0.1, layers=8)
        self.norm, self.mlp, self.shift = norm(64), MLP(64, 96), nn.Parameter(torch.empty(3))


def begins(model, name):
    return initial_value(model, Beginning(name, model.get_parameter(name).shape, 3))


def test_words_are_of_weights_and_biases_begin_at_zero():
    model = Residual()
    assert (begins(model, "norm.weight") == 1).all()
    assert (begins(model, "shift") == 0.5).all()
    assert not begins(model, "mlp.up.bias").any()
    for name, std in (("up", 0.1), ("down", 0.1 / 4)):
        assert begins(model, f"mlp.{name}.weight").std().item() == pytest.approx(std, rel=0.03)


def test_what_a_child_states_of_itself_comes_first():
    assert not begins(Residual(ZeroCentredRMSNorm), "norm.weight").any()


def test_the_model_says_what_the_words_mean():
    weight = begins(Residual(inits=xavier_inits(0.1)), "mlp.up.weight")
    assert weight.abs().max().item() == pytest.approx((6 / (64 + 96)) ** 0.5, rel=0.01)


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        ("norm.weight", r"Residual \(tests/model/parts/test_weights\.py\)"),
        ("shift", r"Residual \(tests/model/parts/test_weights\.py\)"),
        ("mlp.gate.weight", r"MLP \(model/parts/feed_forward\.py\)"),
        ("norm.gain", r"Residual \(tests/model/parts/test_weights\.py\)"),
    ],
)
def test_a_parameter_whose_part_states_nothing_is_refused(monkeypatch, name, owner):
    """Also one that is neither weight nor bias of a child of which the part has a word."""
    model = Residual()
    model.mlp.gate = nn.Linear(64, 96)
    if name == "norm.gain":
        model.norm.gain = nn.Parameter(torch.empty(64))
    else:
        monkeypatch.setattr(Residual, "INIT", {})
    message = f"^{name} has no initial value: {owner} states none in INIT"
    with pytest.raises(ValueError, match=message):
        begins(model, name)
