"""The Linear Transformer written out by hand, one head at a time with every score, in float64."""

import dataclasses

import pytest
import torch

from model.config import ModelConfig
from model.linear_transformer import LinearTransformer, features, sinusoids

TIED = ModelConfig(
    model_type="linear_transformer",
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    vocab_size=50,
    init_method_std=0.1,
    untie_embeddings_and_output_weights=False,
)
TOKENS = torch.randint(50, (2, 90), generator=torch.Generator().manual_seed(3))


def built(config, dtype=torch.float64):
    """Biases and norms as training leaves them: not 0 and 1."""
    model = LinearTransformer(config).to(dtype)
    model.init_weights(1)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def naive(model, ids):
    weights, config = dict(model.named_parameters()), model.config
    heads, width = config.num_attention_heads, config.hidden_size

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x, name):
        x = x - x.mean(-1, keepdim=True)
        return (
            x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[f"{name}.weight"] + weights[f"{name}.bias"]
        )

    place = torch.arange(ids.shape[1], dtype=torch.float64)[:, None]
    angle = place / 10000 ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    x = weights["embedding.weight"][ids] * width**0.5 + torch.cat((angle.sin(), angle.cos()), -1)
    for layer in range(config.num_layers):
        name = f"layers.{layer}."
        y = norm(x, name + "attention_norm")
        q, k, v = (linear(y, f"{name}attention.w{w}").unflatten(-1, (heads, -1)) for w in "qkv")
        q, k = (torch.nn.functional.elu(z) + 1 for z in (q, k))
        scores = torch.einsum("bthd,bshd->bhts", q, k).tril()
        out = torch.einsum("bhts,bshd->bthd", scores / scores.sum(-1, keepdim=True), v)
        x = x + linear(out.flatten(2), name + "attention.wo")
        y = linear(norm(x, name + "mlp_norm"), name + "mlp.up")
        x = x + linear(torch.nn.functional.gelu(y, approximate="tanh"), name + "mlp.down")
    output = weights["embedding.weight"] if model.output is None else weights["output.weight"]
    return norm(x, "norm") @ output.T


@pytest.mark.parametrize("untied", [True, False])
def test_logits_and_gradients_equal_the_naive_model(untied):
    model = built(dataclasses.replace(TIED, untie_embeddings_and_output_weights=untied))
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
    model = built(TIED)
    want = naive(model, TOKENS)
    assert (model(TOKENS, torch.zeros(90, dtype=torch.long)) - want).norm() > 1e-3 * want.norm()
    monkeypatch.setattr("model.linear_transformer.features", lambda x: x.relu() + 1)
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
    assert sinusoids(torch.tensor([[10**6]]), 4).flatten().tolist() == pytest.approx(
        [-0.34999350217, -0.30561438888, 0.93675212753, -0.95215536825], abs=1e-9
    )
