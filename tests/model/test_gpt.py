import dataclasses

import pytest
import torch

from model.config import ModelConfig
from model.gpt import GPT

LEARNED = ModelConfig(
    model_type="gpt",
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    vocab_size=40,
    max_position_embeddings=20,
    init_method_std=0.1,
)
ROPE = dataclasses.replace(LEARNED, position_embedding_type="rope", max_position_embeddings=None)
GROUPED = dataclasses.replace(LEARNED, num_query_groups=2, untie_embeddings_and_output_weights=False)
CONFIGS = {"learned": LEARNED, "rope": ROPE, "grouped and tied": GROUPED}


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def config(request):
    return request.param


def built(config, **kwargs):
    """Biases and norms as training leaves them: not 0 and 1."""
    model = GPT(config, **kwargs)
    model.init_weights(1)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
            assert parameter.abs().sum() > 0, name
    return model


def tokens(batch=2, length=12):
    return torch.randint(40, (batch, length), generator=torch.Generator().manual_seed(3))


def naive(model, ids, positions):
    """The model by hand, one head at a time, without its modules' forward; float64."""
    weights, config = model.state_dict(), model.config
    width, heads = config.head_dim, config.num_attention_heads

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x, name):
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + config.norm_epsilon).sqrt()
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def turn(x):
        if config.learned_positions:
            return x
        angles = positions[:, None] * config.rotary_base ** (-torch.arange(0, width, 2).double() / width)
        turned = torch.view_as_complex(torch.stack((x[..., : width // 2], x[..., width // 2 :]), -1))
        turned = turned * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((turned.real, turned.imag), -1)

    x = weights["embedding.weight"][ids]
    if config.learned_positions:
        x = x + weights["position_embedding.weight"][positions]
    hidden = positions[:, None] < positions[None]
    for i in range(config.num_layers):
        layer = f"layers.{i}"
        inside = norm(x, f"{layer}.attention_norm")
        q, k, v = (linear(inside, f"{layer}.attention.{w}").split(width, -1) for w in ("wq", "wk", "wv"))
        outs = []
        for head in range(heads):
            group = head * config.query_groups // heads
            scores = turn(q[head]) @ turn(k[group]).transpose(-1, -2) / width**0.5
            outs.append(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v[group])
        x = x + linear(torch.cat(outs, -1), f"{layer}.attention.wo")
        up = linear(norm(x, f"{layer}.mlp_norm"), f"{layer}.mlp.up")
        gelu = up * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (up + 0.044715 * up**3))) / 2
        x = x + linear(gelu, f"{layer}.mlp.down")
    return norm(x, "norm") @ weights.get("output.weight", weights["embedding.weight"]).T


def test_logits_are_those_written_out_by_hand(config):
    model = built(config).double()
    expected = naive(model, tokens(), torch.arange(12))
    assert expected.std() > 0.5
    assert (model(tokens()) - expected).abs().max() < 1e-12
    assert torch.equal(model(tokens()), model.project(model.hidden(tokens())))
    with torch.no_grad():
        model.layers[1].attention.wv.bias += 1e-3  # negative control: every bias counts
    assert (model(tokens()) - expected).abs().max() > 1e-6


def test_learned_positions_end_with_their_table():
    model = built(LEARNED)
    assert model(tokens(length=20)).shape == (2, 20, 40)
    with pytest.raises(ValueError, match="21 tokens are more than max_position_embeddings 20"):
        model(tokens(length=21))
    with pytest.raises(IndexError):
        model(tokens(), torch.arange(12) + 9)
    assert built(ROPE)(tokens(length=21)).shape == (2, 21, 40)
