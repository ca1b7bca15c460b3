import dataclasses

import pytest
import torch

from model.parts.attention import HybridAttention, linear, sdpa
from model.registry import build_model, initial_weight
from runtime.errors import UserError
from tests.model.models import FAMILY, GPT, HYBRID, KINDS, LLAMA, built, tied, tokens, used

WINDOWS = {"window_size": "3,0", "window_attn_skip_freq": "2", "softmax_type": "learnable"}
ALL = {
    **{name: config for name, config in FAMILY.items() if not config.recurrent},
    "llama, tied": tied(LLAMA),
    "gpt, rope": dataclasses.replace(
        GPT, position_embedding_type="rope", max_position_embeddings=None
    ),
    "llama, windows and sinks": dataclasses.replace(LLAMA, **WINDOWS),
    "gpt, off by one": dataclasses.replace(GPT, window_size="5,0", softmax_type="off-by-one"),
    "gpt, grouped and tied": dataclasses.replace(tied(GPT), num_query_groups=2),
}


@pytest.fixture(params=ALL.values(), ids=ALL.keys())
def any_kind(request):
    """Weights far from their beginnings."""
    return dataclasses.replace(request.param, init_method_std=0.1)


@pytest.mark.parametrize("config", KINDS)
def test_initial_weights_are_a_function_of_the_seed_alone(config):
    torch.manual_seed(0)
    weights = built(config, seed=5).state_dict()
    torch.manual_seed(1)
    torch.randn(7)
    with torch.device("meta"):
        model = build_model(config)
    model.to_empty(device="cpu")
    model.init_weights(5)
    other = model.state_dict()
    assert all(torch.equal(weights[name], other[name]) for name in weights)
    deeper = built(dataclasses.replace(config, num_layers=3), seed=5).state_dict()
    assert torch.equal(
        weights["layers.1.attention.wq.weight"], deeper["layers.1.attention.wq.weight"]
    )
    assert not torch.equal(weights["embedding.weight"], built(config, seed=6).embedding.weight)
    matrices = [weights[f"layers.{i}.attention.{w}.weight"] for i in (0, 1) for w in ("wk", "wv")]
    assert not any(torch.equal(a, b) for i, a in enumerate(matrices) for b in matrices[:i])
    name = "layers.0.mlp.up.weight"
    assert torch.equal(weights[name], initial_weight(config, name, weights[name].shape, 5))


@pytest.mark.parametrize("kind", KINDS)
def test_initial_weights_have_their_deviations(kind):
    config = dataclasses.replace(
        kind, num_layers=8, hidden_size=128, vocab_size=300, init_method_std=0.05
    )
    for name, weight in built(config).named_parameters():
        if "norm" in name or name.endswith("bias"):
            assert (weight == (0 if name.endswith("bias") else 1)).all()
            continue
        if name.endswith("lrpe.theta"):  # the angles, from 1 down
            assert weight.tolist() == pytest.approx([10000 ** (-2 * j / 128) for j in range(128)])
            continue
        expected = 0.05 / 4 if name.endswith(("wo.weight", "down.weight")) else 0.05
        assert weight.std().item() == pytest.approx(expected, rel=0.03), name
        assert abs(weight.mean().item()) < 4 * expected / weight.numel() ** 0.5, name


def test_weights_on_the_meta_device_are_not_initialised_silently():
    with torch.device("meta"):
        model = build_model(KINDS[1])
    with pytest.raises(ValueError, match="to_empty"):
        model.init_weights(0)


def test_explicit_positions_make_the_order_of_tokens_free(any_kind):
    """A context-parallel layout relies on it.

    Permuted tokens with their positions and a mask to match.
    """
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    back = order.argsort()

    def attend(q, k, v, **settings):
        return sdpa(*(x[:, back] for x in (q, k, v)), **settings)[:, order]

    expected, model = used(any_kind)(tokens()), used(any_kind, attend)
    permuted = model(tokens()[:, order], order)
    torch.testing.assert_close(permuted[:, back], expected, rtol=0, atol=1e-5)
    each = model(tokens()[:, order], order.expand(2, -1))
    torch.testing.assert_close(each, permuted, rtol=0, atol=1e-6)
    wrong = model(tokens()[:, order])[:, back]
    assert (wrong - expected).abs().max() > 1e-3  # the bound sees positions that were not given


@pytest.mark.parametrize(
    "config",
    [*(config for config in FAMILY.values() if not config.delta_rule), HYBRID],
    ids=lambda config: config.model_type,
)
def test_the_mask_reaches_every_attention_and_is_refused_without_a_method(config):
    masks, mask = [], object()

    def recurrence(q, k, v, log_decay, mask=None):
        masks.append(mask)
        return linear(q, k, v, log_decay)

    def scores(q, k, v, mask=None, **settings):
        masks.append(mask)
        return sdpa(q, k, v, **settings)

    both = HybridAttention(recurrence, scores)
    attend = both if config is HYBRID else recurrence if config.linear_attention else scores
    masked, model = built(config, attend=attend)(tokens(), mask=mask), built(config)
    assert len(masks) == config.num_layers
    assert all(seen_mask is mask for seen_mask in masks)
    assert torch.equal(masked, model(tokens()))
    with pytest.raises(
        UserError, match=r"mask is a object, .* needs a method .* set a context_parallel_method"
    ):
        model(tokens(), mask=mask)


@pytest.mark.parametrize("config", [LLAMA, GPT, HYBRID], ids=lambda config: config.model_type)
def test_off_by_one_softmax_has_sinks_of_zero_and_learned_sinks_are_each_layers_own(config):
    config = dataclasses.replace(config, num_layers=4, softmax_type="learnable")
    learned = built(config).double()
    sinks = [layer.attention.sinks for layer in learned.layers if hasattr(layer.attention, "sinks")]
    assert len({weight.data_ptr() for weight in sinks}) == (2 if config.softmax_period else 4)
    for weight in sinks:
        weight.data.zero_()
    off_by_one, vanilla = (
        built(dataclasses.replace(config, softmax_type=kind)).double()(tokens())
        for kind in ("off-by-one", "vanilla")
    )
    torch.testing.assert_close(off_by_one, learned(tokens()), rtol=0, atol=1e-14)
    assert (off_by_one - vanilla).abs().max() > 1e-4


def test_every_parameter_gets_a_gradient_in_bf16(any_kind):
    model = used(any_kind).bfloat16()
    logits = model(tokens())
    assert logits.dtype == torch.bfloat16
    exact = used(any_kind)(tokens())
    assert (logits - exact).norm() < 0.03 * exact.norm()
    logits.float().logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name
        # Softmax takes no notice of what all keys share: but for rotation, their bias has no
        # gradient but noise.
        assert parameter.grad.abs().sum() > 0 or name.endswith("wk.bias"), name
