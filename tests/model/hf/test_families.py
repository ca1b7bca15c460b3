"""Families in the ways in which they differ from others.

What folders hold, which are refused, and greedy texts.
"""

import json
import re
from dataclasses import asdict, replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.decoder import Decoder
from model.hf import config_from_hf, config_to_hf, from_hf, load_hf, save_hf, to_hf
from model.hf.api import open_hf
from model.registry import build_model
from runtime.errors import UserError
from tests.model.hf.hugging_face import (
    CONFIGS,
    GEMMA3,
    GPT2,
    LLAMA,
    OLMO3,
    OLMO_HYBRID,
    QWEN3_5,
    TIED,
    TOKENS,
    hugging_face,
    ours,
    transformers,
)
from tests.model.models import built, generate

PROMPTS = [
    torch.randint(61, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (9, 3, 17)
]
NEW = 25  # past the window of 8 and, after the longest prompt, within GPT-2's 50 positions


@pytest.mark.parametrize("name", ["llama, llama3", "ministral", "qwen2, yarn", "qwen3", "gpt2"])
def test_greedy_texts_equal_transformers(name):
    theirs = hugging_face(CONFIGS[name], torch.float64).eval()
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = [
        theirs.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **settings
        )[0].tolist()
        for prompt in PROMPTS
    ]
    texts = generate(ours(theirs, CONFIGS[name], torch.float64), PROMPTS, NEW)
    assert texts == [text[len(prompt) :] for prompt, text in zip(PROMPTS, expected, strict=True)]
    assert len({tuple(text[-5:]) for text in texts}) == len(PROMPTS)  # no loop that all end in


def test_reads_the_bare_model_with_its_mask(tmp_path):
    """As the hub's "gpt2" is stored: without the prefix, with the mask."""
    theirs = hugging_face(GPT2)
    expected = from_hf(theirs.state_dict(), GPT2)
    theirs.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    bare = {
        name.removeprefix("transformer."): weight for name, weight in load_file(weights).items()
    }
    bare |= {
        "h.0.attn.bias": torch.ones(1, 1, 50, 50).tril(),
        "h.1.attn.masked_bias": torch.tensor(-1e4),
    }
    save_file(bare, weights)
    config, state, _ = load_hf(tmp_path)
    assert config.max_position_embeddings == 50
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_published_configurations_are_read():
    """The hub's GPT-2 names dropout, and leaves n_inner and what was added later out."""
    hub = {
        "activation_function": "gelu_new",
        "attn_pdrop": 0.1,
        "model_type": "gpt2",
        "n_ctx": 1024,
    }
    hub |= {"n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}
    config = config_from_hf(hub)
    assert (config.ffn_size, config.max_position_embeddings, config.norm_epsilon) == (
        3072,
        1024,
        1e-5,
    )
    assert not config.untie_embeddings_and_output_weights
    del hub["n_positions"]
    with pytest.raises(ValueError, match=r"n_positions is missing; .* not a configuration of gpt2"):
        config_from_hf(hub)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"position_embedding_type": "rope", "max_position_embeddings": None},
            "position_embedding_type is rope",
        ),
        ({"num_query_groups": 2}, "num_query_groups is 2"),
        ({"kv_channels": 10}, "kv_channels is 10"),
    ],
)
def test_a_gpt_that_theirs_cannot_be_is_not_written(tmp_path, change, words):
    config = replace(GPT2, **change)
    for write in (
        lambda: config_to_hf(config),
        lambda: to_hf(Decoder(config).state_dict(), config),
        lambda: save_hf(tmp_path / "out", config, Decoder(config).state_dict()),
    ):
        with pytest.raises(
            ValueError, match=f"^{words}, but for Hugging Face's GPT-2 .* must be .*; keep"
        ):
            write()
    assert not (tmp_path / "out").exists()


def test_the_table_of_positions_has_one_length(tmp_path):
    assert config_to_hf(GPT2, {"max_position_embeddings": 50})["n_positions"] == 50
    with pytest.raises(
        ValueError, match="max_position_embeddings is 60, but the model's table of positions has 50"
    ):
        save_hf(tmp_path / "out", GPT2, Decoder(GPT2).state_dict(), {"max_position_embeddings": 60})
    assert not (tmp_path / "out").exists()


def test_old_and_sparse_configurations():
    """A config.json of transformers 4 has rope_theta at the top, and leaves may be missing."""
    sparse = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
    }
    sparse |= {"vocab_size": 100, "rope_theta": 7000.0, "rope_scaling": None}
    config = config_from_hf(sparse)
    assert (config.rotary_base, config.norm_epsilon, config.query_groups) == (7000.0, 1e-6, 4)
    assert config.untie_embeddings_and_output_weights
    del sparse["intermediate_size"]
    with pytest.raises(ValueError, match="intermediate_size is missing"):
        config_from_hf(sparse)


