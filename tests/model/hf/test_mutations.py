"""Hugging Face's folders with bits flipped, cut or swapped: each is read, or refused in one line."""

import json

import pytest
import torch

from model.hf import load_hf, save_hf
from model.registry import build_model
from tests.data.test_mutations import mutations, outcomes
from tests.model.hf.hugging_face import GPT2, LLAMA


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_damaged_folder(tmp_path, config, name):
    torch.manual_seed(0)
    save_hf(tmp_path, config, build_model(config).state_dict())
    path = tmp_path / name
    changed = list(mutations(path.read_bytes(), 20))
    if name == "config.json":
        contents = json.loads(path.read_text())
        others = (None, -3, 10**12, "2", [])
        changed += [json.dumps(contents | {key: other}).encode() for key in contents for other in others]
    assert outcomes(path, changed, lambda: load_hf(tmp_path))["refused"] > len(changed) / 4
