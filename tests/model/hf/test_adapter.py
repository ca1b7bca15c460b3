"""Adapters of PEFT's compute here what they do there.

Those that ours cannot be are refused by name.
"""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.hf import load_hf
from model.hf.adapter import read_adapter
from model.registry import architecture_of, build_model
from runtime import bounds
from runtime.errors import UserError
from tests.model.hf.hugging_face import GPT2, LLAMA, TOKENS, hugging_face, transformers
from tools.convert_hf import main
from train.checkpoint.api import load_model
from train.checkpoint.search import checkpoint_of
from train.config.language import load_config

LINEARS = ("wq", "wk", "wv", "wo", "gate", "up", "down")
BOUND = 1e-5


@pytest.fixture
def base(tmp_path):
    hugging_face(LLAMA).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def peft_adapter(base, folder, **settings):
    """An adapter of PEFT's own making, which does something."""
    peft = pytest.importorskip("peft", reason="compares with PEFT's adapters")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    shape = {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": ["q_proj", "down_proj"],
        "task_type": "CAUSAL_LM",
    }
    adapted = peft.get_peft_model(model, peft.LoraConfig(**shape | settings))
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    adapted.save_pretrained(folder)
    return adapted.eval()


@pytest.mark.parametrize(
    ("settings", "linears"),
    [
        ({}, ("wq", "down")),
        (
            {"target_modules": "all-linear", "lora_alpha": 9.5, "init_lora_weights": "gaussian"},
            LINEARS,
        ),
        ({"target_modules": r".*\.(v_proj|up_proj)", "r": 2, "lora_dropout": 0.25}, ("wv", "up")),
    ],
    ids=["two", "all", "pattern"],
)
def test_an_adapter_of_peft_computes_here_what_it_does_there(
    settings, linears, base, tmp_path, capsys
):
    theirs = peft_adapter(base, tmp_path / "adapter", **settings)
    command = ["import", str(base), str(tmp_path / "run"), "--adapter", str(tmp_path / "adapter")]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert f" with {2 * len(linears)} adapters of {tmp_path / 'adapter'} into " in out
    assert ("lora_dropout = 0.25 is ignored" in out) == ("lora_dropout" in settings)
    ours = build_model(load_config(tmp_path / "run" / "config.toml").model)
    load_model(checkpoint_of(tmp_path / "run"), ours, architecture_of(ours.config))
    assert ours.config.adapted_linears() == linears
    expected = theirs(TOKENS).logits
    assert (ours(TOKENS) - expected).abs().max().item() <= BOUND
    unadapted = build_model(LLAMA)
    unadapted.load_state_dict(load_hf(base)[1])
    assert (unadapted(TOKENS) - expected).abs().max().item() > 100 * BOUND


def test_files_of_an_adapter_are_read_without_trust(base, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bounds, "MAX_SECONDS", 0.2)
    adapter = tmp_path / "adapter"
    peft_adapter(base, adapter)
    config, weights = adapter / "adapter_config.json", adapter / "adapter_model.safetensors"
    good, tensors = json.loads(config.read_text()), load_file(weights)
    capsys.readouterr()
    name, linear = (
        "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight",
        "model.layers.0.mlp.down_proj",
    )
    broken = torch.full_like(tensors[name], torch.nan)
    only_null = "only null or false or [] or {} is; merge the adapters"
    for change, other, words in (
        ({"strange": 7}, tensors, "strange = 7 is not supported"),
        ({"use_dora": True}, tensors, f"use_dora = true is not supported; {only_null}"),
        ({"use_rslora": True}, tensors, "use_rslora = true is not supported"),
        (
            {"modules_to_save": ["lm_head"]},
            tensors,
            'modules_to_save = ["lm_head"] is not supported',
        ),
        (
            {"target_modules": ["q_proj", "lm_head"]},
            tensors,
            'target_modules has "lm_head", but only q_proj',
        ),
        ({"bias": "all"}, tensors, 'bias = "all" is not supported; only "none" is; merge'),
        ({"rank_pattern": {"q_proj": 2}}, tensors, 'rank_pattern = {"q_proj": 2} is not supported'),
        ({"layers_to_transform": [0]}, tensors, "layers_to_transform = [0] is not supported"),
        ({"init_lora_weights": "pissa"}, tensors, 'init_lora_weights = "pissa" is not supported'),
        ({"r": 0}, tensors, "lora_rank is 0; it must be from 1"),
        ({"r": "4"}, tensors, 'r is "4"; it must be a whole number'),
        (
            {"r": 8},
            tensors,
            f"{name.replace('1', '0')} has shape (4, 48), but the configuration needs (8, 48)",
        ),
        ({"target_modules": [["q_proj"]]}, tensors, 'target_modules has ["q_proj"], but only'),
        (
            {"target_modules": ["q_proj", "v_proj", "down_proj"]},
            tensors,
            "the state dict lacks base_model.",
        ),
        (
            {"target_modules": "nothing.*"},
            tensors,
            f'"nothing.*", but the file has an adapter of {linear}, which',
        ),
        ({"target_modules": "("}, tensors, 'target_modules is "(", but the file has an adapter'),
        (
            {"target_modules": "a{99999999999999999999}"},
            tensors,
            f'9999}}", but the file has an adapter of {linear}, which',
        ),
        (
            {"target_modules": "(" * 3000 + ")" * 3000},
            tensors,
            f"((..., but the file has an adapter of {linear}",
        ),
        (
            {"target_modules": r"((\w|\.)+)+!"},
            tensors,
            r'matching target_modules "((\\w|\\.)+)+!" does not finish',
        ),
        (
            {"target_modules": "(.|(.))+!"},
            tensors,
            "does not finish within 0.2 s of processor time",
        ),
        ({}, tensors | {name: broken}, f"{name}: 192 of 192 values are not finite"),
    ):
        config.write_text(json.dumps(good | change))
        save_file(other, weights)
        assert main(["import", str(base), str(tmp_path / "run"), "--adapter", str(adapter)]) == 1
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1
    weights.rename(adapter / "adapter_model.bin")
    for source, more, words in (
        (base, ["--adapter", str(adapter)], "adapter_model.bin is a pickle, which can run code"),
        (
            adapter,
            [],
            "the folder has adapters, which transformers would load on the base model",
        ),
    ):
        assert main(["import", str(source), str(tmp_path / "run"), *more]) == 1
        assert words in capsys.readouterr().err
    with pytest.raises(UserError, match="PEFT's names do not fit the linear layers of a gpt"):
        read_adapter(adapter, GPT2, print)
    assert not (tmp_path / "run").exists()
    for path in (weights, config):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        assert main(["import", str(base), str(tmp_path / "run"), "--adapter", str(adapter)]) == 1
        assert f"{path} is not a file" in capsys.readouterr().err
