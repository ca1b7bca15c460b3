"""The configuration of a diffusion transformer.

The files under configs/, and what contradicts itself.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from parallel.mesh import MeshConfig
from train.config.diffusion import load_config, parse_args, validate
from train.config.entries import DiTRunConfig
from train.config.flags import ConfigError, write_toml

CONFIGS = sorted((Path(__file__).parents[3] / "configs" / "models").glob("*dit_*.toml"))
PROCESSES = {"dit_tiny": 4}
"""Processes that `make dit` starts: a file that sets a global batch has no room for more.

The others fit 8.
"""


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_files_load_are_valid_and_read_back_equal(path, tmp_path):
    config = load_config(path)
    validate(config, PROCESSES.get(path.stem, 8))
    (tmp_path / "config.toml").write_text(write_toml(config))
    assert load_config(tmp_path / "config.toml") == config
    assert parse_args(["--config", str(path)]) == config


def test_the_length_is_the_number_of_patches_and_the_attention_full():
    config = DiTRunConfig()
    assert (config.sequence_length, config.causal) == (256, False)
    assert config.context.context_parallel_method == "ring"
    order = config.named(config.SAMPLE_ORDER)
    assert order == {"seed": config.train.seed, "data_path": ["digits"], "split": "90,10"}


def test_what_contradicts_itself_is_refused():
    mesh = MeshConfig(context_parallel_size=2, tensor_model_parallel_size=2)
    config = parse_args(
        ["--latent-shape", "1", "8", "8", "--patch-size", "8", "--num-attention-heads", "6"]
    )
    with pytest.raises(ConfigError, match="more processes than the 1 patch of a sequence"):
        validate(replace(config, mesh=mesh), 4)
    never = ["--class-dropout-prob", "0", "--context-parallel-method", "none"]
    with pytest.raises(
        ConfigError,
        match=r"guidance is 4\.0, but class_dropout_prob is 0\.0, .* give --guidance 1, or",
    ):
        validate(parse_args(never), 1)
    for harmless in (
        ["--guidance", "1"],
        ["--samples-per-class", "0"],
        ["--class-dropout-prob", "0.1"],
    ):
        validate(parse_args([*never, *harmless]), 1)
    with pytest.raises(
        ConfigError, match=r"unknown argument --num-query-groups; it belongs to pretrain_gpt\.py"
    ):
        parse_args(["--num-query-groups", "2"])
    flags = [
        "--data-path",
        "digits",
        "--latent-shape",
        "1",
        "8",
        "8",
        "--num-classes",
        "10",
        "--pack-samples",
    ]
    validate(parse_args(flags), 1)
    with pytest.raises(
        ConfigError,
        match=r"pack_samples is set, but context_parallel_method none .* choose a method",
    ):
        validate(parse_args([*flags, "--context-parallel-method", "none"]), 1)
