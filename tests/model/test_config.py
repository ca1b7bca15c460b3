import dataclasses
import json

import pytest

from model.registry import architecture_of
from tests.model.models import FAMILY, as_family, model_config

GPT = model_config(model_type="gpt", max_position_embeddings=64, vocab_size=40)


def test_config_defaults():
    config = model_config(hidden_size=256, num_attention_heads=8)
    assert (config.head_dim, config.query_groups, config.ffn_size) == (32, 8, 704)
    assert model_config(hidden_size=100, num_attention_heads=8, kv_channels=16).head_dim == 16
    with pytest.raises(ValueError, match="vocab_size"):
        _ = config.vocabulary


OWN_SETTINGS = {
    "llama": {"add_qkv_bias": True, "qk_layernorm": True},
    "gpt": {"position_embedding_type": "rope"},
    "transnormer": {"linear_decay": "paper"},
    "linear_transformer": {},
    "gemma3": {"query_pre_attn_scalar": 23},
    "olmo3": {},
    "qwen3_5": {"rotary_percent": 0.5},
    "olmo_hybrid": {},
    "smollm3": {"no_rope_freq": "3"},
    "granite": {
        "embedding_multiplier": 0.3,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.3,
        "logits_scaling": 0.3,
    },
}
"""Another value of each setting that a family's own class states."""


@pytest.mark.parametrize("name", FAMILY)
def test_another_value_of_a_familys_own_setting_is_another_architecture(name):
    """Else a checkpoint would be loaded into a model of another function."""
    tiny = FAMILY[name]
    stated = vars(type(tiny))["__annotations__"].keys() - {"model_type", "RESOLVED"}
    assert stated == OWN_SETTINGS[name].keys()
    for setting, value in OWN_SETTINGS[name].items():
        changed = dataclasses.replace(tiny, **{setting: value})
        assert architecture_of(changed) != architecture_of(tiny), setting


def test_a_setting_that_is_left_out_is_resolved_by_its_familys_own_property():
    granite, gemma3 = FAMILY["granite"], FAMILY["gemma3"]
    plain = dataclasses.replace(granite, attention_multiplier=None)
    assert architecture_of(plain)["attention_multiplier"] == granite.head_dim**-0.5
    plain = dataclasses.replace(gemma3, query_pre_attn_scalar=None)
    assert architecture_of(plain)["query_pre_attn_scalar"] == gemma3.head_dim


def test_defaults_of_linear_attention():
    transnormer = model_config(model_type="transnormer", hidden_size=15, num_attention_heads=5)
    assert (transnormer.head_dim, transnormer.ffn_size) == (3, 64)
    linear = model_config(model_type="linear_transformer", hidden_size=256, no_scale_embedding=True)
    assert (linear.ffn_size, linear.learned_positions) == (1024, False)


def test_defaults_of_a_gpt():
    assert (GPT.learned_positions, GPT.ffn_size) == (True, 1024)
    assert not model_config().learned_positions
    rope = model_config(model_type="gpt", position_embedding_type="rope", rotary_base=500.0)
    assert not rope.learned_positions
    # No rotation, no even heads.
    assert model_config(model_type="gpt", max_position_embeddings=8, kv_channels=15).head_dim == 15


