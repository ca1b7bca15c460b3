"""Secrets in the environment are in no file of a run, and in nothing that it says."""

import os
import signal
from importlib.util import find_spec

import pytest

from runtime.watchdog import FOLDER
from tests.slurm.test_submit import RUN, printed
from tests.starts import PATIENCE, wait_until
from tests.test_ending import LONG, flags, ranks_of, torchrun
from train.watching.metrics import METRICS

CANARY = "canary-of-longmesh"
SECRETS = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "SLURM_JWT", "DATABASE_PASSWORD")


def leaks(folder):
    """The files with the canary in them, or in their names."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return [str(path) for path in found if CANARY in str(path) or CANARY.encode() in path.read_bytes()]


@pytest.mark.slow
def test_no_secret_of_the_environment_is_in_a_run_that_hangs(default_data, tmp_path, monkeypatch):
    """All that writes is on: services, profile, asynchronous saves, both tiers, and the stacks of a stopped rank."""
    for number, name in enumerate(SECRETS):
        monkeypatch.setenv(name, f"{number:040d}{CANARY}")
    monkeypatch.setenv("WANDB_MODE", "offline")
    save = tmp_path / "run"
    given = [*flags(default_data, save), *LONG, "--watchdog-factor", "20", "--watchdog-min-seconds", "10"]
    given += ["--async-save", "--profile", "--profile-step-start", "2", "--profile-step-end", "4"]
    given += ["--non-persistent-save-interval", "3", "--non-persistent-local-ckpt-dir", str(tmp_path / "local")]
    if find_spec("wandb") is not None:
        given += ["--wandb-project", "longmesh", "--tensorboard-dir", str(tmp_path / "tensorboard")]
    process = torchrun(*given)
    wait_until(lambda: (save / METRICS).exists() and len((save / METRICS).read_text().splitlines()) > 8)
    os.kill(ranks_of(process.pid)[1], signal.SIGSTOP)
    said = process.communicate(timeout=PATIENCE)[0]
    assert "hung: " in said
    assert CANARY not in said
    written = {path.name for path in tmp_path.rglob("*")}
    assert {METRICS, "config.toml", "rank-1.txt", "starts.jsonl"} <= written
    assert (save / FOLDER).is_dir()
    assert leaks(tmp_path) == []
    (tmp_path / "control").write_text(os.environ["HF_TOKEN"])
    assert leaks(tmp_path) == [str(tmp_path / "control")]


def test_no_secret_of_the_environment_is_in_a_jobs_script(monkeypatch, capsys):
    for name in SECRETS:
        monkeypatch.setenv(name, CANARY)
    assert "#SBATCH" in (said := printed(capsys, "--nodes", "1", *RUN))
    assert CANARY not in said
