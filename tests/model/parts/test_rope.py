"""Scaled rope turns as transformers' ROPE_INIT_FUNCTIONS do, by positions alone.

It refuses what makes no sense.
"""

import dataclasses

import pytest
import torch

from model.parts.rope import RopeConfig, frequencies
from model.parts.rotary import Rotary
from model.registry import architecture_of
from tests.model.models import model_config

rope_utils = pytest.importorskip(
    "transformers.modeling_rope_utils", reason="compares with transformers' tables"
)

TRAINED, WIDTH = 64, 24
TO = {"original_max_position_embeddings": TRAINED}
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **TO},
    "yarn, bounds": {"rope_type": "yarn", "factor": 8.0, **TO, "beta_fast": 12.0, "beta_slow": 0.5}
    | {"truncate": False, "attention_factor": 0.75},
    "yarn, mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        **TO,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
    "llama3": {"rope_type": "llama3", "factor": 8.0, **TO, **BANDS},
    "llama3, 3.2": {
        "rope_type": "llama3",
        "factor": 32.0,
        "original_max_position_embeddings": 8192,
        **BANDS,
    },
}


def of(scaling, base=5000.0):
    """Our settings for transformers'."""
    values = {
        f"rope_scaling_{name}": value for name, value in scaling.items() if name != "rope_type"
    }
    if scaling["rope_type"] == "dynamic":
        values["rope_scaling_original_max_position_embeddings"] = TRAINED
    return RopeConfig(rotary_base=base, rope_scaling_type=scaling["rope_type"], **values)


def theirs(scaling, length, base=5000.0):
    """Frequencies [D/2] and attention scaling of transformers for a text of this length."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=2 * WIDTH,
        num_attention_heads=2,
        max_position_embeddings=TRAINED,
        rope_parameters={**scaling, "rope_theta": base},
    )
    return rope_utils.ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, seq_len=length)


@pytest.mark.parametrize("length", [40, 300])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_tables_equal_transformers(scaling, length):
    positions = torch.arange(length)
    expected, scale = theirs(scaling, length)
    turns, factor = frequencies(of(scaling), WIDTH, positions)
    assert factor == pytest.approx(scale, rel=1e-12)
    assert turns.dtype == torch.float64
    torch.testing.assert_close(turns, expected.double(), rtol=3e-6, atol=0)  # theirs are float32
    rotary = Rotary(positions, WIDTH, of(scaling), torch.float32)
    angles = positions[:, None, None] * expected.double()
    for got, want in ((rotary.cos, angles.cos()), (rotary.sin, angles.sin())):
        assert (got - scale * want).abs().max() < 1e-6 * length * scale


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("linear", {"factor": 4.01}),
        ("dynamic", {"factor": 3.1}),
        ("yarn", {"factor": 4.1}),
        ("yarn, bounds", {"truncate": True}),
        ("yarn, bounds", {"beta_slow": 1.0}),
        ("llama3", {"high_freq_factor": 3.0}),
    ],
)
def test_the_bound_sees_another_setting(name, change):
    """Negative control."""
    turns, _ = frequencies(of(SCALINGS[name] | change), WIDTH, torch.arange(300))
    assert ((turns / theirs(SCALINGS[name], 300)[0].double()) - 1).abs().max() > 1e-3


def test_a_rank_with_the_first_tokens_turns_them_as_the_whole_sequence_does():
    """Dynamic scaling goes by the length of the run, not by the last position that a rank holds."""
    fixed = dataclasses.replace(of(SCALINGS["dynamic"]), rope_scaling_seq_length=300)
    whole = Rotary(torch.arange(300), WIDTH, fixed, torch.float32)
    part = Rotary(torch.arange(0, 150, 3), WIDTH, fixed, torch.float32)
    assert torch.equal(part.cos, whole.cos[:150:3])
    rotary = Rotary(
        torch.arange(0, 150, 3), WIDTH, of(SCALINGS["dynamic"]), torch.float32
    )  # negative control
    assert (rotary.cos - part.cos).abs().max() > 0.1


def test_an_architecture_has_the_scaling_only_where_it_is_set():
    plain = model_config(vocab_size=40, max_position_embeddings=4096)
    assert not [name for name in architecture_of(plain) if name.startswith("rope_scaling")]
    assert architecture_of(plain) == architecture_of(model_config(vocab_size=40))
    yarn = dataclasses.replace(
        plain,
        rope_scaling_type="yarn",
        rope_scaling_factor=4.0,
        rope_scaling_original_max_position_embeddings=64,
    )
    settings = architecture_of(yarn)
    assert (settings["rope_scaling_type"], settings["rope_scaling_beta_fast"]) == ("yarn", 32.0)
    assert architecture_of(dataclasses.replace(yarn, rope_scaling_beta_fast=32.0)) == settings


FACTORS = {"factor": 2.0, **TO}
TABLE = {"model_type": "gpt", "max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (
            None,
            {"factor": 2.0},
            "factor is 2.0, but rope_scaling_type is not set; .* only linear, dynamic, yarn",
        ),
        ("linear", {}, "factor is not set, but rope_scaling_type linear needs it"),
        ("linear", {"factor": 0.5}, "factor is 0.5; it must be from 1"),
        (
            "llama3",
            {"factor": 8.0},
            "original_max_position_embeddings is not set, but .* llama3 needs it",
        ),
        (
            "llama3",
            FACTORS | {"beta_fast": 3.0},
            "beta_fast is 3.0, but .* llama3; .* only yarn has it",
        ),
        (
            "llama3",
            FACTORS | {"low_freq_factor": 4.0},
            "low_freq_factor is 4.0; it must be below .* 4.0",
        ),
        (
            "yarn",
            FACTORS | {"seq_length": 9},
            "seq_length is 9, but rope_scaling_type is yarn; .* only dynamic has it",
        ),
        (
            "yarn",
            FACTORS | {"rotary_base": 1.0},
            "type is yarn, but rotary_base is 1.0 .* needs a base above 1",
        ),
        (
            "linear",
            {"factor": 2.0, "model_type": "transnormer"},
            "type is linear, but this model has no rope",
        ),
        (
            "linear",
            {"factor": 2.0, **TABLE},
            "type is linear, but this model has no rope; leave it out",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(kind, values, message):
    others = ("rotary_base", "model_type", "max_position_embeddings")
    named = {
        name if name in others else f"rope_scaling_{name}": value for name, value in values.items()
    }
    with pytest.raises(ValueError, match=f"^rope_scaling_{message}"):
        model_config(rope_scaling_type=kind, **named)
