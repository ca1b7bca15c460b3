"""The Linear Transformer written out by hand, one head at a time with every score, in float64."""

import dataclasses

import pytest
import torch

from model.linear import Sinusoids, features
from tests.model.models import LINEAR, tied, tokens, used
from tests.model.test_gpt import by_hand

UNTIED = dataclasses.replace(LINEAR, init_method_std=0.1)
TOKENS = tokens(90)


def naive(model, ids):
    width = model.config.hidden_size

    def embed(weights):
        place = torch.arange(ids.shape[1], dtype=torch.float64)[:, None]
        angle = place / 10000 ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
        return weights["embedding.weight"][ids] * width**0.5 + torch.cat((angle.sin(), angle.cos()), -1)

    def attend(q, k, v):
        q, k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
        scores = (q @ k.mT).tril()
        return scores / scores.sum(-1, keepdim=True) @ v

    return by_hand(model, ids, embed, attend)


@pytest.mark.parametrize("config", [UNTIED, tied(UNTIED)], ids=["untied", "tied"])
def test_logits_and_gradients_equal_the_naive_model(config):
    model = used(config, dtype=torch.float64)
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = []
    for logits in (model(TOKENS), naive(model, TOKENS)):
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS.roll(-1).flatten())
        found.append([logits, *torch.autograd.grad(loss, parameters)])
    assert found[1][0].std() > 0.2
    for name, a, b in zip(("logits", *names), *found, strict=True):
        # A constant added to all keys' biases changes scores, unlike under softmax: no gradient is zero.
        assert (a - b).norm() < 1e-11 * b.norm(), name


def test_the_bound_sees_a_missing_normaliser_and_missing_positions(monkeypatch):
    model = used(tied(UNTIED), dtype=torch.float64)
    want = naive(model, TOKENS)
    assert (model(TOKENS, torch.zeros(90, dtype=torch.long)) - want).norm() > 1e-3 * want.norm()
    monkeypatch.setattr("model.linear.features", lambda x: x.relu() + 1)
    assert (model(TOKENS) - want).norm() > 1e-3 * want.norm()


def test_features_are_never_zero():
    """elu(-20) + 1 is 0 in float32, and a query or key of zeros has no normaliser."""
    x = torch.tensor([-80.0, -20.0, -1.0, 0.0, 3.0])
    for dtype in (torch.float32, torch.bfloat16):
        assert (features(x.to(dtype)) > 0).all()
    assert (torch.nn.functional.elu(x) + 1)[1] == 0
    torch.testing.assert_close(features(x[2:]), torch.nn.functional.elu(x[2:]) + 1)
    y = x.clone().requires_grad_()
    assert torch.autograd.grad(features(y).sum(), y)[0].isfinite().all()


def test_sinusoids_of_far_positions_are_exact():
    assert Sinusoids(4)(torch.tensor([[10**6]])).flatten().tolist() == pytest.approx(
        [-0.34999350217, -0.30561438888, 0.93675212753, -0.95215536825], abs=1e-9
    )