@pytest.mark.parametrize("name", ["llama, dynamic", "llama, wide heads"])
def test_dynamic_rope_of_a_run_is_plain_rope_of_another_base(name):
    """A run fixes the length that the base is for.

    A text of any other length must have the same base.
    """
    scaling = {**asdict(CONFIGS["llama, dynamic"]), "kv_channels": CONFIGS[name].kv_channels}
    config = replace(LLAMA, **scaling | {"rope_scaling_seq_length": 33})
    theirs = hugging_face(config)
    model = ours(theirs, config)
    assert theirs.config.max_position_embeddings == 33
    for length in (7, 16, 33, 40):
        expected = theirs(TOKENS[:, :length]).logits
        assert (model(TOKENS[:, :length]) - expected).norm() < 1e-5 * expected.norm()
    again = config_from_hf(config_to_hf(config))
    assert (again.rope_scaling_type, again.rotary_base) == (
        None,
        theirs.config.rope_parameters["rope_theta"],
    )
    open_length = ours(theirs, replace(config, rope_scaling_seq_length=None))  # negative control
    assert (open_length(TOKENS[:, :16]) - theirs(TOKENS[:, :16]).logits).abs().max() > 1e-3


VISION = {
    "gemma3": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    | {"image_size": 28, "patch_size": 14, "model_type": "siglip_vision_model"},
    "qwen3_5": {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 48,
    },
}


def of_images(config, folder):
    """A tiny model of text and images, as transformers writes it.

    Qwen3.5's with a layer for two tokens ahead.
    """
    kind, text, more = config.model_type, config_to_hf(config), {"mm_tokens_per_image": 4}
    if kind == "qwen3_5":
        text |= {"mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32", "attn_output_gate": True}
        more = {}
    shape = transformers.AutoConfig.for_model(
        kind, text_config=text, vision_config=VISION[kind], **more
    )
    torch.manual_seed(0)
    transformers.AutoModelForImageTextToText.from_config(shape).save_pretrained(folder)
    path = folder / "model.safetensors"
    if kind == "qwen3_5":
        save_file(load_file(path) | {"mtp.fc.weight": torch.ones(3, 4)}, path, {"format": "pt"})
    return path


def layouts(config, weights):
    """The weights by the names of files of transformers 4 and of modules of 5.

    Some of these are others.
    """
    if config is QWEN3_5:
        return [weights]
    inside = {
        re.sub(r"^(model\.)?(language_model\.)?(model\.)?", "", name): w
        for name, w in weights.items()
    }
    old, new = {}, {}
    for name, weight in inside.items():
        of_vision = name.startswith(("vision_tower", "multi_modal_projector"))
        old[name if of_vision else f"language_model.model.{name}"] = weight
        new[f"model.{name}" if of_vision else f"model.language_model.{name}"] = weight
    return [weights, old, new]


@pytest.mark.parametrize(
    ("config", "passed"),
    [(GEMMA3, ".*multi_modal_projector, .*vision_tower"), (QWEN3_5, "model.visual, mtp")],
    ids=["gemma3", "qwen3_5"],
)
def test_the_text_part_of_a_model_of_images_is_read_by_any_names(config, passed, tmp_path):
    path = of_images(config, tmp_path / "both")
    want = transformers.AutoModelForImageTextToText.from_pretrained(path.parent)(TOKENS).logits
    for weights in layouts(config, load_file(path)):
        save_file(weights, path, {"format": "pt"})
        notes = []
        open_hf(path.parent, notes.append)
        assert len(notes) == 1
        assert re.match(rf"note: \d+ weights of {passed} are ignored", notes[0])
        with pytest.warns(UserWarning, match="are ignored"):
            read, state, contents = load_hf(path.parent)
        assert read.model_type == config.model_type
        model = build_model(read)
        model.load_state_dict(state)
        assert (model(TOKENS) - want).norm() < 1e-5 * want.norm()
    save_hf(tmp_path / "out", read, state, contents)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(again) is type(hugging_face(config))
    assert (again(TOKENS).logits - want).norm() < 1e-5 * want.norm()


def test_only_known_parts_are_passed_over(tmp_path):
    path = of_images(QWEN3_5, tmp_path)
    save_file(load_file(path) | {"model.audio.weight": torch.ones(3, 4)}, path, {"format": "pt"})
    with pytest.raises(UserError, match=r"has the unknown model\.audio\.weight"):
        open_hf(tmp_path, print)


