"""A Linear Transformer written out by hand, in float64; learned positions.

Layers sharded and on a GPU.

The other kinds of models are compared with their published implementations.
"""

from dataclasses import replace

import pytest
import torch

from model.parts.linear_attention import Sinusoids, features
from runtime.ranks import run_ranks
from tests.model.models import GPT, LINEAR, LLAMA, built, tied, tokens, used

LEARNED = replace(GPT, max_position_embeddings=20, init_method_std=0.1)
ROPE = replace(LEARNED, position_embedding_type="rope", max_position_embeddings=None)
UNTIED = replace(LINEAR, init_method_std=0.1)
TOKENS = tokens(90)


def by_hand(model, ids, embed, attend):
    """A model of such layers, one head at a time, without its modules' forward; float64.

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
        q, k, v = (
            linear(inside, f"{layer}.attention.{w}").split(config.head_dim, -1)
            for w in ("wq", "wk", "wv")
        )
        outs = [attend(*head) for head in zip(q, k, v, strict=True)]
        x = x + linear(torch.cat(outs, -1), f"{layer}.attention.wo")
        up = linear(norm(x, f"{layer}.mlp_norm"), f"{layer}.mlp.up")
        gelu = up * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (up + 0.044715 * up**3))) / 2
        x = x + linear(gelu, f"{layer}.mlp.down")
    return norm(x, "norm") @ weights.get("output.weight", weights["embedding.weight"]).T


def test_learned_positions_end_with_their_table():
    model = used(LEARNED)
    assert model(tokens(20)).shape == (2, 20, 40)
    with pytest.raises(ValueError, match="got 21 tokens, but max_position_embeddings is 20"):
        model(tokens(21))
    with pytest.raises(IndexError):
        model(tokens(), torch.arange(12) + 9)
    assert used(ROPE)(tokens(21)).shape == (2, 21, 40)


def naive_linear(model, ids):
    width = model.config.hidden_size

    def embed(weights):
        place = torch.arange(ids.shape[1], dtype=torch.float64)[:, None]
        angle = place / 10000 ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
        return weights["embedding.weight"][ids] * width**0.5 + torch.cat(
            (angle.sin(), angle.cos()), -1
        )

    def attend(q, k, v):
        q, k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
        scores = (q @ k.mT).tril()
        return scores / scores.sum(-1, keepdim=True) @ v

    return by_hand(model, ids, embed, attend)


@pytest.mark.parametrize("config", [UNTIED, tied(UNTIED)], ids=["untied", "tied"])
def test_logits_and_gradients_equal_the_naive_model(config):
    model = used(config, dtype=torch.float64)
    names, parameters = zip(*model.named_parameters(), strict=True)
    results = []
    for logits in (model(TOKENS), naive_linear(model, TOKENS)):
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS.roll(-1).flatten())
        results.append([logits, *torch.autograd.grad(loss, parameters)])
    assert results[1][0].std() > 0.2
    for name, a, b in zip(("logits", *names), *results, strict=True):
        # A constant added to all keys' biases changes scores, unlike under softmax: no gradient is
        # zero.
        assert (a - b).norm() < 1e-11 * b.norm(), name


def test_the_bound_sees_a_missing_normaliser_and_missing_positions(monkeypatch):
    model = used(tied(UNTIED), dtype=torch.float64)
    want = naive_linear(model, TOKENS)
    assert (model(TOKENS, torch.zeros(90, dtype=torch.long)) - want).norm() > 1e-3 * want.norm()
    monkeypatch.setattr("model.parts.linear_attention.features", lambda x: x.relu() + 1)
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


def fully_sharded(rank, world_size):
    """Dtypes of a layer's input and rotary tables, and a gradient's error.

    They are those inside FSDP2's bf16 mixed precision.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dtypes = []
    model, reference = built(tied(LLAMA)), built(tied(LLAMA)).bfloat16()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        layer.attention.register_forward_pre_hook(
            lambda _, args: dtypes.append((args[0].dtype, args[1].cos.dtype))
        )
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model(tokens()).square().sum().backward()
    reference(tokens()).square().sum().backward()
    got, want = model.embedding.weight.grad.full_tensor(), reference.embedding.weight.grad
    return dtypes, ((got - want).norm() / want.norm()).item()


def test_fsdp_keeps_rotary_tables_in_float32():
    for dtypes, error in run_ranks(fully_sharded, 2):
        assert dtypes == [(torch.bfloat16, torch.float32)] * 2
        assert error < 0.01


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device; make gpu-check runs it"
)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)])
def test_cuda_computes_what_the_cpu_does(dtype, bound):
    def losses_and_gradients(model, device):
        logits = model(tokens().to(device))
        logits.float().logsumexp(-1).sum().backward()
        return [logits, *(p.grad for p in model.parameters())]

    expected = losses_and_gradients(built(LLAMA).double(), "cpu")
    for got, want in zip(
        losses_and_gradients(built(LLAMA).to("cuda", dtype), "cuda"), expected, strict=True
    ):
        assert (got.cpu().double() - want).norm() < bound * want.norm()