TABLE = {"model_type": "gpt", "max_position_embeddings": 8}
TRANSNORMER = {"model_type": "transnormer"}
ODD_HEADS = {"hidden_size": 15, "num_attention_heads": 5}
GEMMA3 = {"model_type": "gemma3", "window_size": "8,0", "window_attn_skip_freq": "2"}
LINEAR = {"model_type": "linear_transformer"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"model_type": "qwen3_5", "linear_key_head_dim": 0},
            "linear_key_head_dim is 0; it must be 1 or more",
        ),
        ({"num_layers": 0}, "num_layers is 0; .*1 or more"),
        ({"vocab_size": 0}, "vocab_size is 0; .*1 or more"),
        ({"num_query_groups": 0}, "num_query_groups is 0; .*1 or more"),
        ({"rotary_base": 0.0}, "rotary_base is 0.0; .*above 0"),
        ({"norm_epsilon": -1e-5}, "norm_epsilon is -1e-05; .*above 0"),
        ({"init_method_std": float("nan")}, "init_method_std is nan; .*above 0"),
        ({"hidden_size": 100}, "hidden_size is 100; .*num_attention_heads 8"),
        ({"hidden_size": 24}, "hidden_size is 24; .*3 wide"),
        ({"kv_channels": 15}, "kv_channels is 15; .*15 wide"),
        ({"num_query_groups": 3}, "num_query_groups is 3; .* divisor of num_attention_heads 8"),
        ({"model_type": "gpt"}, "max_position_embeddings is not set"),
        (
            TABLE | {"max_position_embeddings": 0},
            "max_position_embeddings is 0; it must be 1 or more",
        ),
        (
            TABLE | {"rotary_base": 500.0},
            "rotary_base is 500.0; .* set position_embedding_type to rope",
        ),
        (
            TABLE | {"position_embedding_type": "rope", "kv_channels": 15},
            "kv_channels is 15; .* choose an even width",
        ),
        (TRANSNORMER | {"num_query_groups": 2}, "num_query_groups is 2; .* per query head, here 8"),
        (TRANSNORMER | {"rotary_base": 500.0}, "rotary_base is 500.0; .*; leave rotary_base out"),
        (TRANSNORMER | {"softmax_every": 5}, "softmax_every is 5; .* to num_layers 4"),
        (
            {"model_type": "qwen3_5", "num_layers": 3},
            "num_layers is 3; qwen3_5 has softmax attention",
        ),
        ({"model_type": "qwen3_5", "softmax_every": 0}, "softmax_every is 0; it must be from 2"),
        (TRANSNORMER | {"softmax_every": 1}, "softmax_every is 1; it must be from 2"),
        (
            TRANSNORMER | {"window_size": "8,0"},
            "window_size is 8,0; .* leave this setting out, or .* softmax_every",
        ),
        (
            {"window_size": "8,0", "window_attn_skip_freq": "[0]*4"},
            "window_attn_skip_freq is .*no layer",
        ),
        (TRANSNORMER | {"softmax_every": 2} | ODD_HEADS, "hidden_size is 15; .* an even width"),
        (
            LINEAR | {"hidden_size": 15, "num_attention_heads": 3},
            "hidden_size is 15; it must be even",
        ),
        (
            {"model_type": "olmo3", "rotary_base_local": 90.0},
            "rotary_base_local is 90.0; .* no layer has one",
        ),
        (GEMMA3 | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0; it must be 1 or more"),
    ],
)
def test_a_field_that_does_not_fit_is_refused_with_its_value(values, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        model_config(**values)


def test_the_settings_of_one_family_do_not_become_anothers():
    with pytest.raises(ValueError, match=r"^model_type is gpt; it must be llama, to which"):
        dataclasses.replace(model_config(), model_type="gpt")


def test_architecture_tells_apart_what_computes_something_else():
    def of(config, **changes):
        return architecture_of(dataclasses.replace(config, **changes))

    llama = model_config(vocab_size=40, ffn_hidden_size=1024)
    normer = as_family(llama, "transnormer", linear_decay="released")
    window = dataclasses.replace(llama, window_size="8,0")
    assert of(
        GPT, position_embedding_type="learned_absolute", num_query_groups=8, init_method_std=1.0
    ) == of(GPT)
    assert json.loads(json.dumps(of(GPT))) == of(GPT)
    assert of(normer, linear_decay=None) == of(normer)
    same = {"window_size": "(8, 0)", "window_attn_skip_freq": "([1]+[0])*2"}
    assert of(window, **same) == of(window, window_attn_skip_freq="2")
    assert of(llama, window_size="-1,0") == of(llama)
    of_windows = {"window_size", "window_attn_skip_freq", "softmax_type"}
    assert not of_windows & of(llama).keys()  # older checkpoints
    different = [
        of(GPT),
        of(GPT, max_position_embeddings=65),
        of(GPT, position_embedding_type="rope", max_position_embeddings=None),
        of(llama),
        of(as_family(llama, "linear_transformer")),
        of(normer),
        of(normer, linear_decay="paper"),
        of(normer, no_scale_embedding=True),
        *(of(normer, softmax_every=every) for every in (2, 4)),
        *(of(window, window_attn_skip_freq=skip) for skip in (None, "2", "3")),
        of(window, window_size="9,0"),
        *(of(llama, softmax_type=kind) for kind in ("off-by-one", "learnable")),
    ]
    assert all(a != b for i, a in enumerate(different) for b in different[:i])
