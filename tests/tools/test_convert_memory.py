"""Conversions hold a few tensors in memory at a time, however large the model is."""

import dataclasses
import json
import weakref
from pathlib import Path

import pytest
import torch

from model.hf import config_to_hf
from model.hf.api import their_weights
from model.hf.folder import DTYPES, Weights
from model.registry import meta_state
from runtime.ranks import run_ranks
from tests.model.hf.hugging_face import LLAMA
from tests.tools.test_convert_hf import published, tensors
from tools.convert_hf import export_model, import_model

TALL = dataclasses.replace(
    LLAMA, num_layers=1, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32, num_query_groups=8,
    vocab_size=128256,
)  # fmt: skip
"""LLaMA 3 8B with one of its layers."""


def sparse(folder, config, dtype):
    """Write a model of zeros that takes no room on the disk; return its bytes."""
    ours = {name: weight.to(dtype) for name, weight in meta_state(config).items()}
    theirs, _ = their_weights(ours, lambda name: ours[name], config)
    header, end = {}, 0
    for name, weight in theirs.items():
        start, end = end, end + weight.nbytes
        header[name] = {"dtype": DTYPES[dtype], "shape": list(weight.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(file.tell() + end)
    (folder / "config.json").write_text(json.dumps(config_to_hf(config)))
    return end


def peak(rank, world_size, folder):
    """Convert there and back; return by how many bytes the process grew at most in each."""
    found = []
    for work in (
        lambda: import_model(folder / "theirs", folder / "run"),
        lambda: export_model(folder / "run", folder / "out", None, None, 10**9),
    ):
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
        before = memory("VmRSS")
        work()
        found.append(memory("VmHWM") - before)
    return found


def memory(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


def test_a_few_tensors_live_at_a_time(tmp_path, monkeypatch):
    """A fused one of theirs needs its three parts of ours, and theirs is made of these."""
    alive, most = set(), [0]
    reads = {Weights: Weights.__getitem__, torch: torch.empty_like}

    def counted(weight):
        alive.add(mark := object())
        weakref.finalize(weight, alive.discard, mark)
        most[0] = max(most[0], len(alive))
        return weight

    source = published(tmp_path / "theirs", "gpt2")
    monkeypatch.setattr(Weights, "__getitem__", lambda self, name: counted(reads[Weights](self, name)))
    import_model(source, tmp_path / "run")
    imported, most[0] = most[0], 0
    monkeypatch.setattr(torch, "empty_like", lambda like, **kind: counted(reads[torch](like, **kind)))
    export_model(tmp_path / "run", tmp_path / "out", None, None, 10**9)
    assert len(tensors(source)) > 20
    assert 1 <= imported <= 3
    assert 1 <= most[0] <= 9, "a module's weights and biases, and theirs of it"


@pytest.mark.slow
def test_a_few_tensors_are_in_memory(tmp_path):
    whole = sparse(tmp_path / "theirs", TALL, torch.bfloat16)
    (grown,) = run_ranks(peak, 1, tmp_path)
    print(f"model {whole:,} bytes, import and export grew by {grown}")
    assert max(grown) < min(2400 << 20, whole)
