import dataclasses
import json

import pytest

from model.config import ModelConfig
from model.registry import architecture_of

GPT = ModelConfig(model_type="gpt", max_position_embeddings=64, vocab_size=40)


def test_config_defaults():
    config = ModelConfig(hidden_size=256, num_attention_heads=8)
    assert (config.head_dim, config.query_groups, config.ffn_size) == (32, 8, 704)
    assert ModelConfig(hidden_size=100, num_attention_heads=8, kv_channels=16).head_dim == 16
    with pytest.raises(ValueError, match="vocab_size"):
        _ = config.vocabulary


def test_defaults_of_linear_attention():
    transnormer = ModelConfig(model_type="transnormer", hidden_size=15, num_attention_heads=5)
    assert (transnormer.head_dim, transnormer.ffn_size) == (3, 64)
    linear = ModelConfig(model_type="linear_transformer", hidden_size=256, no_scale_embedding=True)
    assert (linear.ffn_size, linear.learned_positions) == (1024, False)


def test_defaults_of_a_gpt():
    assert (GPT.learned_positions, GPT.ffn_size) == (True, 1024)
    assert not ModelConfig().learned_positions
    rope = ModelConfig(model_type="gpt", position_embedding_type="rope", rotary_base=500.0)
    assert not rope.learned_positions
    # No rotation, no even heads.
    assert ModelConfig(model_type="gpt", max_position_embeddings=8, kv_channels=15).head_dim == 15


TABLE = {"model_type": "gpt", "max_position_embeddings": 8}
TRANSNORMER = {"model_type": "transnormer"}
ODD_HEADS = {"hidden_size": 15, "num_attention_heads": 5}
GEMMA3 = {"model_type": "gemma3", "window_size": "8,0", "window_attn_skip_freq": "2"}
LINEAR = {"model_type": "linear_transformer"}
LEARNED = {"position_embedding_type": "learned_absolute", "max_position_embeddings": 8}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0; .*1 or more"),
        ({"vocab_size": 0}, "vocab_size is 0; .*1 or more"),
        ({"num_query_groups": 0}, "num_query_groups is 0; .*1 or more"),
        ({"rotary_base": 0.0}, "rotary_base is 0.0; .*above 0"),
        ({"norm_epsilon": -1e-5}, "norm_epsilon is -1e-05; .*above 0"),
        ({"init_method_std": float("nan")}, "init_method_std is nan; .*above 0"),
        ({"hidden_size": 100}, "hidden_size is 100; .*num_attention_heads 8"),
        ({"hidden_size": 24}, "hidden_size is 24; .*3 wide"),
        ({"kv_channels": 15}, "kv_channels is 15; .*15 wide"),
        ({"num_query_groups": 3}, "num_query_groups is 3; .*must divide num_attention_heads 8"),
        ({"model_type": "gpt"}, "max_position_embeddings is not set"),
        (TABLE | {"max_position_embeddings": 0}, "max_position_embeddings is 0; it must be 1 or more"),
        (TABLE | {"rotary_base": 500.0}, "rotary_base is 500.0; .* set position_embedding_type to rope"),
        (TABLE | {"position_embedding_type": "rope", "kv_channels": 15}, "kv_channels is 15; .* must be even"),
        (LEARNED, "position_embedding_type is learned_abs.* has rope alone; .* set model_type to gpt"),
        (TABLE | {"add_qkv_bias": True}, "add_qkv_bias is True; .* of its own"),
        (TRANSNORMER | {"qk_layernorm": True}, "qk_layernorm is True; model_type transnormer has none"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim is 0; model_type llama has no delta rule"),
        ({"linear_decay": "paper"}, "linear_decay is paper; .* has no decay; .* model_type to transnor"),
        ({"no_scale_embedding": True}, "no_scale_embedding is True; model_type llama scales no embeddings"),
        (TRANSNORMER | {"num_query_groups": 2}, "num_query_groups is 2; .* per query head, 8 here"),
        (TRANSNORMER | {"position_embedding_type": "rope"}, "position_embedding_type is rope; .* LRPE"),
        (LINEAR | {"max_position_embeddings": 9}, "max_position_embeddings is 9; .* sinusoidal positions"),
        (TRANSNORMER | {"rotary_base": 500.0}, "rotary_base is 500.0; .*; leave it out"),
        ({"softmax_every": 2}, "softmax_every is 2; .* one kind .* set model_type to transnormer"),
        (TRANSNORMER | {"softmax_every": 5}, "softmax_every is 5; .* to num_layers 4"),
        ({"model_type": "qwen3_5", "num_layers": 3}, "num_layers is 3; qwen3_5 has softmax attention"),
        ({"model_type": "qwen3_5", "softmax_every": 0}, "softmax_every is 0; it must be from 2"),
        (TRANSNORMER | {"softmax_every": 1}, "softmax_every is 1; it must be from 2"),
        (TRANSNORMER | {"window_size": "8,0"}, "window_size is 8,0; .* leave it out, or .* softmax_every"),
        (LINEAR | {"softmax_type": "learnable"}, "softmax_type is learnable; .* has linear"),
        ({"window_size": "8,0", "window_attn_skip_freq": "[0]*4"}, "window_attn_skip_freq is .*no layer"),
        (TRANSNORMER | {"softmax_every": 2} | ODD_HEADS, "hidden_size is 15; .* must be even"),
        (LINEAR | {"hidden_size": 15, "num_attention_heads": 3}, "hidden_size is 15; it must be even"),
        ({"model_type": "llama", "rotary_base_local": 90.0}, "rotary_base_local is 90.0; model_type llama"),
        ({"model_type": "olmo3", "rotary_base_local": 90.0}, "rotary_base_local is 90.0; no layer has a window"),
        ({"model_type": "olmo3", "query_pre_attn_scalar": 8}, "query_pre_attn_scalar is 8; model_type olmo3"),
        (GEMMA3 | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0; it must be 1 or more"),
    ],
)
def test_a_field_that_does_not_fit_is_refused_with_its_value(values, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        ModelConfig(**values)


def test_architecture_tells_apart_what_computes_something_else():
    def of(config, **changes):
        return architecture_of(dataclasses.replace(config, **changes))

    llama = ModelConfig(vocab_size=40, ffn_hidden_size=1024)
    normer = dataclasses.replace(llama, model_type="transnormer", linear_decay="released")
    window = dataclasses.replace(llama, window_size="8,0")
    assert of(GPT, position_embedding_type="learned_absolute", num_query_groups=8, init_method_std=1.0) == of(GPT)
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
        of(llama, model_type="linear_transformer"),
        of(normer),
        of(normer, linear_decay="paper"),
        of(normer, no_scale_embedding=True),
        *(of(normer, softmax_every=every) for every in (2, 4)),
        *(of(window, window_attn_skip_freq=skip) for skip in (None, "2", "3")),
        of(window, window_size="9,0"),
        *(of(llama, softmax_type=kind) for kind in ("off-by-one", "learnable")),
    ]
    assert all(a != b for i, a in enumerate(different) for b in different[:i])
