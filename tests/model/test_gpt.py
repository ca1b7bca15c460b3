import dataclasses

import pytest
import torch

from tests.model.models import GPT, tied, tokens, used

LEARNED = dataclasses.replace(GPT, max_position_embeddings=20, init_method_std=0.1)
ROPE = dataclasses.replace(LEARNED, position_embedding_type="rope", max_position_embeddings=None)
GROUPED = dataclasses.replace(tied(LEARNED), num_query_groups=2)


def by_hand(model, ids, embed, attend):
    """A model of GPT's layers, one head at a time, without its modules' forward; float64.

    Args:
        embed: weights by name -> the first layer's input.
        attend: q, k and v [B, T, D] of a head -> its output.
    """
    weights, config = dict(model.named_parameters()), model.config

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x, name):
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + config.norm_epsilon).sqrt()
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    x = embed(weights)
    for i in range(config.num_layers):
        layer = f"layers.{i}"
        inside = norm(x, f"{layer}.attention_norm")
        q, k, v = (linear(inside, f"{layer}.attention.{w}").split(config.head_dim, -1) for w in ("wq", "wk", "wv"))
        groups = [head * config.query_groups // config.num_attention_heads for head in range(len(q))]
        outs = [attend(q[head], k[group], v[group]) for head, group in enumerate(groups)]
        x = x + linear(torch.cat(outs, -1), f"{layer}.attention.wo")
        up = linear(norm(x, f"{layer}.mlp_norm"), f"{layer}.mlp.up")
        gelu = up * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (up + 0.044715 * up**3))) / 2
        x = x + linear(gelu, f"{layer}.mlp.down")
    return norm(x, "norm") @ weights.get("output.weight", weights["embedding.weight"]).T


def naive(model, ids):
    config, positions = model.config, torch.arange(ids.shape[1])
    width = config.head_dim

    def turn(x):
        if config.learned_positions:
            return x
        angles = positions[:, None] * config.rotary_base ** (-torch.arange(0, width, 2).double() / width)
        turned = torch.view_as_complex(torch.stack((x[..., : width // 2], x[..., width // 2 :]), -1))
        turned = turned * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((turned.real, turned.imag), -1)

    def embed(weights):
        x = weights["embedding.weight"][ids]
        return x + weights["position_embedding.weight"][positions] if config.learned_positions else x

    def attend(q, k, v):
        scores = turn(q) @ turn(k).mT / width**0.5
        return scores.masked_fill(positions[:, None] < positions, float("-inf")).softmax(-1) @ v

    return by_hand(model, ids, embed, attend)


@pytest.mark.parametrize("config", [LEARNED, ROPE, GROUPED], ids=["learned", "rope", "grouped and tied"])
def test_logits_are_those_written_out_by_hand(config):
    model = used(config).double()
    expected = naive(model, tokens())
    assert expected.std() > 0.5
    assert (model(tokens()) - expected).abs().max() < 1e-12
    assert torch.equal(model(tokens()), model.project(model.hidden(tokens())))
    with torch.no_grad():
        model.layers[1].attention.wv.bias += 1e-3  # negative control: every bias counts
    assert (model(tokens()) - expected).abs().max() > 1e-6


def test_learned_positions_end_with_their_table():
    model = used(LEARNED)
    assert model(tokens(20)).shape == (2, 20, 40)
    with pytest.raises(ValueError, match="21 tokens are more than max_position_embeddings 20"):
        model(tokens(21))
    with pytest.raises(IndexError):
        model(tokens(), torch.arange(12) + 9)
    assert used(ROPE)(tokens(21)).shape == (2, 21, 40)
