"""Folders of Gemma 3 with a vision part, entries as published, and those of it and OLMo 3 that are refused."""

import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.hf import config_from_hf, config_to_hf, load_hf, save_hf
from model.hf.adapter import read_adapter, write_adapter
from model.hf.api import open_hf
from model.registry import build_model
from runtime.errors import UserError
from tests.model.hf.hugging_face import GEMMA3, OLMO3, TOKENS, hugging_face, ours, transformers


@pytest.fixture
def folder(tmp_path):
    """A tiny model of text and images, as transformers writes it."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14, "model_type": "siglip_vision_model"}
    config = transformers.Gemma3Config(text_config=config_to_hf(GEMMA3), vision_config=vision, mm_tokens_per_image=4)
    torch.manual_seed(0)
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path / "both")
    return tmp_path / "both"


def test_the_text_part_of_a_model_of_images_is_read_by_either_names(folder, tmp_path):
    theirs = transformers.Gemma3ForConditionalGeneration.from_pretrained(folder)
    want = theirs(TOKENS).logits
    path = folder / "model.safetensors"
    inside = {re.sub(r"^(model\.)?(language_model\.)?(model\.)?", "", name): w for name, w in load_file(path).items()}
    vision = ("vision_tower", "multi_modal_projector")
    names = [  # as files of transformers 4 and as modules of transformers 5 have them
        {name if name.startswith(vision) else f"language_model.model.{name}": w for name, w in inside.items()},
        {
            f"model.{name}" if name.startswith(vision) else f"model.language_model.{name}": w
            for name, w in inside.items()
        },
    ]
    for weights in (load_file(path), *names):
        save_file(weights, path, {"format": "pt"})
        said = []
        open_hf(folder, said.append)
        assert re.fullmatch(r"note: \d+ weights of .*multi_modal_projector, .*vision_tower are passed over.*", said[0])
        with pytest.warns(UserWarning, match="passed over"):
            config, state, contents = load_hf(folder)
        assert config.model_type == "gemma3"
        model = build_model(config)
        model.load_state_dict(state)
        assert (model(TOKENS) - want).norm() < 1e-5 * want.norm()
    save_hf(tmp_path / "out", config, state, contents)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(again).__name__ == "Gemma3ForCausalLM"
    assert (again(TOKENS).logits - want).norm() < 1e-5 * want.norm()


def test_entries_are_read_as_published():
    """Gemma 3 4B's config.json leaves out what is transformers' default; OLMo 3 7B's has one rope_theta."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    text |= {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    outer = {"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]}
    gemma = config_from_hf(outer)
    with pytest.raises(UserError, match=r"quantization_config = .* is not supported; only null"):
        config_from_hf(outer | {"quantization_config": {"quant_method": "fp8"}})
    assert (gemma.rotary_base, gemma.rotary_base_local, gemma.rope_scaling_factor) == (1e6, 1e4, 8.0)
    assert (gemma.vocab_size, gemma.num_attention_heads, gemma.query_groups, gemma.head_dim) == (262208, 8, 4, 256)
    assert [layer for layer in range(34) if gemma.window(layer) is None] == [5, 11, 17, 23, 29]
    assert gemma.window(0) == (1023, 0)
    assert config_from_hf({**text, "sliding_window_pattern": 2}).window(1) is None
    contents = {
        key: value for key, value in config_to_hf(OLMO3).items() if key not in ("rope_parameters", "layer_types")
    }
    olmo = config_from_hf(contents | {"rope_theta": 5e5, "num_hidden_layers": 4})
    assert (olmo.rotary_base, olmo.rotary_base_local, olmo.rope_scaling_type) == (5e5, 5e5, "yarn")
    assert [olmo.window(layer) is None for layer in range(4)] == [False, False, False, True]


@pytest.mark.parametrize("config", [GEMMA3, OLMO3], ids=["gemma3", "olmo3"])
@pytest.mark.parametrize("change", [{"rotary_base_local": 4000.0}, {"window_size": "8,0"}, {"rotary_base": 9000.0}])
def test_a_wrong_base_or_window_would_be_seen(config, change):
    theirs = hugging_face(config)
    assert (ours(theirs, config)(TOKENS) - theirs(TOKENS).logits).abs().max() < 1e-4
    assert (ours(theirs, replace(config, **change))(TOKENS) - theirs(TOKENS).logits).abs().max() > 1e-3


def test_embeddings_are_scaled_in_their_own_dtype():
    """The root of 3072, 55.4, is 55.5 in bfloat16, as in transformers."""
    model = build_model(replace(GEMMA3, hidden_size=3072, num_layers=3)).to(torch.bfloat16)
    model.init_weights(1)
    assert torch.equal(model.embed(TOKENS, TOKENS), model.embedding(TOKENS) * 55.5)


@pytest.mark.parametrize(
    ("config", "change", "words"),
    [
        (GEMMA3, {"rope_parameters": {"rope_theta": 5.0}}, "rope_parameters = .* only a table each for full_attention"),
        (
            GEMMA3,
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "only the type def",
        ),
        (GEMMA3, {"rope_scaling": 3}, "rope_scaling = 3 is not supported"),
        (GEMMA3, {"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern = 0 is not supported"),
        (GEMMA3, {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not supported"),
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention = true is not supported"),
        (GEMMA3, {"hidden_activation": "gelu"}, "hidden_activation = "),
        (GEMMA3, {"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        (OLMO3, {"rope_parameters": None}, "rope_theta = 5000 is not supported without one for sliding_attention"),
        (OLMO3, {"attention_bias": True}, "attention_bias = true"),
    ],
)
def test_what_is_no_such_model_is_refused(config, change, words):
    contents = config_to_hf(config)
    assert config_from_hf(contents).model_type == config.model_type
    with pytest.raises(UserError, match=words):
        config_from_hf(contents | change)


@pytest.mark.parametrize("config", [GEMMA3, OLMO3], ids=["gemma3", "olmo3"])
def test_adapters_are_peft_s_there_and_back(config, tmp_path):
    peft = pytest.importorskip("peft")
    theirs, adapted = hugging_face(config), replace(config, lora_rank=3, lora_alpha=4.5)
    model = build_model(adapted)
    model.init_weights(5)
    base = ours(theirs, config).state_dict()
    state = {
        name: base.get(name, torch.randn(w.shape) if "lora_B" in name else w) for name, w in model.state_dict().items()
    }
    model.load_state_dict(state)
    write_adapter(tmp_path, state, state.__getitem__, adapted, None)
    want = peft.PeftModel.from_pretrained(theirs, tmp_path)(TOKENS).logits
    assert (model(TOKENS) - want).norm() < 1e-5 * want.norm()
    read, found, weight = read_adapter(tmp_path, config, print)
    assert read.lora_rank == 3
    assert all(torch.equal(weight(name), state[name]) for name in found)


def test_settings_of_other_models_are_refused():
    with pytest.raises(UserError, match=r"rotary_base_local is 90\.0; model_type llama has one rope for all layers"):
        replace(OLMO3, model_type="llama", rotary_base_local=90.0)
    with pytest.raises(UserError, match="query_pre_attn_scalar is 8; model_type olmo3 scales by the width of a head"):
        replace(OLMO3, query_pre_attn_scalar=8)
    with pytest.raises(UserError, match=r"rotary_base_local is 5000\.0; no layer has a window"):
        replace(OLMO3, window_size=None, window_attn_skip_freq=None)
    with pytest.raises(UserError, match=r"query_pre_attn_scalar is 0; it must be 1 or more"):
        replace(GEMMA3, query_pre_attn_scalar=0)
