"""A run that is stopped and resumed is the run that never stopped."""

import json
import shutil
from pathlib import Path

import pytest

from parallel.context import METHODS
from tests.pretraining import differences, pretrain
from train.metrics import METRICS, read_metrics

MESH = ("--context-parallel-method", "striped", "--context-parallel-size", "2", "--train-iters", "40")
EXACT = ("lm_loss", "grad_norm", "learning_rate", "consumed_samples", "consumed_tokens")


@pytest.fixture(scope="module")
def uninterrupted(default_data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return pretrain(4, default_data, tmp_path_factory.mktemp("whole") / "run", *MESH)


@pytest.fixture(scope="module")
def stopped_at_20(default_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    save = tmp_path_factory.mktemp("stopped") / "run"
    pretrain(4, default_data, save, *MESH, "--exit-interval", "20")
    return save


def test_stopping_at_20_and_again_at_30_of_40_changes_no_bit(
    default_data: Path, uninterrupted: list[dict], stopped_at_20: Path, tmp_path: Path
) -> None:
    save = tmp_path / "run"
    shutil.copytree(stopped_at_20, save)
    pretrain(4, default_data, save, *MESH, "--load", str(save), "--exit-interval", "30")
    got = pretrain(4, default_data, save, *MESH, "--load", str(save))
    assert [{name: record[name] for name in EXACT} for record in got] == [
        {name: record[name] for name in EXACT} for record in uninterrupted
    ]
    assert got[-1]["validation_loss"] == uninterrupted[-1]["validation_loss"]
    assert (save / "latest_checkpointed_iteration.txt").read_text().strip() == "40"


@pytest.mark.parametrize("method", [name for name in METHODS if name != "striped"])
def test_another_method_goes_on_from_the_checkpoint(
    method: str, default_data: Path, uninterrupted: list[dict], stopped_at_20: Path, tmp_path: Path
) -> None:
    flags = (*MESH, "--context-parallel-method", method, "--load", str(stopped_at_20))
    assert differences(pretrain(4, default_data, tmp_path / "run", *flags), uninterrupted[20:]) <= 1e-5


def test_another_world_size_goes_on_with_the_same_samples(
    default_data: Path, uninterrupted: list[dict], stopped_at_20: Path, tmp_path: Path
) -> None:
    flags = (*MESH, "--context-parallel-size", "1", "--load", str(stopped_at_20))
    assert differences(pretrain(1, default_data, tmp_path / "run", *flags), uninterrupted[20:]) <= 1e-5


@pytest.mark.parametrize(("strategy", "inner"), [("ddp", "context"), ("zero1", "tensor-model")])
def test_another_strategy_and_tensor_parallelism_go_on_from_the_checkpoint(
    strategy: str, inner: str, default_data: Path, uninterrupted: list[dict], stopped_at_20: Path, tmp_path: Path
) -> None:
    flags = (*MESH, "--context-parallel-size", "1", f"--{inner}-parallel-size", "2", "--load", str(stopped_at_20))
    got = pretrain(4, default_data, tmp_path / "run", *flags, "--data-parallel-sharding-strategy", strategy)
    assert differences(got, uninterrupted[20:]) <= 1e-5


def test_metrics_hold_every_iteration_once_after_a_crash(
    default_data: Path, stopped_at_20: Path, tmp_path: Path
) -> None:
    """Iterations that were recorded but not checkpointed, and half a line, are cut away."""
    save = tmp_path / "run"
    shutil.copytree(stopped_at_20, save)
    with (save / METRICS).open("a") as file:
        file.write(json.dumps({"iteration": 21, "lm_loss": 0.0}) + "\n" + '{"iteration": 22, "lm_')
    pretrain(1, default_data, save, "--train-iters", "40", "--exit-interval", "22", "--load", str(save))
    assert [record["iteration"] for record in read_metrics(save / METRICS)] == list(range(1, 23))
    assert read_metrics(save / METRICS)[20]["lm_loss"] > 0


def test_a_finished_run_has_nothing_left_to_do(default_data: Path, tmp_path: Path) -> None:
    flags = ("--train-iters", "3")
    first = pretrain(1, default_data, tmp_path / "run", *flags)
    again = pretrain(1, default_data, tmp_path / "run", *flags, "--load", str(tmp_path / "run"))
    assert again == first