def test_outer_entries_say_whether_embeddings_are_tied(tmp_path):
    contents = json.loads(of_images(QWEN3_5, tmp_path).with_name("config.json").read_text())
    assert not TIED["untie_embeddings_and_output_weights"]
    assert (
        config_from_hf(contents | {"tie_word_embeddings": True}).untie_embeddings_and_output_weights
        is False
    )
    assert config_from_hf(contents).untie_embeddings_and_output_weights is True
    with pytest.raises(UserError, match="text_config = 3 is not supported; only a table is"):
        config_from_hf(contents | {"text_config": 3})


def test_entries_are_read_as_published():
    """Gemma 3 4B's config.json leaves out what is transformers' default.

    OLMo 3 7B's has one rope_theta.
    """
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    text |= {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    outer = {"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]}
    gemma = config_from_hf(outer)
    with pytest.raises(UserError, match=r"quantization_config = .* is not supported; only null"):
        config_from_hf(outer | {"quantization_config": {"quant_method": "fp8"}})
    assert (gemma.rotary_base, gemma.rotary_base_local, gemma.rope_scaling_factor) == (
        1e6,
        1e4,
        8.0,
    )
    assert (gemma.vocab_size, gemma.num_attention_heads, gemma.query_groups, gemma.head_dim) == (
        262208,
        8,
        4,
        256,
    )
    assert [layer for layer in range(34) if gemma.window(layer) is None] == [5, 11, 17, 23, 29]
    assert gemma.window(0) == (1023, 0)
    assert config_from_hf({**text, "sliding_window_pattern": 2}).window(1) is None
    contents = {
        key: value
        for key, value in config_to_hf(OLMO3).items()
        if key not in ("rope_parameters", "layer_types")
    }
    olmo = config_from_hf(contents | {"rope_theta": 5e5, "num_hidden_layers": 4})
    assert (olmo.rotary_base, olmo.rotary_base_local, olmo.rope_scaling_type) == (5e5, 5e5, "yarn")
    assert [olmo.window(layer) is None for layer in range(4)] == [False, False, False, True]


@pytest.mark.parametrize("config", [GEMMA3, OLMO3], ids=["gemma3", "olmo3"])
@pytest.mark.parametrize(
    "change", [{"rotary_base_local": 4000.0}, {"window_size": "8,0"}, {"rotary_base": 9000.0}]
)
def test_a_wrong_base_or_window_would_be_seen(config, change):
    theirs = hugging_face(config)
    assert (ours(theirs, config)(TOKENS) - theirs(TOKENS).logits).abs().max() < 1e-4
    assert (
        ours(theirs, replace(config, **change))(TOKENS) - theirs(TOKENS).logits
    ).abs().max() > 1e-3


def test_embeddings_are_scaled_in_their_own_dtype():
    """The root of 3072, 55.4, is 55.5 in bfloat16, as in transformers."""
    model = build_model(replace(GEMMA3, hidden_size=3072, num_layers=3)).to(torch.bfloat16)
    model.init_weights(1)
    assert torch.equal(model.embed(TOKENS, TOKENS), model.embedding(TOKENS) * 55.5)


def test_rope_of_all_channels_is_written_where_a_missing_key_is_a_quarter():
    whole = replace(QWEN3_5, rotary_percent=1.0)
    assert config_from_hf(config_to_hf(whole)).rotary_percent == 1.0


def test_a_released_olmo_hybrid_has_other_names(tmp_path):
    theirs = hugging_face(OLMO_HYBRID)
    theirs.float().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights, softmax = load_file(path), "model.layers.2.feedforward_layer_norm.weight"
    assert "model.layers.0.linear_attn.q_conv1d.weight" in weights
    assert "model.layers.0.attention_layer_norm.weight" in weights
    released = weights | {"model.layers.2.post_attention_layernorm.weight": weights[softmax]}
    del released[softmax]
    for state_dict in (weights, released):
        save_file(state_dict, path, {"format": "pt"})
        config, state, _ = load_hf(tmp_path)
        assert all(
            torch.equal(to_hf(state, config)[name], weight)
            for name, weight in theirs.state_dict().items()
        )


def test_kimis_gates_are_in_no_model_of_theirs():
    config = replace(QWEN3_5, linear_gate="per_channel", linear_num_value_heads=2)
    with pytest.raises(
        UserError, match=r"linear_gate is per_channel, but for a Qwen3\.5 it must be per_head"
    ):
        to_hf(built(config).state_dict(), config)
