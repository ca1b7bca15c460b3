"""A run that is stopped and resumed is the run that never stopped."""

import json
import shutil
from pathlib import Path

import pytest

from tests.pretraining import differences, pretrain
from train.config.language import load_config
from train.watching.metrics import METRICS, read_metrics

STRIPED = ("--context-parallel-method", "striped", "--context-parallel-size", "2")
EXACT = ("lm_loss", "grad_norm", "learning_rate", "consumed_samples", "consumed_tokens")


@pytest.fixture(scope="module", params=[12, pytest.param(40, marks=pytest.mark.slow)])
def last(request: pytest.FixtureRequest) -> int:
    """Iterations of a whole run."""
    return request.param


@pytest.fixture(scope="module")
def mesh(last: int) -> tuple[str, ...]:
    return (*STRIPED, "--train-iters", str(last))


@pytest.fixture(scope="module")
def uninterrupted(mesh: tuple[str, ...], default_data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return pretrain(4, default_data, tmp_path_factory.mktemp("whole") / "run", *mesh)


@pytest.fixture(scope="module")
def stopped_half_way(
    last: int, mesh: tuple[str, ...], default_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    save = tmp_path_factory.mktemp("stopped") / "run"
    pretrain(4, default_data, save, *mesh, "--exit-interval", str(last // 2))
    return save


def test_stopping_after_a_half_and_again_after_three_quarters_changes_no_bit(
    last: int,
    mesh: tuple[str, ...],
    default_data: Path,
    uninterrupted: list[dict],
    stopped_half_way: Path,
    tmp_path: Path,
) -> None:
    save = tmp_path / "run"
    shutil.copytree(stopped_half_way, save)
    pretrain(4, default_data, save, *mesh, "--load", str(save), "--exit-interval", str(last * 3 // 4))
    got = pretrain(4, default_data, save, *mesh, "--load", str(save))
    assert [{name: record[name] for name in EXACT} for record in got] == [
        {name: record[name] for name in EXACT} for record in uninterrupted
    ]
    assert len(got) == last
    assert got[-1]["validation_loss"] == uninterrupted[-1]["validation_loss"]
    assert (save / "latest_checkpointed_iteration.txt").read_text().strip() == str(last)


@pytest.mark.parametrize(
    "method", ["ring", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zigzag", "allgather"))]
)
def test_another_method_goes_on_from_the_checkpoint(
    method: str,
    last: int,
    mesh: tuple[str, ...],
    default_data: Path,
    uninterrupted: list[dict],
    stopped_half_way: Path,
    tmp_path: Path,
) -> None:
    flags = (*mesh, "--context-parallel-method", method, "--load", str(stopped_half_way))
    assert differences(pretrain(4, default_data, tmp_path / "run", *flags), uninterrupted[last // 2 :]) <= 1e-5


def test_another_world_size_goes_on_with_the_same_samples(
    last: int,
    mesh: tuple[str, ...],
    default_data: Path,
    uninterrupted: list[dict],
    stopped_half_way: Path,
    tmp_path: Path,
) -> None:
    flags = (*mesh, "--context-parallel-size", "1", "--load", str(stopped_half_way))
    assert differences(pretrain(1, default_data, tmp_path / "run", *flags), uninterrupted[last // 2 :]) <= 1e-5


@pytest.mark.parametrize(("strategy", "inner"), [("ddp", "context"), ("zero1", "tensor-model")])
def test_another_strategy_and_tensor_parallelism_go_on_from_the_checkpoint(
    strategy: str,
    inner: str,
    last: int,
    mesh: tuple[str, ...],
    default_data: Path,
    uninterrupted: list[dict],
    stopped_half_way: Path,
    tmp_path: Path,
) -> None:
    flags = (*mesh, "--context-parallel-size", "1", f"--{inner}-parallel-size", "2", "--load", str(stopped_half_way))
    got = pretrain(4, default_data, tmp_path / "run", *flags, "--data-parallel-sharding-strategy", strategy)
    assert differences(got, uninterrupted[last // 2 :]) <= 1e-5


def test_metrics_hold_every_iteration_once_after_a_crash(
    last: int, default_data: Path, stopped_half_way: Path, tmp_path: Path
) -> None:
    """Iterations that were recorded but not checkpointed, and half a line, are cut away."""
    save, half = tmp_path / "run", last // 2
    shutil.copytree(stopped_half_way, save)
    with (save / METRICS).open("a") as file:
        file.write(json.dumps({"iteration": half + 1, "lm_loss": 0.0}) + f'\n{{"iteration": {half + 2}, "lm_')
    flags = ("--train-iters", str(last), "--exit-interval", str(half + 2))
    pretrain(1, default_data, save, *flags, "--load", str(save))
    assert [record["iteration"] for record in read_metrics(save / METRICS)] == list(range(1, half + 3))
    assert read_metrics(save / METRICS)[half]["lm_loss"] > 0


def test_a_finished_run_has_nothing_left_to_do_and_a_longer_one_no_jump(
    default_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
