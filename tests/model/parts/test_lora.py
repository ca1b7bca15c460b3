"""Adapters of low rank.

Which layers get them, what they compute, what is trained, and settings without sense.
"""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from model.parts.lora import is_adapter, merge
from model.registry import (
    architecture_of,
    build_model,
    flops_per_token,
    initial_weight,
    num_parameters,
    num_trained,
)
from runtime.errors import UserError
from tests.model.models import FAMILY, GPT, KDA, LLAMA, TRANSNORMER, tied

KINDS = {
    **FAMILY,
    "gpt, tied": tied(GPT),
    "sinks": dataclasses.replace(LLAMA, softmax_type="learnable", window_size="5,0"),
    "kda": KDA,
    "hybrid": dataclasses.replace(TRANSNORMER, num_layers=3, softmax_every=3),
}
TOKENS = torch.randint(40, (2, 12), generator=torch.Generator().manual_seed(0))


def adapted(config, **settings):
    return dataclasses.replace(config, **{"lora_rank": 3, "lora_alpha": 4.5} | settings)


def model_of(config):
    """A model in float64 whose adapters do something."""
    model = build_model(config).double()
    model.init_weights(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("lora_B.weight"):
                weight.normal_(generator=torch.Generator().manual_seed(weight.numel()))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_compute_what_adapters_do(kind):
    config = adapted(KINDS[kind])
    model = model_of(config)
    state = model.state_dict()
    # The queries of a delta rule are normalised in float32, which makes digits scarce.
    bound = 1e-4 if config.recurrent else 1e-5
    for scale, same in ((config.lora_scale, True), (1.0, False)):  # the second is a control
        weights, read = merge(state, state.__getitem__, scale)
        whole = build_model(config.merged()).double()
        whole.load_state_dict({name: read(name) for name in weights})
        assert (whole(TOKENS) - model(TOKENS)).abs().max().item() < bound or not same
        assert torch.allclose(whole(TOKENS), model(TOKENS), atol=bound) == same


def test_merging_changes_nothing_of_what_it_reads():
    state = model_of(adapted(LLAMA)).float().state_dict()
    before = {name: weight.clone() for name, weight in state.items()}
    weights, read = merge(state, state.__getitem__, 1.5)
    assert not torch.equal(read("layers.0.mlp.up.weight"), before["layers.0.mlp.up.weight"])
    assert [read(name).dtype for name in weights] == [torch.float32] * len(weights)
    assert all(torch.equal(state[name], weight) for name, weight in before.items())


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_alone_have_gradients(kind):
    """Every linear layer in a layer has one, and the output projection and bottlenecks none."""
    config = adapted(KINDS[kind])
    model = model_of(config)
    model(TOKENS).square().sum().backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None and p.grad.any()} == {
        name for name in model.state_dict() if is_adapter(name)
    }
    linears = [
        n
        for n, m in model.named_modules()
        if isinstance(m, torch.nn.Linear) and n.startswith("layers")
    ]
    linears = [
        name for name in linears if not any(part in name for part in (".lora_", ".narrow", ".wide"))
    ]
    assert {f"{name}.lora_{matrix}.weight" for name in linears for matrix in "AB"} == {
        name for name in model.state_dict() if is_adapter(name)
    }
    assert num_trained(config) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert num_trained(config) == num_parameters(config) - num_parameters(KINDS[kind])
    assert num_trained(KINDS[kind]) == num_parameters(KINDS[kind])


def test_a_model_begins_as_it_is_and_by_name_and_seed():
    model = build_model(adapted(LLAMA))
    model.init_weights(5)
    base = build_model(LLAMA)
    base.init_weights(5)
    assert torch.equal(model(TOKENS), base(TOKENS))
    config = adapted(LLAMA)
    first = initial_weight(config, "layers.0.mlp.down.lora_A.weight", (3, 64), 5)
    assert 0.9 / 8 < first.abs().max() < 1 / 8
    other = initial_weight(config, "layers.1.mlp.down.lora_A.weight", (3, 64), 5)
    assert not torch.equal(first, other)


def test_flops_are_those_that_torch_counts():
    """Two products of a frozen weight, three of an adapter's.

    The first layer's need no gradient of their input.
    """
    config = adapted(LLAMA, num_layers=1)
    model = model_of(config)
    with FlopCounterMode(display=False) as counter:
        hidden = torch.randn(1, 12, 32, dtype=torch.float64, requires_grad=True)
        model(hidden).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    products = sum(count for op, count in counts.items() if str(op) in ("aten.mm", "aten.addmm"))
    assert products == 12 * flops_per_token(config, 0)


def test_peft_names_are_ours():
    theirs = adapted(LLAMA, lora_target=("v_proj", "q_proj", "down_proj"))
    ours = adapted(LLAMA, lora_target=("wq", "down", "wv", "wq"))
    assert theirs.adapted_linears() == ours.adapted_linears() == ("wq", "wv", "down")
    assert architecture_of(theirs) == architecture_of(ours) != architecture_of(adapted(LLAMA))
    assert architecture_of(theirs.merged()) == architecture_of(LLAMA)
    assert "lora_rank" not in architecture_of(LLAMA)


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (LLAMA, {"lora_rank": 0}, "lora_rank is 0; it must be from 1 to hidden_size 32"),
        (LLAMA, {"lora_rank": 33}, "lora_rank is 33; it must be from 1 to hidden_size 32"),
        (LLAMA, {"lora_alpha": 0.0}, "lora_alpha is 0.0; it must be a number above 0"),
        (
            LLAMA,
            {"lora_rank": None},
            "lora_alpha is 4.5, but lora_rank is not set; give --lora-rank",
        ),
        (
            LLAMA,
            {"lora_rank": None, "lora_alpha": None, "lora_target": ("wq",)},
            "lora_target is wq, but lora_rank is",
        ),
        (
            LLAMA,
            {"lora_target": ("wu",)},
            "lora_target has wu, but .* linear layer; choose from wq wk wv wo gate up down",
        ),
        (LLAMA, {"lora_target": ("q_proj", "lm_head")}, "lora_target has lm_head, but this"),
        (
            KINDS["gpt, tied"],
            {"lora_target": ("gate_proj",)},
            "lora_target has gate_proj, but this",
        ),
        (KDA, {"lora_target": ("wa",)}, "lora_target has wa, but this"),  # a bottleneck
    ],
)
def test_settings_without_sense_are_refused(config, settings, message):
    with pytest.raises(UserError, match=message):
        adapted(config, **settings)
