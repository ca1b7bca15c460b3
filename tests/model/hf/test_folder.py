"""Folders that go through us keep what they said.

Those that cannot be read or written right are one line.
"""

import dataclasses
import json
import re

import pytest
import torch

from model.hf import config_from_hf, config_to_hf, from_hf, load_hf, save_hf, to_hf
from model.hf.dit import load_dit, save_dit
from model.registry import build_model
from runtime.errors import UserError
from tests.data.test_mutations import mutations, outcomes
from tests.model.hf.hugging_face import (
    CONFIGS,
    GPT2,
    LLAMA,
    TOKENS,
    WINDOW,
    hugging_face,
    transformers,
)
from tests.model.models import IMAGE, random_dit

IDS = {"bos_token_id": 7, "eos_token_id": [9, 11]}
READ = {
    "llama": IDS
    | {"max_position_embeddings": 8192, "pad_token_id": 3, "attention_dropout": 0.1}
    | {"hidden_act": "swish", "use_cache": False, "pretraining_tp": 2},
    "gpt2": IDS
    | {"activation_function": "gelu_pytorch_tanh", "attn_pdrop": 0.3, "summary_type": "mean"}
    | {"task_specific_params": {"text-generation": {"max_length": 50}}},
}


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=READ)
def test_an_export_says_what_the_import_read(tmp_path, config, request):
    theirs = hugging_face(config)
    for name, value in READ[request.node.callspec.id].items():
        setattr(theirs.config, name, value)
    theirs.save_pretrained(tmp_path / "theirs")
    save_hf(tmp_path / "ours", *load_hf(tmp_path / "theirs"))
    kinds = [
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).eval()
        for name in ("theirs", "ours")
    ]
    before, after = (kind.config.to_dict() for kind in kinds)
    for ours_to_say in ("_name_or_path", "n_inner", "head_dim"):  # defaults, written out
        before.pop(ours_to_say, None), after.pop(ours_to_say, None)
    assert after == before
    assert after["eos_token_id"] == [9, 11]
    assert torch.equal(kinds[0](TOKENS).logits, kinds[1](TOKENS).logits)


