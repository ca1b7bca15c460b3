"""A run's folder, what it resumes from, and who speaks when it fails."""

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr

import pytest

from runtime.errors import AbsentError, LaunchError, UserError
from runtime.locks import EndingError, InUseError
from runtime.ranks import run_ranks
from runtime.slurm import AGAIN, ENDINGS
from tests.runtime.test_files import another_process
from tests.starts import PATIENCE, ROOT, free_port
from train.callbacks.health import RunProgress
from train.callbacks.metrics import METRICS
from train.checkpoint.api import CheckpointConfig
from train.checkpoint.manifest import STARTS, CheckpointError
from train.checkpoint.search import find_checkpoint
from train.config.entries import Config
from train.config.finalize import config_to_save
from train.config.flags import ConfigError, write_toml
from train.config.language import load_config
from train.run import claim_folder, exit_status, open_log, reserve_run_folder


def fail_with(error):
    def main(arguments):
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "left", "line"),
    [
        (LaunchError("RANK is odd"), 1, "RANK is odd"),
        (AbsentError("nobody came"), AGAIN, "nobody came"),
        (EndingError("in use"), AGAIN, "in use"),
        (ConfigError("lr is x\ny"), 1, "lr is x\\ny"),
        (OSError(28, "No space", "f"), 1, "f: No space; free space there"),
        (
            PermissionError(13, "No access", "f"),
            1,
            "f: No access; check that it exists and that you have permission to use it",
        ),
    ],
)
def test_what_a_user_can_cause_is_one_line_and_the_end_that_a_rank_leaves_to_its_job(
    error, left, line, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv(ENDINGS, str(tmp_path / "endings"))
    monkeypatch.setenv("SLURM_PROCID", "3")
    assert exit_status(lambda arguments: arguments.append("seen"), arguments_seen := []) == 0
    assert (arguments_seen, capsys.readouterr(), [*tmp_path.iterdir()]) == (
        ["seen"],
        ("", ""),
        [],
    ), "success is silent"
    assert exit_status(fail_with(error), []) == 1
    assert capsys.readouterr() == ("", f"error: {line}\n")
    assert (tmp_path / "endings" / "rank-3").read_text() == f"{left} error: {line}\n"


def with_checkpoint(**settings):
    return Config(checkpoint=CheckpointConfig(**settings))


def holding(folder, *names):
    """A folder with empty entries: checkpoints, or files where the name has an ending."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch() if "." in name else path.mkdir()
    return str(folder)


@pytest.mark.parametrize(
    "names", [("notes.txt", "config.toml"), ("iter_0000002.tmp", "iter_0000002.broken-1", "iter_x")]
)
def test_a_folder_without_a_run_is_taken(names, tmp_path):
    claim_folder(with_checkpoint(save=holding(tmp_path / "run", *names)))
    claim_folder(with_checkpoint(save=str(tmp_path / "new" / "and" / "deep")))
    claim_folder(with_checkpoint())
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted([*names, "run"])


@pytest.mark.parametrize(
    ("names", "contents"),
    [
        (("iter_0000002", "iter_0000010"), "a run with a checkpoint of iteration 10"),
        ((METRICS,), "a run without a checkpoint"),
    ],
)
def test_another_run_is_not_written_over_and_the_same_goes_on(
    names, contents, tmp_path, monkeypatch
):
    save = holding(tmp_path / "run", *names)
    (tmp_path / "link").symlink_to("run")
    monkeypatch.chdir(tmp_path)
    for load in (None, str(tmp_path / "other")):
        with pytest.raises(
            ConfigError,
            match=f"save is {save}, but it holds {contents}; continue it with --load {save}, or",
        ):
            claim_folder(with_checkpoint(save=save, load=load))
    with pytest.raises(
        ConfigError,
        match="; move it away, or" if "without" in contents else " and without --finetune, or",
    ):
        claim_folder(with_checkpoint(save=save, load=save, finetune=True))
    for load in (save, "run/", "link", str(tmp_path / "link" / ".." / "run")):
        claim_folder(with_checkpoint(save="run", load=load))


def test_a_run_killed_before_its_first_checkpoint_begins_again_and_another_configuration_does_not(
    tmp_path,
):
    config = with_checkpoint(save=holding(tmp_path / "run", METRICS))
    (tmp_path / "run" / "config.toml").write_text(write_toml(config))
    claim_folder(config)
    for other in ({"lr": 2e-4}, {"seed": 7}):
        with pytest.raises(
            ConfigError,
            match=r"run, but it holds a run without a checkpoint; continue it with --load .*, or",
        ):
            claim_folder(config.updated(**other))


def test_checkpoints_after_the_one_asked_for_are_not_met(tmp_path):
    save = holding(tmp_path / "run", "iter_0000002", "iter_0000004")
    claim_folder(with_checkpoint(save=save, load=save, ckpt_step=4))
    claim_folder(with_checkpoint(save=str(tmp_path / "new"), load=save, ckpt_step=2))
    with pytest.raises(
        ConfigError, match=r"ckpt_step is 2, but .* iteration 4, .* choose another --save"
    ):
        claim_folder(with_checkpoint(save=save, load=save, ckpt_step=2))


@pytest.mark.parametrize(
    ("save", "message"),
    [
        ("file", "{0}/file is a file; give a folder"),
        ("file/run", "{0}/file is a file; give a folder"),
        ("nowhere", "{0}/nowhere is a symlink that leads nowhere; give a folder"),
        ("/proc/run", "which cannot be written to .*another --save"),
    ],
)
def test_what_can_be_no_folder_is_refused_before_any_work(save, message, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "nowhere").symlink_to("gone")
    folder = tmp_path / save
    with pytest.raises(ConfigError, match=f"save is {folder}, .*{message.format(tmp_path)}"):
        claim_folder(with_checkpoint(save=str(folder)))
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(CheckpointError, match="nowhere is a symlink that leads nowhere"):
        find_checkpoint(str(tmp_path / "nowhere"))


def test_the_folder_tells_what_ran_and_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "s3cret")
    config = with_checkpoint(save=str(tmp_path / "run"), save_interval=5)
    log = open_log(config, config, RunProgress())
    assert log is not None
    assert load_config(tmp_path / "run" / "config.toml") == config
    assert all(b"s3cret" not in path.read_bytes() for path in (tmp_path / "run").iterdir())
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "config.toml",
        METRICS,
        STARTS,
    ]


@pytest.mark.parametrize("evaluated", [True, False])
def test_a_start_with_nothing_left_to_do_writes_nothing(evaluated, tmp_path):
    ended, new = (
        with_checkpoint(save=str(tmp_path / "ended")),
        with_checkpoint(save=str(tmp_path / "new")),
    )
    last = ended.train.train_iters
    record = {"iteration": last, "lm_loss": 1.0} | ({"validation_loss": 1.0} if evaluated else {})
    (tmp_path / "ended").mkdir()
    (tmp_path / "ended" / METRICS).write_text(json.dumps(record) + "\n")
    for config in (ended, new):
        assert open_log(config, config, RunProgress(iteration=last)) is not None
    names = (
        [METRICS] if evaluated else [METRICS, STARTS]
    )  # a validation that the last start was ended in
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.jsonl")) == [
        f"ended/{name}" for name in names
    ]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "flag", ["override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"]
)
def test_the_folder_keeps_no_flag_that_is_for_one_start(flag, tmp_path):
    config = with_checkpoint(save=str(tmp_path))
    assert (
        open_log(config, config_to_save(config.updated(**{flag: True}), config, 1), RunProgress())
        is not None
    )
    assert load_config(tmp_path / "config.toml") == config


@pytest.mark.parametrize(
    "error", [KeyError("x"), ValueError("x"), RuntimeError("x"), OSError("a socket's")]
)
def test_a_defect_keeps_its_traceback(error, capsys):
    with pytest.raises(type(error)) as caught:
        exit_status(fail_with(error), [])
    assert caught.value is error
    assert capsys.readouterr().err == ""


def voices(rank, world_size, failing, seconds):
    if rank not in failing:
        return None
    errors = io.StringIO()
    with redirect_stderr(errors):
        assert exit_status(fail_with(ConfigError(f"rank {rank}")), [], seconds) == 1
    return errors.getvalue()


@pytest.mark.parametrize("failing", [(0, 1, 2), (2,), (1, 2)])
def test_one_of_the_ranks_that_fail_speaks(failing):
    """If all are there, none waits: it would for longer than ``run_ranks`` does."""
    seconds = 2 * PATIENCE if len(failing) == 3 else 0.5
    ends = [end for end in run_ranks(voices, 3, failing, seconds) if end is not None]
    assert len(ends) == len(failing)
    assert (
        sum(message.startswith("error: rank ") and message.count("\n") == 1 for message in ends)
        == 1
    )
    assert sum(message == "" for message in ends) == len(failing) - 1


BEFORE_JOINING = """
from tests.starts import PATIENCE, ROOT, free_port
from train import run
from train.config.flags import ConfigError

def main(arguments):
    raise ConfigError("lr is -1")

raise SystemExit(run.exit_status(main, [], 300))
"""


@pytest.mark.slow
def test_before_they_join_the_ranks_meet_at_the_launchers_address():
    """As srun starts them: no agent holds a store, so the first rank does."""
    place = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-c", BEFORE_JOINING],
            cwd=ROOT, env={**place, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        errors = [process.communicate(timeout=PATIENCE)[1] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [1, 1]
    assert [line for text in errors for line in text.splitlines() if line.startswith("error:")] == [
        "error: lr is -1"
    ]


def test_one_run_at_a_time_has_a_folder(tmp_path):
    config = with_checkpoint(save=str(tmp_path / "run"))
    with another_process(tmp_path / "run") as child:
        message = rf"save is .*run is in use by process {child} .* another --save"
        with pytest.raises(InUseError, match=message), reserve_run_folder(config):
            pytest.fail("two runs")
    with reserve_run_folder(config):
        assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


def test_a_run_removes_what_a_killed_one_left_of_its_saves(tmp_path):
    (tmp_path / "iter_0000005.tmp").mkdir()
    (tmp_path / "iter_0000005.tmp" / "__0_0.distcp").write_bytes(b"half")
    with reserve_run_folder(with_checkpoint(save=str(tmp_path))):
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_an_optimizer_whose_kernel_is_not_here_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "amp_C", None)
    config = with_checkpoint(save=str(tmp_path / "run")).updated(optimizer_backend="apex")
    with (
        pytest.raises(
            UserError, match=r"^optimizer_backend is apex, but NVIDIA's apex .* cannot be imported"
        ),
        reserve_run_folder(config),
    ):
        pytest.fail("work began")
    assert not (tmp_path / "run").exists()
