"""Settings of the optimizers, and what each states of itself."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.train.optimizers.momentum import NAME, Momentum
from train.config.entries import Config
from train.config.flags import ConfigError, load, write_toml
from train.config.language import parse_args, validate
from train.optimizers import OPTIMIZERS
from train.optimizers.config import OptimizerConfig, build_optimizer


@pytest.fixture
def momentum(monkeypatch):
    """Register another optimizer for a test."""
    monkeypatch.setitem(OPTIMIZERS, NAME, Momentum())
    return OPTIMIZERS[NAME]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", 0.0),
        ("adam_eps", 0.0),
        ("min_lr", -1.0),
        ("min_lr", 1.0),
        ("weight_decay", -0.1),
        ("clip_grad", -1.0),
        ("lr_warmup_iters", -1),
        ("adam_beta1", 1.0),
        ("adam_beta2", -0.1),
        ("lr_decay_iters", 0),
        ("lr_wsd_decay_iters", 0),
        ("lr_warmup_init", 1.0),
        ("lr_warmup_fraction", 1.0),
        ("lr_decay_style", "stepwise"),
    ],
)
def test_a_wrong_setting_is_named(field, value):
    with pytest.raises(ValueError, match=rf"^{field} is {value}; it must"):
        OptimizerConfig(**{field: value})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_has_the_state_that_it_states(name):
    model = nn.Linear(3, 2)
    optimizer = build_optimizer(OptimizerConfig(optimizer=name), model)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        tensors = {key for key, value in state.items() if value.shape == parameter.shape}
        assert tensors == set(OPTIMIZERS[name].states)
        assert (
            sum(state[key].nbytes for key in tensors)
            == OPTIMIZERS[name].state_bytes(OptimizerConfig(optimizer=name)) * parameter.numel()
        )
        others = [value for key, value in state.items() if key not in tensors]
        assert all(value.numel() == 1 for value in others), (
            "a count of steps alone may lie beside them"
        )


def test_a_setting_of_another_optimizer_is_refused_with_the_one_that_has_it(momentum):
    assert OptimizerConfig(optimizer=NAME, weight_decay=0.2).spec is momentum
    with pytest.raises(
        ValueError,
        match=r"^adam_beta1 is 0.5, but it is a setting of optimizer adam, and optimizer is m",
    ):
        OptimizerConfig(optimizer=NAME, adam_beta1=0.5)
    with pytest.raises(ValueError, match=r"^optimizer is lamb; it must be one of adam"):
        OptimizerConfig(optimizer="lamb")


def test_a_file_without_a_choice_is_of_adam(tmp_path):
    """As runs wrote before there was one."""
    text = write_toml(Config(optimizer=OptimizerConfig(adam_beta2=0.98)))
    assert 'optimizer = "adam"\n' in text
    (tmp_path / "now.toml").write_text(text)
    (tmp_path / "before.toml").write_text(text.replace('optimizer = "adam"\n', ""))
    for file in ("now.toml", "before.toml"):
        config = load(Config, tmp_path / file).optimizer
        assert (config.optimizer, config.adam_beta2) == ("adam", 0.98)
    (tmp_path / "bare.toml").write_text('optimizer = "adam"\n')
    with pytest.raises(
        ConfigError, match=r"optimizer is outside of a section; move it to \[optimizer\]"
    ):
        load(Config, tmp_path / "bare.toml")


def test_a_run_that_the_optimizer_cannot_step_in_is_refused(momentum):
    flags = "--mock-data --vocab-size 64 --device cuda --data-parallel-sharding-strategy "
    for strategy, offload, message in (
        ("ddp", False, ""),
        (
            "ddp",
            True,
            (
                "^optimizer_cpu_offload is set, but optimizer momentum cannot step with its state "
                "in host"
            ),
        ),
    ):
        config = parse_args((flags + strategy).split())
        config = replace(
            config, optimizer=OptimizerConfig(optimizer=NAME, optimizer_cpu_offload=offload)
        )
        if not message:
            validate(config, 1)
            continue
        with pytest.raises(ConfigError, match=message):
            validate(config, 1)


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        ({}, []),
        ({"optimizer": "muon"}, ["optimizer: muon"]),
        ({"exp_avg_dtype": "bf16"}, ["optimizer: adam, moments in bf16 and fp32"]),
        (
            {"optimizer": "muon", "exp_avg_dtype": "int8", "exp_avg_sq_dtype": "int8"},
            ["optimizer: muon, moments in int8"],
        ),
    ],
)
def test_a_run_names_any_optimizer_but_the_default(settings, lines):
    assert OptimizerConfig(**settings).lines == lines
