"""The table of a look at runs, from folders that a real run wrote."""

import json
import os
import time

import pytest

from checkpoint.manifest import fingerprint
from runtime.files import owned
from tests.starts import PATIENCE
from tools import watch


def write_run(folder, iterations, **more):
    (folder / "iter_0000002").mkdir(parents=True)
    (folder / "config.toml").write_text("[train]\ntrain_iters = 8\n")
    record = {"tokens_per_second": 2000.0, "iteration_time_ms": 30_000.0, "tflops_per_gpu": 0.01, "mfu": 0.1} | more
    lines = [{"iteration": n, "lm_loss": 9.0 - n} | record for n in range(1, iterations + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "starts.jsonl").write_text('{"time": 1.0, "iteration": 0}\n' * 3)
    return folder


def test_a_run_is_shown_with_its_holder_time_left_and_last_checkpoint(tmp_path):
    run = write_run(tmp_path / "run", 6, validation_loss=3.5, memory_gb=1.5, skipped_iterations=2)
    os.utime(run / "iter_0000002", (1000, 1000))
    with owned(run):
        first, progress, loss, rates, skipped, kept = watch.describe(run, 1065.0, 60)
    assert first.startswith(f"{run}   training: process {os.getpid()} on ")
    assert first.endswith("; started 3 times")
    assert progress.endswith("░  75%  iteration 6/8, 1:00 left")
    assert loss == "  loss 3.0000 (validation 3.5000 at 6) █▇▅▄▂▁"
    assert rates == "  2,000 tokens/s, 10 GFLOP/s and 10.0% MFU each, 1.5 GB"
    assert skipped == "  2 iterations skipped, their gradients not finite"
    assert kept == "  last checkpoint: iteration 2, 1:05 ago (1 kept)"
    (run / "failures.jsonl").write_text('{"iteration": 5, "checkpoint": 2, "why": "loss was not finite"}\n')
    stopped, progress, *_, failed, _ = watch.describe(run, 1065.0, 60)
    assert "nobody trains" in stopped
    assert progress.endswith("iteration 6/8, stopped")
    assert failed == "  failed at iteration 5: loss was not finite"


def test_a_local_checkpoint_of_this_machine_is_shown(tmp_path):
    run = write_run(tmp_path / "run", 6)
    with (run / "config.toml").open("a") as config:
        config.write(f'[checkpoint]\nnon_persistent_local_ckpt_dir = "{tmp_path}/node"\n')
    assert watch.describe(run, 0.0, 60)[-1].startswith("  last checkpoint: iteration 2, ")
    local = tmp_path / "node" / str(fingerprint(run)) / "iter_0000005"
    local.mkdir(parents=True)
    os.utime(local, (1000, 1000))
    assert watch.describe(run, 1065.0, 60)[-1] == "  local one here: iteration 5, 1:05 ago (1 kept)"


def test_a_look_reads_what_is_new_and_all_of_a_file_that_was_written_anew(tmp_path):
    run = write_run(tmp_path / "run", 2)
    metrics = run / "metrics.jsonl"
    text = metrics.read_text()

    def seen():
        return [record["iteration"] for record in watch.records_of(metrics)]

    assert seen() == [1, 2]
    metrics.write_text(text.replace("iteration", "ITERATION", 1) + '{"iteration": 3, "lm_loss": 1.0}\n{"iter')
    assert seen() == [1, 2, 3]  # nothing is read twice, nor half a line
    (run / "new").write_text(text.splitlines()[0] + "\n")
    (run / "new").replace(metrics)
    assert seen() == [1]
    metrics.write_text("")
    assert seen() == []
    file = metrics.stat().st_ino
    metrics.write_text(text)
    assert seen() == [1, 2]
    lines = text.splitlines()
    metrics.write_text("\n".join([lines[0].replace("8.0", "8.25"), lines[1], lines[1].replace("2", "3", 1), ""]))
    assert metrics.stat().st_ino == file
    assert seen() == [1, 2, 3]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("failures.jsonl", text) for text in ("[1]\n", "5\n", '{"iteration": [1], "why": 2}\n', None)),
        *(("config.toml", text) for text in ("train = 5", "checkpoint = 5", b"\xff", None)),
        *(("config.toml", f"[train]\ntrain_iters = {text}") for text in ("0", '"x"', "inf", "9" * 40, "true")),
        ("config.toml", "[checkpoint]\nnon_persistent_local_ckpt_dir = 5"),
        ("starts.jsonl", None),
        *(
            ("metrics.jsonl", text)
            for text in (
                None,
                "?\n",
                "[1]\n",
                "[" * 100_000 + "\n",
                '{"iteration": 1e400}\n',
                '{"iteration": 1, "lm_loss": 1e200}\n',
            )
        ),
    ],
)
def test_a_file_that_no_run_writes_is_a_line(name, content, tmp_path, capsys):
    bad, good = write_run(tmp_path / "bad", 2), write_run(tmp_path / "good", 3)
    (bad / name).unlink(missing_ok=True)
    if content is None:
        os.mkfifo(bad / name)  # nobody writes: reading it would never end
    else:
        (bad / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert watch.main([str(bad), str(good), "--once"]) == 0
    first, *others = capsys.readouterr().out.split("\n")
    assert first.startswith(f"{bad}   error: {bad / name}"), first
    assert f"{good}   nobody trains; started 3 times" in others


def test_records_without_times_are_shown(tmp_path):
    run = write_run(tmp_path / "run", 2)
    (run / "metrics.jsonl").write_text('{"iteration": 1, "lm_loss": 2.0}\n')
    assert watch.describe(run, 0.0, 60)[1].endswith("iteration 1/8, stopped")


def test_a_killed_holder_is_nobody(tmp_path):
    run = write_run(tmp_path / "run", 8)
    with owned(run):
        text = (run / ".lock").read_text()
    (run / ".lock").write_text(text)
    os.utime(run / ".lock", (time.time() - PATIENCE, time.time() - PATIENCE))
    shown = watch.screen([run], False, 80)
    assert "nobody trains" in shown
    assert "iteration 8/8, done" in shown


def test_a_curve_has_the_means_of_its_shares():
    assert watch.sparkline([0, 0, 7, 7, 3, 4], 3) == "▁█▅"
    assert watch.sparkline([2.0], 9) == "▁"
    assert watch.sparkline([], 9) == ""


def test_folders_without_a_run(tmp_path, capsys, monkeypatch):
    run, data = tmp_path / "run", tmp_path / "data"
    run.mkdir()
    data.mkdir()
    (run / "config.toml").touch()
    assert watch.main([str(run), "--once"]) == 0
    assert watch.main([str(run), str(data), "--once"]) == 1, "a folder that was named is no run's"
    shown = f"{run}   nobody trains\n  no iteration yet\n"
    assert capsys.readouterr().out == f"{shown}{shown}\nno runs, as they have no config.toml: {data}\n"
    assert watch.main([str(tmp_path / "no"), "--once"]) == 1, "a run that was named is not there"
    assert "is not there yet" in capsys.readouterr().out
    assert watch.main(["--once"]) == 1
    assert "no RUN is named" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    assert watch.main(["--slurm", "--once"]) == 1
    assert "squeue was not found" in capsys.readouterr().err


def test_a_job_belongs_to_the_run_that_keeps_its_logs(tmp_path, monkeypatch):
    here, far = tmp_path / "here", tmp_path / "scratch/deep/below/x"
    for made in (here / "runs/x/logs/17", far / "logs/18", far / "2/logs/19"):
        made.mkdir(parents=True)
    (tmp_path / "squeue").write_text(
        "#!/bin/sh\n"
        + "".join(
            f"printf '{job}\\t{job}_0\\tx\\tRUNNING\\tnode1\\t{here}\\t{comment}\\n'\n"
            for job, comment in ((17, "(null)"), (18, far), (19, far), (20, far), (17, "runs/x"), (17, "for May"))
        )
    )
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    lines, runs = zip(*watch.queue(), strict=True)
    assert lines[0] == "job 17_0 (x): running node1", "an array's job as squeue writes it"
    assert runs == (here / "runs/x", far, far / "2", None, here / "runs/x", here / "runs/x")


def test_what_squeue_says_stays_a_line_and_prints(tmp_path, monkeypatch):
    job = "17\\t17\\ta\\033[2J\\tRUNNING\\tnode1\\t/x\\t$(touch FOUND)"
    (tmp_path / "squeue").write_text(f"#!/bin/sh\nprintf '{job}\\n18\\ttwo\\nlines\\n'\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    shown = watch.screen([], True, 80)
    assert shown.split("\n\n") == [
        "job 17 (a?[2J): running node1",
        "no job as squeue writes it: 18?two",
        "no job as squeue writes it: lines",
    ]
