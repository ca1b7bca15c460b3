"""Weights are read from the files that transformers reads; a broken folder is refused by name."""

import contextlib
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.hf import from_hf, load_hf
from tests.model.hf.hugging_face import (
    LLAMA,
    hugging_face,
    transformers,
)
from tests.model.hf.test_api import edit


@pytest.fixture
def sharded(tmp_path):
    """A folder as transformers writes it, in several shards."""
    hugging_face(LLAMA).save_pretrained(tmp_path, max_shard_size="60KB")
    return tmp_path


def odd_files(folder, kind):
    """A folder of a model with the files of another one beside; return what is told of them."""
    model, other = hugging_face(LLAMA), hugging_face(LLAMA)
    other.lm_head.weight.data += 1
    model.save_pretrained(folder, max_shard_size="60KB")
    shards = {
        name: load_file(folder / name)
        for name in sorted(path.name for path in folder.glob("model-*"))
    }
    if kind == "saved twice":
        other.save_pretrained(folder.parent / "other")
        (folder.parent / "other" / "model.safetensors").rename(folder / "model.safetensors")
        return (
            r"reading model.safetensors, as transformers does, and ignoring "
            rf"model-00001-of.*, .* and {len(shards) - 2} more"
        )
    if kind == "old shards":
        save_file(other.state_dict(), folder / "model-00001-of-00001.safetensors")
        return "and ignoring model-00001-of-00001.safetensors"
    if kind == "pickles":
        torch.save(other.state_dict(), folder / "pytorch_model.bin")
        return "reading model-00001.*, and ignoring pytorch_model.bin"
    last = list(shards)[-1]
    if kind == "twice":
        save_file(
            shards[last] | {"model.embed_tokens.weight": other.lm_head.weight.data}, folder / last
        )
        return f"model.embed_tokens.weight is ignored, as in transformers: {last} has it too"
    assert kind == "not in the index"
    names = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    fewer = {name: names[name] for name in names if "1.mlp" not in name}
    edit(folder / "model.safetensors.index.json", weight_map=fewer)
    return None


@pytest.mark.parametrize(
    "kind", ["saved twice", "old shards", "pickles", "twice", "not in the index"]
)
def test_weights_are_those_that_transformers_reads(tmp_path, kind):
    warning = odd_files(tmp_path / "odd", kind)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "odd")
    with pytest.warns(UserWarning, match=warning) if warning else contextlib.nullcontext():
        _, state, _ = load_hf(tmp_path / "odd")
    expected = from_hf(theirs.state_dict(), LLAMA)
    assert all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "escape", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "model.bin"]
)
def test_an_index_cannot_leave_its_folder(sharded, escape):
    index = sharded / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    edit(index, weight_map=names | {"lm_head.weight": escape})
    with pytest.raises(ValueError, match="not a safetensors file directly in its folder"):
        load_hf(sharded)


def test_broken_folders(sharded):
    with pytest.raises(ValueError, match=r"nowhere/config\.json does not exist"):
        load_hf(sharded / "nowhere")
    index = sharded / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    shard = sharded / names["lm_head.weight"]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-10])
    with pytest.raises(ValueError, match=f"{shard.name} is not a complete safetensors file"):
        load_hf(sharded)
    save_file(
        {name: w for name, w in _load(whole, sharded).items() if name != "lm_head.weight"}, shard
    )
    with pytest.raises(ValueError, match=r"lacks lm_head\.weight"):
        load_hf(sharded)
    shard.unlink()
    with pytest.raises(ValueError, match="does not exist"):
        load_hf(sharded)
    index.write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        load_hf(sharded)
    index.write_text('{"weight_map": [1]}')
    with pytest.raises(ValueError, match="weight_map"):
        load_hf(sharded)


def _load(contents, folder):
    path = folder / "copy"
    path.write_bytes(contents)
    return load_file(path)
