"""A released diffusion transformer becomes a run, and comes back to the bit; a trained one gives its averages."""

import pytest
import torch
from safetensors.torch import load_file

from checkpoint.api import save_checkpoint, stored_weights
from checkpoint.search import find_checkpoint
from model.hf.dit import dit_to_original, save_dit
from model.registry import architecture_of
from tests.model.models import IMAGE, VIDEO, random_dit
from tools.convert_hf import main
from train.config.diffusion import load_config
from train.config.entries import DiTRunConfig
from train.config.flags import write_toml
from train.resume import AVERAGED


@pytest.mark.parametrize("config", [IMAGE, VIDEO], ids=["image", "video"])
def test_an_export_is_the_import_to_the_bit(tmp_path, config, capsys):
    state = random_dit(config).state_dict()
    save_dit(tmp_path / "released", config, state)
    assert main(["import", f"{tmp_path}/released", f"{tmp_path}/run"]) == 0
    assert "a diffusion transformer of" in capsys.readouterr().out
    assert load_config(tmp_path / "run/config.toml").model == config
    checkpoint = find_checkpoint(tmp_path / "run")
    weights, read = stored_weights(checkpoint, architecture_of(config))
    assert weights.keys() == state.keys()
    assert all(torch.equal(read(name), state[name]) for name in state)
    assert main(["export", f"{tmp_path}/run", f"{tmp_path}/exported"]) == 0
    assert "weights as trained" in capsys.readouterr().out
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "exported" / name).read_bytes() == (tmp_path / "released" / name).read_bytes()
    assert main(["import", f"{tmp_path}/released", f"{tmp_path}/run"]) == 1
    assert "exists" in capsys.readouterr().err


def test_a_trained_run_gives_its_averages(tmp_path, capsys):
    model, averages = random_dit(IMAGE), random_dit(IMAGE).state_dict()
    averages = {name: weight + 1 for name, weight in averages.items()}
    save_checkpoint(
        tmp_path / "run", 3, [model], None, architecture=architecture_of(IMAGE),
        extra={AVERAGED: 0.9}, more={"ema": averages},
    )  # fmt: skip
    (tmp_path / "run/config.toml").write_text(write_toml(DiTRunConfig(model=IMAGE)))
    assert main(["export", f"{tmp_path}/run", f"{tmp_path}/exported"]) == 0
    assert "averages of the weights" in capsys.readouterr().out
    found = load_file(tmp_path / "exported/model.safetensors")
    assert all(torch.equal(found[name], weight) for name, weight in dit_to_original(averages, IMAGE).items())
