"""Layers with a gated delta rule against transformers' modules; a model of them in one process."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from model.parts.delta import DeltaAttention, OneDevice
from model.parts.gates import Gates
from model.registry import build_model, flops_per_token, num_parameters
from runtime.errors import UserError
from tests.model.models import (
    DELTAS,
    KDA,
    OLMO_HYBRID,
    QWEN3_5,
    built,
    model_config,
    tied,
    tokens,
    without_float32,
)

transformers = pytest.importorskip("transformers", reason="compares with Hugging Face's modules")

IDS = ["qwen3_5", "olmo_hybrid", "kda"]


@pytest.fixture(params=DELTAS, ids=IDS)
def config(request):
    """Weights far from their beginnings."""
    return dataclasses.replace(request.param, init_method_std=0.2)


def test_a_gate_per_channel_is_kimis_layer():
    """Outputs and every gradient equal those of transformers' module, in float64."""
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi

    theirs_config = transformers.KimiLinearConfig(
        hidden_size=32,
        linear_head_dim=8,
        linear_num_heads=4,
        num_hidden_layers=2,
        rms_norm_eps=1e-5,
        layer_types=["linear_attention"] * 2,
    )
    torch.manual_seed(0)
    theirs = kimi.KimiLinearDeltaAttention(theirs_config, 0).double()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    shape = {
        "num_layers": 2,
        "linear_value_head_dim": 8,
        "linear_key_head_dim": 8,
        "norm_epsilon": 1e-5,
    }
    layer = DeltaAttention(dataclasses.replace(KDA, **shape), 0, OneDevice()).double()
    layer.load_state_dict(as_ours({name: p.detach() for name, p in theirs.named_parameters()}))
    x = torch.randn(2, 70, 32, dtype=torch.float64)
    with without_float32(kimi):
        got, want = layer(x), theirs(x)
        for out in (got, want):
            out.square().sum().backward()
    assert (got - want).norm() < 1e-13 * want.norm()
    grads = as_ours({name: p.grad for name, p in theirs.named_parameters()})
    for name, parameter in layer.named_parameters():
        assert (parameter.grad - grads[name]).norm() < 1e-12 * grads[name].norm(), name


def as_ours(theirs):
    """Kimi's tensors by the names of ours."""
    names = {
        "q_proj": "wq",
        "k_proj": "wk",
        "v_proj": "wv",
        "b_proj": "wb",
        "o_proj": "wo",
        "o_norm": "out_norm",
    }
    names |= {
        "forget_gate.f_a_proj": "wa.narrow",
        "forget_gate.f_b_proj": "wa.wide",
        "forget_gate": "gates",
    }
    names |= {"g_a_proj": "wu.narrow", "g_b_proj": "wu.wide"}
    conv = zip("qkv", theirs.pop("conv1d.weight").chunk(3), strict=True)
    state_dict = {f"conv_{name}.weight": weight.flatten() for name, weight in conv}
    for name, tensor in theirs.items():
        module, kind = name.rsplit(".", 1)
        state_dict[f"{names[module]}.{kind}"] = tensor.flatten() if kind == "A_log" else tensor
    return state_dict


@pytest.mark.parametrize("kind", DELTAS, ids=IDS)
def test_initial_weights_are_the_published_ones(kind):
    config = dataclasses.replace(
        kind, linear_num_value_heads=None, linear_num_key_heads=200, num_layers=2
    )
    weights = dict(built(config).named_parameters())
    rates, bias = (
        weights[f"layers.0.attention.gates.{name}"].detach() for name in ("A_log", "dt_bias")
    )
    min_rate = 1.0 if kind is KDA else 0.01
    assert min_rate <= rates.exp().min() < 2
    assert 15 < rates.exp().max() <= 16
    if kind is QWEN3_5:
        assert (bias == 1).all()
    else:
        steps = nn.functional.softplus(bias)
        assert 1e-3 * 0.999 < steps.min() < 2e-3
        assert 0.05 < steps.max() < 0.1001
    taps = weights["layers.0.attention.conv_k.weight"]
    assert 0.45 < taps.abs().max() <= 0.5
    assert taps.std().item() == pytest.approx(1 / math.sqrt(12), rel=0.1)
    assert all(
        weight.ndim == 1 for name, weight in weights.items() if "conv" in name or "gates" in name
    )
    norm = 1 if kind is OLMO_HYBRID else 0
    assert (weights["layers.0.attention_norm.weight"] == norm).all()
    assert (weights["layers.1.attention.q_norm.weight"] == norm).all()
    assert (weights["layers.0.attention.out_norm.weight"] == 1).all()


def test_gates_stay_in_float32_in_a_model_of_bfloat16():
    model = built(QWEN3_5)
    model.cast(torch.bfloat16)
    assert {
        name.rsplit(".", 1)[1] for name, p in model.named_parameters() if p.dtype == torch.float32
    } == {
        "A_log",
        "dt_bias",
    }
    gates = next(m for m in model.modules() if isinstance(m, Gates))
    assert gates(torch.zeros(1, 3, 4, dtype=torch.bfloat16)).dtype == torch.float32
    exact = built(QWEN3_5)(tokens())
    assert (model(tokens()).float() - exact).norm() < 0.05 * exact.norm()


def test_flops_count_the_rule_and_the_convolution():
    """Three products with each state, forward and twice backward, and six operations a tap."""
    delta = dataclasses.replace(QWEN3_5, num_layers=2)
    assert delta.state_elements == 4 * 8 * 12
    channels = 2 * 2 * 8 + 4 * 12
    model = build_model(delta)
    matrices = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    softmax = 12 * 4 * 16 * 100 / 2
    assert (
        flops_per_token(delta, 100) == 6 * matrices + 18 * 4 * 8 * 12 + 6 * 4 * channels + softmax
    )
    assert num_parameters(tied(delta)) == sum(
        p.numel() for p in build_model(tied(delta)).parameters()
    )


# hidden, layers, heads, groups, ffn, value heads, tied: billions of parameters of the text part
PUBLISHED = {
    (1024, 24, 8, 2, 3584, 16, True): 0.75,
    (2560, 32, 16, 4, 9216, 32, True): 4.21,
    (4096, 32, 16, 4, 12288, 32, False): 8.95,
    (5120, 64, 24, 4, 17408, 48, False): 26.9,
}


@pytest.mark.parametrize(("shape", "billions"), PUBLISHED.items())
def test_published_sizes(shape, billions):
    hidden, layers, heads, groups, ffn, values, same = shape
    config = model_config(
        model_type="qwen3_5",
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        vocab_size=248320,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=256,
        linear_num_key_heads=16,
        linear_num_value_heads=values,
        linear_key_head_dim=128,
        untie_embeddings_and_output_weights=not same,
    )
    assert num_parameters(config) / 1e9 == pytest.approx(
        billions, abs=0.006 if billions < 10 else 0.06
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"linear_num_value_heads": 3},
            "linear_num_value_heads is 3; it must be a multiple of linear_num_key_heads 2",
        ),
        (
            {"linear_gate": "per_channel"},
            "linear_gate is per_channel; gates per channel need as many key heads as value",
        ),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0"),
        ({"softmax_every": 3}, "softmax_every is 3; it must be from 2"),
        ({"rotary_percent": 0.2}, "rotary_percent is 0.2; rope would rotate 3 of 16 channels"),
        ({"rotary_percent": float("nan")}, "rotary_percent is nan; it must be above 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, words):
    with pytest.raises(UserError, match=words):
        dataclasses.replace(QWEN3_5, **change)
