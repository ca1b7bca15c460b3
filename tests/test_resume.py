"""A run that is stopped and resumed is the run that never stopped."""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.pretraining import differences, pretrain
from train.config.language import load_config
from train.watching.metrics import METRICS, read_metrics

STRIPED = ("--context-parallel-method", "striped", "--context-parallel-size", "2")
EXACT = ("lm_loss", "grad_norm", "learning_rate", "consumed_samples", "consumed_tokens")


class Runs(NamedTuple):
    """A run of ``last`` iterations with these flags, and one that was stopped half-way."""

    last: int
    flags: tuple[str, ...]
    whole: list[dict]
    stopped: Path


@pytest.fixture(scope="module", params=[8, pytest.param(40, marks=pytest.mark.slow)])
def runs(request, default_data, tmp_path_factory):
    flags, stopped = (*STRIPED, "--train-iters", str(request.param)), tmp_path_factory.mktemp("stopped") / "run"
    whole = pretrain(4, default_data, tmp_path_factory.mktemp("whole") / "run", *flags)
    pretrain(4, default_data, stopped, *flags, "--exit-interval", str(request.param // 2))
    return Runs(request.param, flags, whole, stopped)


def test_stopping_after_a_half_and_again_after_three_quarters_changes_no_bit(runs, default_data, tmp_path):
    save, flags = tmp_path / "run", (*runs.flags, "--load", str(tmp_path / "run"))
    shutil.copytree(runs.stopped, save)
    pretrain(4, default_data, save, *flags, "--exit-interval", str(runs.last * 3 // 4))
    got = pretrain(4, default_data, save, *flags)
    assert [{name: record[name] for name in EXACT} for record in got] == [
        {name: record[name] for name in EXACT} for record in runs.whole
    ]
    assert len(got) == runs.last
    assert got[-1]["validation_loss"] == runs.whole[-1]["validation_loss"]
    assert (save / "latest_checkpointed_iteration.txt").read_text().strip() == str(runs.last)


ALONE = "--context-parallel-size 1"


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        pytest.param(4, "--context-parallel-method ring", marks=pytest.mark.slow),
        pytest.param(4, "--context-parallel-method zigzag", marks=pytest.mark.slow),
        pytest.param(4, "--context-parallel-method allgather", marks=pytest.mark.slow),
        (1, ALONE),
        pytest.param(4, "--context-parallel-size 2 --data-parallel-sharding-strategy ddp", marks=pytest.mark.slow),
        (4, f"{ALONE} --tensor-model-parallel-size 2 --data-parallel-sharding-strategy zero1"),
    ],
)
def test_another_method_mesh_or_strategy_goes_on_with_the_same_samples(ranks, flags, runs, default_data, tmp_path):
    arguments = (*runs.flags, *flags.split(), "--load", str(runs.stopped))
    assert (
        differences(pretrain(ranks, default_data, tmp_path / "run", *arguments), runs.whole[runs.last // 2 :]) <= 1e-5
    )


def test_metrics_hold_every_iteration_once_after_a_crash(runs, default_data, tmp_path):
    """Iterations that were recorded but not checkpointed, and half a line, are cut away."""
    save, half = tmp_path / "run", runs.last // 2
    shutil.copytree(runs.stopped, save)
    with (save / METRICS).open("a") as file:
        file.write(json.dumps({"iteration": half + 1, "lm_loss": 0.0}) + f'\n{{"iteration": {half + 2}, "lm_')
    flags = ("--train-iters", str(runs.last), "--exit-interval", str(half + 2))
    pretrain(1, default_data, save, *flags, "--load", str(save))
    assert [record["iteration"] for record in read_metrics(save / METRICS)] == list(range(1, half + 3))
    assert read_metrics(save / METRICS)[half]["lm_loss"] > 0


def test_a_finished_run_has_nothing_left_to_do_and_a_longer_one_no_jump(default_data, tmp_path, capsys):
    flags = ("--min-lr", "1e-4", "--load", str(tmp_path / "run"))
    first = pretrain(1, default_data, tmp_path / "run", *flags, "--train-iters", "3")
    again = pretrain(1, default_data, tmp_path / "run", *flags, "--train-iters", "3")
    assert again == first
    assert "note:" not in capsys.readouterr().out
    flags += ("--train-iters", "5", "--weight-decay", "0", "--allow-changed", "weight_decay")
    longer = pretrain(1, default_data, tmp_path / "run", *flags)
    assert [record["learning_rate"] for record in longer[2:]] == [1e-4] * 3
    said = capsys.readouterr().out
    assert "note: lr at iteration 4 is 1.000000E-04 by the checkpoint's schedule (1.000000E-04 after iteration" in said
    assert " and 2.318019E-04 by this configuration's (lr_decay_iters was 3 and is 5): it goes on with the che" in said
    assert "note: weight_decay was 0.1 and is 0.0; --weight-decay 0.1 keeps it\n" in said
    assert said.count("note:") == 2
    written = str(tmp_path / "run" / "config.toml")
    assert load_config(written).optimizer.lr_decay_iters is None
    overridden = ("--config", written, "--override-opt-param-scheduler")
    longest = pretrain(1, default_data, tmp_path / "run", *flags, *overridden, "--train-iters", "7")
    assert longest[5]["learning_rate"] > 1e-4
    assert "lr_decay_iters was 3 and is 7" in capsys.readouterr().out