def test_a_vocabulary_of_our_own_gets_no_ids_of_another(tmp_path):
    save_hf(tmp_path / "none", LLAMA, build_model(LLAMA).state_dict())
    save_hf(tmp_path / "some", LLAMA, build_model(LLAMA).state_dict(), {"eos_token_id": 5})
    configs = [
        transformers.AutoConfig.from_pretrained(tmp_path / name) for name in ("none", "some")
    ]
    assert [(config.bos_token_id, config.eos_token_id) for config in configs] == [
        (None, None),
        (None, 5),
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 44, "num_attention_heads": 7, "num_query_groups": 7, "kv_channels": 6},
        {"init_method_std": 1.5},
    ],
)
def test_a_llama_that_transformers_refuses_is_a_mistral_to_it(tmp_path, change):
    config = dataclasses.replace(LLAMA, **change)
    described = config_to_hf(LLAMA) | {
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.query_groups,
        "initializer_range": config.init_method_std,
    }
    with pytest.raises(Exception, match=r"hidden size \(44\) is not|initializer_range"):
        transformers.LlamaConfig(**described)
    model = build_model(config)
    model.init_weights(0)
    save_hf(tmp_path / "out", config, model.state_dict(), {"model_type": "llama"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(theirs) is transformers.MistralForCausalLM
    expected = theirs(TOKENS).logits
    assert (model(TOKENS) - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "add_qkv_bias is True, but for a LLaMA it must be False; add_qkv_bias is"),
        (
            WINDOW,
            "a Qwen2 it must be False; add_qkv_bias is True, but for a Qwen3 it must be False",
        ),
    ],
)
def test_a_llama_that_none_of_transformers_models_is_is_not_written(tmp_path, change, words):
    config = dataclasses.replace(LLAMA, add_qkv_bias=True, qk_layernorm=True, **change)
    with pytest.raises(ValueError, match=re.escape(words) + ".*; keep the model in its checkpoint"):
        save_hf(tmp_path / "out", config, build_model(config).state_dict())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        ({"pad_token_id": 61}, "pad_token_id is 61, but vocab_size is 61"),
        ({"eos_token_id": "</s>"}, 'eos_token_id is "</s>"; it must be a whole number'),
        ({"eos_token_id": [9, None]}, "it must be a list of whole numbers"),
        ({"model_type": "gpt2"}, 'model_type = "gpt2" is not supported; only "llama" or'),
        ({"max_position_embeddings": 0}, "max_position_embeddings is below 1"),
        ({"attention_dropout": "x"}, 'attention_dropout is "x"; it must be a finite number'),
        ({"attention_dropout": 1}, "attention_dropout is 1; it must be 0 or more and below 1"),
    ],
)
def test_contents_that_transformers_could_not_read(contents, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        config_to_hf(LLAMA, contents)


def test_null_means_missing():
    assert config_to_hf(
        LLAMA, {"max_position_embeddings": None, "attention_dropout": None}
    ) == config_to_hf(LLAMA)


WRONG = [
    None,
    "8",
    [],
    {},
    ["x"],
    [[]],
    {"x": 1},
    2.5,
    0,
    -1,
    True,
    float("nan"),
    float("inf"),
    10**30,
    "a" * 5000,
]
FREE = {"architectures", "model_type", "bos_token_id", "eos_token_id"}
OPTIONAL = {
    "num_key_value_heads",
    "head_dim",
    "n_inner",
    "layer_types",
    "attention_bias",
    "mlp_bias",
    "sliding_window",
}
RATES = {"attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "max_window_layers"}
FLOATS = {"rope_theta", "rms_norm_eps", "initializer_range", "layer_norm_epsilon"}
FLOATS |= {"factor", "low_freq_factor", "high_freq_factor"}


def may_be(key, good, value):
    """Return whether a value is of the right type, and a model could have it."""
    if value is None:
        return key in OPTIONAL | RATES
    if key in FLOATS:
        return value in (2.5, 10**30)
    return (key in RATES and value in (0, -1)) or (isinstance(good, bool) and value is True)


@pytest.mark.parametrize("name", ["llama, llama3", "ministral", "qwen2, tied, a window", "gpt2"])
def test_every_entry_of_a_wrong_type_is_one_line(name):
    good = config_to_hf(CONFIGS[name])
    rope = good.pop("rope_parameters", {})  # rope_theta is read at the top then
    good.pop("rope_scaling", None)
    changes = [
        ({key: wrong}, key, good[key], wrong) for key in good.keys() - FREE for wrong in WRONG
    ]
    tables = [
        (key, wrong) for key in ("rope_scaling", "rope_parameters") if rope for wrong in WRONG
    ]
    changes += [
        ({key: wrong}, key, None, wrong) for key, wrong in tables if wrong not in (None, {})
    ]
    changes += [
        ({"rope_parameters": rope | {key: wrong}}, key, rope[key], wrong)
        for key in rope
        for wrong in WRONG
    ]
    assert len(changes) > 100
    for change, key, value, wrong in changes:
        if not may_be(key, value, wrong):
            named = rf"(?<!\w)(rope_scaling_)?({key}|{'|'.join(change)}|rotary_base)(?!\w)"
            with pytest.raises(UserError, match=rf"^config\.json: .{{0,200}}{named}.{{0,260}}$"):
                config_from_hf(good | change)


def test_weights_are_finite_numbers(tmp_path):
    state = build_model(LLAMA).state_dict()
    theirs = to_hf(state, LLAMA)
    for breakage, words in (
        (lambda w: w.to(torch.int8), "embed_tokens.weight is int8, but weights must be float32"),
        (lambda w: w.to(torch.float8_e4m3fn), "is float8_e4m3fn, but weights must be"),
        (
            lambda w: w.index_fill(0, torch.tensor([3]), torch.nan),
            ": 48 of 2928 values are not finite",
        ),
        (
            lambda w: w.index_fill(1, torch.tensor([3]), -torch.inf),
            ": 61 of 2928 values are not finite",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            from_hf(
                theirs
                | {"model.embed_tokens.weight": breakage(theirs["model.embed_tokens.weight"])},
                LLAMA,
            )
        with pytest.raises(ValueError, match=words.replace("embed_tokens", "embedding")):
            save_hf(
                tmp_path / "out",
                LLAMA,
                state | {"embedding.weight": breakage(state["embedding.weight"])},
            )
    dit = random_dit(IMAGE).state_dict()
    with pytest.raises(ValueError, match=r"x_embedder.bias: 1 of 24"):
        save_dit(
            tmp_path / "out",
            IMAGE,
            dit | {"x_embedder.bias": torch.tensor([torch.nan, *[0.0] * 23])},
        )
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_named_and_stays_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"cannot write to .*file/under \(Not a directory\)"):
        save_hf(tmp_path / "file" / "under", LLAMA, build_model(LLAMA).state_dict())

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dumps", full)  # the weights are there by then
    with pytest.raises(
        ValueError, match=r"cannot write to .*\(No space left on device\); free space"
    ):
        save_hf(tmp_path / "out", LLAMA, build_model(LLAMA).state_dict())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_layers": "2"}, 'num_layers is "2"; it must be a whole number'),
        ({"num_layers": 10**9}, "num_layers is 1000000000, but there are only 32 weights"),
        ({"latent_shape": 3}, "latent_shape is 3; it must be a list"),
        ({"latent_shape": [3, 80000, 80000]}, "pos_embed (1, 16, 24) differs"),
        ({"learn_sigma": 1}, "learn_sigma is 1; it must be true or false"),
        ({"dropout": 0.1}, "dropout is not a field of a DiT's configuration"),
        ({"model_type": "gpt2"}, 'model_type = "gpt2" is not supported'),
        ({"ffn_hidden_size": None}, None),
    ],
)
def test_a_dit_s_configuration_is_read_without_trust(tmp_path, change, words):
    save_dit(tmp_path, IMAGE, random_dit(IMAGE).state_dict())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    if words is None:
        load_dit(tmp_path)
        return
    with pytest.raises(ValueError, match=re.escape(words)):
        load_dit(tmp_path)


def test_sizes_of_another_model_are_seen_before_one_is_made(tmp_path):
    save_hf(tmp_path / "out", LLAMA, build_model(LLAMA).state_dict())
    path = tmp_path / "out" / "config.json"
    good = json.loads(path.read_text())
    for change, words in (
        ({"num_hidden_layers": 10**9}, "num_layers is 1000000000, but there are only 21 weights"),
        (
            {"vocab_size": 2**31 - 1},
            "vocab_size is 2147483647, but the largest weight has 3840 values",
        ),
        ({"head_dim": 2**30}, "kv_channels is 6442450944, but the largest"),
    ):
        path.write_text(json.dumps(good | change))
        with pytest.raises(ValueError, match=words):
            load_hf(tmp_path / "out")
    for text in ("[" * 100_000, "\xff", '"x"', ""):
        path.write_text(text, encoding="latin-1")
        with pytest.raises(
            ValueError, match=r"config\.json (is not valid JSON|does not contain a JSON object)"
        ):
            load_hf(tmp_path / "out")


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_damaged_folder_is_read_or_refused_in_one_line(tmp_path, config, name):
    """Bits flipped, cut or swapped."""
    torch.manual_seed(0)
    save_hf(tmp_path, config, build_model(config).state_dict())
    path = tmp_path / name
    changed = list(mutations(path.read_bytes(), 20))
    if name == "config.json":
        contents = json.loads(path.read_text())
        others = (None, -3, 10**12, "2", [])
        changed += [
            json.dumps(contents | {key: other}).encode() for key in contents for other in others
        ]
    assert outcomes(path, changed, lambda: load_hf(tmp_path))["refused"] > len(changed) / 4
