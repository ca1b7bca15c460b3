"""TransNormer against the released model, written out by hand.

It takes the weights under their released names.
"""

import dataclasses
import json
import math

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from model.decoder import Decoder
from model.hf import config_from_hf, config_to_hf, from_hf, load_hf, save_hf, to_hf
from model.parts.linear_attention import LRPE, alibi_slopes, paper_decay, released_decay
from tests.model.models import FAMILY, TRANSNORMER, built, tied, tokens

UNTIED = dataclasses.replace(
    TRANSNORMER,
    num_layers=3,
    ffn_hidden_size=40,
    norm_epsilon=1e-6,
    init_method_std=0.1,
    vocab_size=50,
)
TIED = tied(UNTIED)
CONFIGS = {
    "tied": TIED,
    "untied": UNTIED,
    "6 heads": dataclasses.replace(
        TIED, num_attention_heads=6, kv_channels=5, no_scale_embedding=True
    ),
}
TOKENS = tokens(90)


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def config(request):
    return request.param


def released_slopes(heads):
    """As the released code has them."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**i for i in range(heads)]
    closest = 2 ** math.floor(math.log2(heads))
    return released_slopes(closest) + released_slopes(2 * closest)[0::2][: heads - closest]


def released(weights, config, ids):
    """Logits from weights in the released naming, in the weights' dtype.

    They are computed one head at a time with every score.
    """
    heads, layers = config.num_attention_heads, config.num_layers

    def norm(x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    place = torch.arange(ids.shape[1]).double()
    distance = place[:, None] - place
    x = weights["model.embed_tokens.weight"][ids] * (
        1 if config.no_scale_embedding else config.hidden_size**0.5
    )
    for layer in range(layers):
        name = f"model.layers.{layer}."
        q, k, v, u = (norm(x) @ weights[name + "token_mixer.qkvu_proj.weight"].T).chunk(4, dim=-1)
        out = []
        for head in range(heads):
            a, b, c = (y.unflatten(-1, (heads, -1))[:, :, head] for y in (q, k, v))
            a, b = (y * y.sigmoid() for y in (a, b))
            if layer == 0:
                turn = weights[name + "token_mixer.lrpe.theta"][head] * place[:, None]
                a, b = (torch.cat((y * turn.cos(), y * turn.sin()), -1) for y in (a, b))
            slope = released_slopes(heads)[head] * (1 - layer / (layers - 1) + 1e-5)
            scores = (
                (a @ b.transpose(1, 2))
                * torch.exp(-slope * distance.clamp(min=0))
                * (distance >= 0)
            )
            out.append(scores @ c)
        x = x + (u * norm(torch.cat(out, -1))) @ weights[name + "token_mixer.out_proj.weight"].T
        y = norm(x)
        y = (y @ weights[name + "channel_mixer.l1.weight"].T) * (
            y @ weights[name + "channel_mixer.l2.weight"].T
        )
        x = x + y @ weights[name + "channel_mixer.l3.weight"].T
    return norm(x) @ weights["lm_head.weight"].T


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_logits_and_gradients_equal_the_released_models(config, dtype, bound):
    model = built(config).to(dtype)
    exact = built(config).double()
    exact.load_state_dict(model.state_dict())
    want = released(to_hf(dict(exact.named_parameters()), config), config, TOKENS)
    got = model(TOKENS)
    assert want.std() > 0.2
    assert (got - want).norm() < bound * want.norm()
    for logits in (got, want):
        nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS.roll(-1).flatten()).backward()
    for (name, a), b in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert b.grad.norm() > 0, name
        assert (a.grad - b.grad).norm() < bound * b.grad.norm(), name


HEADS = {"num_attention_heads": 8, "kv_channels": 4}


@pytest.mark.parametrize(
    "breakage",
    [{"linear_decay": "paper"}, {"no_scale_embedding": True}, {"norm_epsilon": 1e-2}, HEADS],
)
def test_bound_sees_a_wrong_configuration(breakage):
    """Negative control: weights of the same shapes in a model that computes something else."""
    model = built(TIED).double()
    other = Decoder(dataclasses.replace(TIED, **breakage)).double()
    other.load_state_dict(model.state_dict())
    want = released(to_hf(model.state_dict(), TIED), TIED, TOKENS)
    assert (other(TOKENS) - want).norm() > 1e-4 * want.norm()


def test_decays():
    assert alibi_slopes(8) == pytest.approx([2**-h for h in range(1, 9)])
    for heads in (1, 4, 6, 12, 40):
        assert alibi_slopes(heads) == pytest.approx(released_slopes(heads))
    assert released_decay(4, 3, 0) == pytest.approx(
        [-slope * (1 + 1e-5) for slope in alibi_slopes(4)]
    )
    assert released_decay(4, 3, 2) == pytest.approx([-slope * 1e-5 for slope in alibi_slopes(4)])
    assert [math.exp(rate) for rate in paper_decay(4, 3, 0)] == pytest.approx(
        [math.exp(-8 * h / 4 * (1 - 1 / 3)) for h in (1, 2, 3, 4)]
    )
    assert paper_decay(4, 3, 2) == (0, 0, 0, 0)
    assert max(released_decay(4, 1, 0)) < 0


def test_positions_are_relative_and_exact_far_out():
    """Products of turned queries and keys depend on distances, at a million too.

    float32's angles do not.
    """
    lrpe = LRPE(2, 4)
    lrpe.theta.data = torch.tensor([1.0, 0.5, 0.1, 0.01] * 2)
    q, k = (
        torch.randn(1, 50, 2, 4, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)
    )
    products = []
    for start in (0, 1_000_000):
        a, b = lrpe(q, k, torch.arange(start, start + 50))
        products.append(torch.einsum("bthd,bshd->bhts", a, b))
    assert (products[0] - products[1]).abs().max() < 1e-5
    far = (
        torch.arange(1_000_000, 1_000_050)[:, None, None] * torch.ones(2, 4)
    ).float() * lrpe.theta.view(2, 4)
    rounded = [torch.cat((x * far.cos(), x * far.sin()), -1) for x in (q, k)]
    assert (
        torch.einsum("bthd,bshd->bhts", *rounded) - products[0]
    ).abs().max() > 1e-3  # what float32 angles would do


def test_explicit_positions_are_those_of_the_tokens():
    model = built(TIED).double()
    batched = torch.arange(90).expand(2, 90)
    assert torch.equal(model(TOKENS, batched), model(TOKENS))
    assert (model(TOKENS, 2 * batched[0]) - model(TOKENS)).norm() > 1e-3


def test_in_bfloat16_the_angles_stay_exact():
    model = built(TIED)
    model.cast(torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert dtypes.pop("layers.0.attention.lrpe.theta") == torch.float32
    assert set(dtypes.values()) == {torch.bfloat16}
    exact = built(TIED)(TOKENS)
    assert (model(TOKENS) - exact).norm() < 0.05 * exact.norm()


def test_round_trip_in_the_released_naming(config, tmp_path):
    model = built(config)
    theirs = to_hf(model.state_dict(), config)
    inside, width = config.num_attention_heads * config.head_dim, config.hidden_size
    assert {
        name: tuple(weight.shape) for name, weight in theirs.items() if ".layers.0." in name
    } == {
        "model.layers.0.token_mixer.qkvu_proj.weight": (4 * inside, width),
        "model.layers.0.token_mixer.out_proj.weight": (width, inside),
        "model.layers.0.token_mixer.lrpe.theta": (config.num_attention_heads, 1, config.head_dim),
        "model.layers.0.channel_mixer.l1.weight": (40, width),
        "model.layers.0.channel_mixer.l2.weight": (40, width),
        "model.layers.0.channel_mixer.l3.weight": (width, 40),
    }
    back = from_hf(theirs, config)
    assert back.keys() == model.state_dict().keys()
    assert all(torch.equal(back[name], weight) for name, weight in model.state_dict().items())

    save_hf(tmp_path / "out", config, model.state_dict())
    loaded, state, _ = load_hf(tmp_path / "out")
    assert config_from_hf(config_to_hf(loaded)) == loaded
    assert (loaded.head_dim, loaded.no_scale_embedding) == (
        config.head_dim,
        config.no_scale_embedding,
    )
    again = Decoder(loaded)
    again.load_state_dict(state)
    assert torch.equal(again(TOKENS), model(TOKENS))
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert ("lm_head.weight" in stored) == config.untie_embeddings_and_output_weights


def test_a_released_configuration_is_read():
    """TransNormerLLM-385M's values.

    It lists no tie_word_embeddings, which transformers takes for true.
    """
    theirs = {
        "model_type": "transnormer",
        "vocab_size": 64000,
        "init_std": 0.02,
        "hidden_dim": 1024,
    }
    theirs |= {"decoder_embed_dim": 1024, "decoder_layers": 24, "decoder_attention_heads": 8}
    theirs |= {"no_scale_embedding": False, "norm_type": "simplermsnorm", "linear_act_fun": "silu"}
    theirs |= {"linear_use_lrpe_list": [1] + 23 * [0], "glu_dim": 2816, "bias": False}
    config = config_from_hf(theirs)
    assert (config.num_layers, config.hidden_size, config.ffn_size, config.head_dim) == (
        24,
        1024,
        2816,
        128,
    )
    assert not config.untie_embeddings_and_output_weights
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config
    lrpe = {"linear_use_lrpe_list": 24 * [1]}
    for change in (lrpe, {"norm_type": "layernorm"}, {"linear_act_fun": "1+elu"}, {"bias": True}):
        with pytest.raises(ValueError, match=r"config\.json: \w+ = .* is not supported"):
            config_from_hf(theirs | change)
    del theirs["glu_dim"]
    with pytest.raises(ValueError, match="glu_dim is missing"):
        config_from_hf(theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear_decay": "paper"}, "linear_decay is paper"),
        ({"norm_epsilon": 1e-5}, "norm_epsilon is 1e-05"),
        (
            {"softmax_every": 2},
            "softmax_every is 2, but for a released TransNormer it must be left out, for linear",
        ),
    ],
)
def test_what_the_released_code_cannot_be_is_not_written(change, message):
    with pytest.raises(ValueError, match=message):
        config_to_hf(dataclasses.replace(TIED, **change))


def test_a_linear_transformer_is_not_written():
    with pytest.raises(
        ValueError, match=r"model_type is linear_transformer, .* only llama, gpt, transnormer"
    ):
        config_to_hf(FAMILY["linear_transformer"])
