"""A run's model, optimizer and progress are those of the newest or the named checkpoint."""

from dataclasses import replace

import pytest

from model.diffusion import DiffusionConfig
from tests.parallel.tiny import (
    ARCHITECTURE,
    build,
    equal,
    rewrite_manifest,
    two_checkpoints,
    whole_tensors,
)
from tests.train.optimizers.momentum import NAME, Momentum
from tests.train.test_run import with_checkpoint
from train.callbacks.health import RunProgress
from train.checkpoint.api import CheckpointConfig
from train.checkpoint.manifest import CheckpointError
from train.config.entries import Config, DiTRunConfig
from train.optimizers import OPTIMIZERS
from train.optimizers.config import OptimizerConfig
from train.resume.settings import checkpoint_extra
from train.resume.start import find_start


def resumed(config, model, optimizer, contents):
    start = find_start(config, ARCHITECTURE, contents)
    start.load([model], optimizer)
    return replace(config, optimizer=start.optimizer), start.progress


def test_nothing_to_load_starts_afresh_unless_it_must_be_there(tmp_path, capsys):
    model, optimizer = build(0, sharded=False)
    before = whole_tensors(model, optimizer)
    config = with_checkpoint()
    assert resumed(config, model, optimizer, {}) == (config, RunProgress())
    assert capsys.readouterr().out == ""
    load = str(tmp_path / "none")
    config = with_checkpoint(load=load)
    assert resumed(config, model, optimizer, {}) == (config, RunProgress())
    assert capsys.readouterr().out == f"no checkpoint in {load}: starting from scratch\n"
    with pytest.raises(CheckpointError, match=f"load is {load}, which has no checkpoint"):
        resumed(with_checkpoint(load=load, exit_on_missing_checkpoint=True), model, optimizer, {})
    assert equal(whole_tensors(model, optimizer), before)


def test_the_newest_or_the_named_checkpoint_is_loaded(tmp_path, capsys):
    trained, trained_optimizer = two_checkpoints(tmp_path)
    order = {**Config().named(Config.SAMPLE_ORDER), "seed": 99}
    for i in (1, 2):
        state = {"progress": {"iteration": i, "consumed_samples": 4 * i}, "sample_order": order}
        rewrite_manifest(tmp_path / f"iter_{i:07d}", extra=state)
    model, optimizer = build(1, sharded=False)
    config = with_checkpoint(load=str(tmp_path), allow_changed=("seed",))
    same, progress = resumed(config, model, optimizer, {"data_path x": "1"})
    assert same == config
    assert progress == RunProgress(iteration=2, consumed_samples=8)
    output = capsys.readouterr().out
    assert f"resumed from {tmp_path}/iter_0000002, 8 samples consumed" in output
    assert (
        "note: seed was 99 and is 1234: the samples to come may repeat consumed ones; --seed 99 "
        "keeps it\n"
    ) in output
    assert output.count("note:") == 1
    assert equal(whole_tensors(model, optimizer), whole_tensors(trained, trained_optimizer))
    named = with_checkpoint(load=str(tmp_path), ckpt_step=1, allow_changed=("all",))
    assert resumed(named, model, optimizer, {}) == (
        named,
        RunProgress(iteration=1, consumed_samples=4),
    )
    assert not equal(whole_tensors(model, optimizer), whole_tensors(trained, trained_optimizer))


def test_state_of_another_optimizer_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    two_checkpoints(tmp_path)
    monkeypatch.setitem(OPTIMIZERS, NAME, Momentum())
    model, optimizer = build(1, sharded=False)
    momentum = OptimizerConfig(optimizer=NAME)
    for saved_by, config, message in (
        (
            {"optimizer": NAME},
            OptimizerConfig(),
            "state of optimizer momentum, but optimizer is adam, which",
        ),
        (
            {"weight_decay": 0.1},
            momentum,
            "state of optimizer adam, but optimizer is momentum, which cannot use it",
        ),
    ):
        extra = {"progress": {"iteration": 2, "consumed_samples": 8}, "settings": saved_by}
        rewrite_manifest(tmp_path / "iter_0000002", extra=extra)
        run = replace(with_checkpoint(load=str(tmp_path)), optimizer=config)
        before = whole_tensors(model, optimizer)
        with pytest.raises(CheckpointError, match=message):
            resumed(run, model, optimizer, {})
        assert equal(whole_tensors(model, optimizer), before)
        weights = replace(run, checkpoint=replace(run.checkpoint, finetune=True))
        resumed(weights, model, optimizer, {})
    assert checkpoint_extra(Config(optimizer=momentum), {})["settings"]["optimizer"] == NAME


def test_another_objective_is_refused_and_what_else_changed_is_noted(tmp_path, capsys):
    two_checkpoints(tmp_path)
    saved = DiTRunConfig()
    state = {
        "progress": {"iteration": 2, "consumed_samples": 8},
        "sample_order": saved.named(saved.SAMPLE_ORDER),
    }
    state |= {"trained_for": saved.named(saved.OBJECTIVE), "ema_decay": 0.9}
    state |= {"settings": {**saved.named(saved.NOTED), "class_dropout_prob": 0.5}}
    rewrite_manifest(tmp_path / "iter_0000002", extra=state)
    model, optimizer = build(1, sharded=False)
    config = DiTRunConfig(
        checkpoint=CheckpointConfig(load=str(tmp_path), allow_changed=("class_dropout_prob",))
    )
    other = replace(config, diffusion=DiffusionConfig(objective="v_prediction"))
    before = whole_tensors(model, optimizer)
    with pytest.raises(
        CheckpointError, match="trained with objective ddpm, but objective is v_prediction; set"
    ):
        resumed(other, model, optimizer, {})
    assert equal(whole_tensors(model, optimizer), before)
    resumed(config, model, optimizer, {})
    output = capsys.readouterr().out
    assert (
        "note: class_dropout_prob was 0.5 and is 0.1; --class-dropout-prob 0.5 keeps it\n" in output
    )
    assert "of the weights are dropped, because ema_decay was 0.9 and is not set now" in output
    assert output.count("note:") == 2
