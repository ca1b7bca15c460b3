"""Rows as Slurm jobs: scripts, what does not fit, what is there already, and runs' folders read as measured."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from papers import jobs, lasp, ring, rows, striped, wallfacer
from planner.cluster import CLUSTERS
from runtime.machine import commit_of
from tests.pretraining import pretrain
from tests.slurm.cluster import PROGRAMS, missing, virtual_cluster
from tests.slurm.test_environment import python_with
from tests.starts import wait_until

A100, NODES_OF_16 = (str(CLUSTERS / f"{name}.toml") for name in ("a100_pod", "wallfacer_a100_16"))
ROW = "a100-80gb-x8-1b-1-x-2-8192"
STRIPED = striped, "speedups", "7b-2-x-4-32768", A100
RING = ring, "max_context", "32x-a100-infiniband-13b-32", A100


@pytest.mark.parametrize(
    ("paper", "table", "row", "cluster", "words"),
    [
        pytest.param(*STRIPED, ["gres=gpu:a100:8", "nodes=1", "tensor-model-parallel-size 2"], marks=pytest.mark.slow),
        pytest.param(*RING, ["nodes=4", "1) sweep=(--seq-length 2097152)", "no-bf16"], marks=pytest.mark.slow),
        (wallfacer, "gains", "16-x-2-gpt-3b-32-gpus-512", NODES_OF_16, ["gres=gpu:a100:16", "nodes=2", "4) sweep="]),
        (lasp, "scalability", "fsdp-64-131072", A100, ["nodes=8", "--seq-length 131072", "sharding-strategy fsdp"]),
    ],
)
def test_a_row_of_each_paper_is_a_job(paper, table, row, cluster, words, tmp_path, capsys):
    given = ["--table", table, "--row", row, "--submit", cluster, "--dry-run", "--runs", str(tmp_path)]
    assert paper.main(given) == 0
    name, _, text = capsys.readouterr().out.partition(": ")
    assert name.endswith(row)
    for word in words:
        assert word in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    assert [*tmp_path.iterdir()] == []


def test_what_does_not_fit_is_said_in_a_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rows, "check_login_node", lambda: None)
    monkeypatch.setenv("PYTHON", python_with(tmp_path / "gpus", "2.13.0+cu130", "13.0"))

    def said(*given):
        assert wallfacer.main(["--table", "gains", "--dry-run", "--runs", str(tmp_path), *given]) == 0
        return capsys.readouterr().out.splitlines()

    (line,) = said("--submit", A100, "--row", "a100-8-x-4-gpt-3b-32-gpus-128")
    assert line.endswith(f"it needs 32 A100 of 40 GB, 8 in a node; {A100} has a100 of 82 GB")
    (line,) = said("--submit", str(CLUSTERS / "wallfacer_a100_8.toml"), "--row", "a100-16-x-2-gpt-3b-32-gpus-128")
    assert line.endswith("wallfacer_a100_8.toml has 8 in a node")
    assert striped.main(["--submit", A100, "--row", "tpuv3-x8-3b-4-x-2-16384"]) == 0
    assert "not submitted: no job measures it (TPUv3 x8)" in capsys.readouterr().out
    assert striped.main(["--submit", A100, "--row", "9b"]) == 1
    assert capsys.readouterr().err == "error: --row is 9b, and no row of speedups has it in its name\n"
    assert ring.main(["--table", "flops", "--submit", A100]) == 0
    assert capsys.readouterr().out == "flops: no row has a job: it needs no run: operations are counted\n"


def test_a_row_is_submitted_once_and_nothing_is_overwritten(tmp_path, monkeypatch, capsys):
    scripts = []
    monkeypatch.setattr(jobs, "write_data", lambda job, data: None)
    monkeypatch.setattr(jobs, "submit", lambda text: scripts.append(text) or "Submitted batch job 7")
    monkeypatch.setattr(rows, "check_login_node", lambda: None)
    monkeypatch.setenv("PYTHON", python_with(tmp_path / "gpus", "2.13.0+cu130", "13.0"))
    given = ["--submit", A100, "--row", f"{ROW}", "--runs", str(tmp_path)]
    folder = tmp_path / "striped" / "speedups" / ROW
    for words in ("Submitted batch job 7", "it was before (Submitted batch job 7) and has no result yet"):
        assert striped.main(given) == 0
        assert words in capsys.readouterr().out
    assert len(scripts) == 1
    (folder / "job").rename(folder / "mine")
    assert striped.main(given) == 0
    assert f"{folder} is there and no job of this program made it" in capsys.readouterr().out
    assert [path.name for path in folder.iterdir()] == ["mine"]
    assert len(scripts) == 1


def test_without_slurm_nothing_is_predicted_first(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(rows, "_submit", lambda *_: pytest.fail("it began"))
    assert striped.main(["--submit", A100]) == 1
    assert "there is no sbatch here; start on a login node" in capsys.readouterr().err


@pytest.mark.parametrize(("last", "stays"), [(12, True), (12, False), (8, True)])
def test_the_job_removes_checkpoints_of_a_finished_run_alone(tmp_path, last, stays):
    row = next(row for row in lasp.scalability() if row.job)
    assert row.job
    text = jobs.script_of(row.job, tmp_path / "a" / "b" / "c", tmp_path / "data", A100)
    run = tmp_path / "a" / "b" / "c"
    checkpoint = run / f"iter_{last:07}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    (run / "kept").touch()
    (run / "config.toml").write_text("train_iters = 12\n")
    (run / "latest_checkpointed_iteration.txt").write_text(str(last))
    notes = text[text.index("measured=") : text.rindex("\ntrain ")]
    if last == 12 and stays:
        notes = notes.replace("trap", ": trap", 1)  # the control: without it the checkpoint stays
    command = ["bash", "-c", f"source slurm/job.sh\n{notes}\nexit 3"]
    assert subprocess.run(command, cwd=Path(jobs.__file__).parents[1], check=False).returncode == 3
    assert checkpoint.exists() == stays
    assert (run / "kept").exists()
    assert (run / "commit").read_text().split()[0] == commit_of().split()[0]


def test_lengths_that_ran_and_runs_that_were_out_of_memory(tmp_path):
    row = next(row for row in lasp.ablation() if row.of["method"] == "FSDP+LASP")
    assert row.job
    for n, folder in enumerate(row.job.runs(tmp_path).values()):
        (folder / "logs" / "7").mkdir(parents=True)
        lines = [{"iteration": i, "lm_loss": 1.0, "tokens_per_second": 100.0 * i, "memory_gb": 9.0} for i in (1, 2)]
        if n < 2:
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert jobs.measured(row.job, tmp_path) is None
    (tmp_path / "2" / "logs" / "7" / "task-0.log").write_text("torch.OutOfMemoryError: CUDA out of memory. Tried\n")
    found = jobs.measured(row.job, tmp_path)
    assert found
    assert (found["ktokens"], found["tokens_per_s"]) == (120, 200.0)
    assert str(found["on"]).startswith(
        "unknown device, unknown date, commit unknown, ANOTHER DEVICE than A100 of 80 GB"
    )


@pytest.mark.slow
def test_runs_of_the_real_entry_are_a_measured_row(default_data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rows, "check_login_node", lambda: None)
    monkeypatch.setenv("PYTHON", python_with(tmp_path / "gpus", "2.13.0+cu130", "13.0"))
    folder = tmp_path / "striped" / "speedups" / ROW

    def shown():
        assert striped.main(["--json", "--runs", str(tmp_path)]) == 0
        data = json.loads(capsys.readouterr().out)
        return next(row for row in data if row["of"]["seq_len"] == 8192 and row["of"]["mesh"] == "1B 1 x 2")

    for n, method in enumerate(("ring", "striped")):
        assert shown()["measured"] is None
        flags = ["--train-iters", "12", "--context-parallel-method", method, "--context-parallel-size", "2"]
        pretrain(2, default_data, folder / str(n), *flags)
        capsys.readouterr()
        (folder / str(n) / "commit").write_text("0" * 40 + "\n")
    found = shown()["measured"]
    assert found["speedup"] == pytest.approx(found["striped_tokens_per_s"] / found["ring_tokens_per_s"], rel=1e-3)
    for words in ("cpu, 20", "commit 000", "ANOTHER DEVICE than A100 of 80 GB", "ANOTHER COMMIT"):
        assert words in found["on"]
    assert striped.main(["--submit", A100, "--row", ROW, "--runs", str(tmp_path)]) == 0
    assert "not submitted: measured already on cpu" in capsys.readouterr().out


@pytest.mark.slow
def test_what_runs_read_is_as_long_as_the_longest(tmp_path):
    row = next(row for row in lasp.scalability() if row.job)
    assert row.job
    jobs.write_data(row.job, tmp_path)
    assert jobs.open_indexed(tmp_path / "long").tokens >= jobs.TOKENS > 2 * 4096 * 1024


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.needs(*PROGRAMS, unless=missing)
def test_a_row_on_a_virtual_cluster_is_measured_once_its_job_has_ended(default_data, tmp_path, monkeypatch):
    """Two of a node's GPUs, which are only names: an array of two runs, by Slurm's own controller."""
    tiny = "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 64 --global-batch-size 2"
    job = jobs.Job(
        gpu="a100",
        memory_gb=80,
        gpus=2,
        config="llama_tiny",
        flags=f"{tiny} --device cpu --context-parallel-size 2 --micro-batch-size 1 --save-interval 6 "
        "--lr-warmup-iters 1",
        cases={name: f"--context-parallel-method {name}" for name in ("ring", "striped")},
        figures=lambda runs: {name: run.tokens_per_s for name, run in runs.items()},
    )
    row, data = tmp_path / "runs" / "paper" / "table" / "row", tmp_path / "runs" / "data"
    data.mkdir(parents=True)
    for end in ("bin", "idx"):
        shutil.copy(f"{default_data}.{end}", data / f"long.{end}")
    shutil.copy(f"{default_data}.model", data / "text.model")
    monkeypatch.setattr(jobs, "write_data", lambda job, data: None)
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(Path(A100).read_text() + "cpus_per_gpu = 1\n")
    with virtual_cluster(tmp_path / "slurm", nodes=1) as environment:
        monkeypatch.setenv("SLURM_CONF", environment["SLURM_CONF"])
        monkeypatch.setenv("PYTHON", sys.executable)
        monkeypatch.setenv("SBATCH_OUTPUT", str(tmp_path / "%A_%a.log"))
        said = jobs.submit_row(job, row, str(cluster), dry_run=False)
        assert said.startswith("Submitted batch job ")
        wait_until(lambda: not subprocess.run(["squeue", "-h"], capture_output=True, text=True, check=True).stdout)
    found = jobs.measured(job, row)
    logs = "\n".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert found, logs
    assert str(found["on"]).startswith("cpu, 20")
    assert commit_of().split()[0] in str(found["on"])
    assert [*row.glob("*/iter_*")] == [], logs
    assert "measured already" in jobs.submit_row(job, row, str(cluster), dry_run=False)
