"""On a real Slurm of virtual nodes.

The scripts as they are, and a run that goes on by itself whatever ends it.
"""

import os
import re
import signal
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from slurm import submit
from tests import starts
from tests.endings import end
from tests.pretraining import TINY
from tests.slurm.cluster import PROGRAMS, missing, virtual_cluster
from tests.slurm.test_submit import CLUSTERS, RUN
from tests.starts import wait_until
from train.callbacks.metrics import METRICS, read_metrics
from train.checkpoint.manifest import STARTS

pytestmark = [pytest.mark.slurm, pytest.mark.needs(*PROGRAMS, unless=missing)]
EXACT = ("iteration", "lm_loss", "grad_norm", "consumed_samples")
LAST = 40


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with virtual_cluster(
        tmp_path_factory.mktemp("cluster"), nodes=4, kinds=("a100", "h100")
    ) as environment:
        yield environment


def say(slurm, *command, **more):
    done = starts.ended(command, inherited=slurm, **more)
    return done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["a100", "h100"])
def test_the_scripts_are_accepted_as_they_are(kind, slurm):
    output = say(
        slurm,
        "sbatch",
        "--test-only",
        "--nodes",
        "2",
        f"slurm/{kind}.sbatch",
        "runs/x",
        "pretrain_gpt.py",
    )
    assert re.search(r"Job \d+ to start at .* using 256 processors on nodes node", output), output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--nodes 4", "Requested node configuration is not available; sinfo -N -o "),
        (
            "--nodes 1 --partition none",
            "invalid partition specified: none .*; sinfo -s lists the partitions",
        ),
        (
            "--nodes 1 --time 30-0",
            "Requested time limit is invalid .*; sinfo -o '%P %l' lists the limits",
        ),
        (
            "--nodes 1 --option=--nodelist=node9",
            "Invalid node name specified; sinfo -N lists the names",
        ),
    ],
)
def test_what_slurm_refuses_is_told_in_its_words_and_with_a_hint(
    options, words, slurm, monkeypatch
):
    monkeypatch.setenv("SLURM_CONF", slurm["SLURM_CONF"])
    ending = end(
        submit.main,
        ["--cluster", str(CLUSTERS / "h100_pod.toml"), *options.split(), *RUN, "--device", "cpu"],
    )
    assert ending.status == 1
    assert re.search(f"^error: sbatch refused the job: .*{words}", ending.stderr), ending.stderr


def flags(data):
    return [
        *TINY,
        "--data-path",
        str(data),
        "--tokenizer-model",
        f"{data}.model",
        "--train-iters",
        str(LAST),
    ]


def curve(save):
    return [[record[name] for name in EXACT] for record in read_metrics(save / METRICS)]


def submitted(slurm, save, data, *options, extra=(), **more):
    """Two nodes of one rank each, by gloo, on GPUs that are only names; the job's number."""
    script = [
        "--nodes",
        "2",
        "--ntasks-per-node=1",
        "--cpus-per-task=1",
        "--output",
        f"{save}.log",
        "--parsable",
    ]
    command = [str(save), "pretrain_gpt.py", *flags(data), "--save-interval", "10", *extra]
    return say(
        slurm,
        "sbatch",
        *script,
        *options,
        "slurm/a100.sbatch",
        *command,
        PYTHON=sys.executable,
        **more,
    ).strip()


def ended(slurm, job):
    """The job's last words: what scontrol knows of it, once it is over."""
    job_fields = {}

    def over():
        job_fields.update(re.findall(r"(\w+)=(\S+)", say(slurm, "scontrol", "show", "job", job)))
        return job_fields["JobState"] in (
            "COMPLETED",
            "FAILED",
            "CANCELLED",
            "TIMEOUT",
            "NODE_FAIL",
        )

    wait_until(over)
    return job_fields


def preempt(slurm, folder):
    """Another job has precedence for a second; its log is in the folder, not in the checkout."""
    where = [
        "--partition=urgent",
        "--exclusive",
        "--nodelist=node[1-2]",
        "--output",
        f"{folder}/urgent.log",
    ]
    say(slurm, "sbatch", *where, "--wrap", "sleep 1")


def of_step(slurm, job, *more):
    """The processes of a job's step, launchers and ranks, with ``more`` in their environment."""
    its, pids = (
        {f"SLURM_CONF={slurm['SLURM_CONF']}", f"SLURM_JOB_ID={job}", "SLURM_STEP_ID=0", *more},
        [],
    )
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if its <= set((process / "environ").read_text().split("\0")):
                pids.append(int(process.name))
    return pids


def told(pid):
    """True if SIGUSR1 waits for a stopped process."""
    try:
        pending = re.search(r"^ShdPnd:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.M)
    except FileNotFoundError:  # a short one of the launcher's
        return False
    return bool(pending and int(pending[1], 16) & 1 << (signal.SIGUSR1 - 1))


@contextmanager
def paused(pids):
    """Stop these processes until the block ends."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def steps_made(save):
    return (save / METRICS).read_bytes().count(b"\n") if (save / METRICS).exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["ranks", "torchrun"])
@pytest.mark.parametrize("how", ["requeue", "signal", "preemption", "time"])
def test_a_job_that_is_ended_goes_on_by_itself_to_the_undisturbed_curve(
    how, launcher, slurm, undisturbed, default_data, tmp_path
):
    save = tmp_path / "run"
    limited = ("--time=1", "--signal=B:USR1@40") if how == "time" else ()
    job = submitted(slurm, save, default_data, *limited, LAUNCHER=launcher)
    wait_until(lambda: steps_made(save) > 3)
    if how == "requeue":
        say(slurm, "scontrol", "requeue", job)
    elif how == "signal":
        say(slurm, "scancel", "--signal=USR1", "--batch", job)
    elif how == "preemption":
        preempt(slurm, tmp_path)
    else:  # on an idle machine the run would be over before its time
        with paused(stopped := of_step(slurm, job)):
            wait_until(lambda: any(map(told, stopped)))
    job_fields = ended(slurm, job)
    log_text = Path(f"{save}.log").read_text()
    assert (job_fields["JobState"], job_fields["ExitCode"]) == ("COMPLETED", "0:0"), log_text
    assert job_fields["Restarts"] == "1" or how == "time", log_text
    assert curve(save) == undisturbed
    assert f"finished: {save}\n" in log_text
    if how != "requeue":
        assert log_text.count("queued again") == int(job_fields["Restarts"]), log_text
        assert "ended early after iteration" in log_text


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["ranks", "torchrun"])
def test_an_error_is_told_and_ends_the_job_with_its_status(launcher, slurm, default_data, tmp_path):
    job = submitted(slurm, tmp_path / "run", Path("/none"), LAUNCHER=launcher)
    job_fields = ended(slurm, job)
    assert (job_fields["JobState"], job_fields["ExitCode"], job_fields["Restarts"]) == (
        "FAILED",
        "1:0",
        "0",
    )
    assert "error: " in (tmp_path / "run.log").read_text()


def test_an_allocation_that_is_not_the_clusters_is_refused(slurm, tmp_path):
    job = submitted(slurm, tmp_path / "run", Path("/none"), GPUS_PER_NODE="16")
    assert ended(slurm, job)["ExitCode"] == "1:0"
    log_text = (tmp_path / "run.log").read_text()
    assert (
        "error: GPUS_PER_NODE is 16, but this allocation has 8 GPUs on node1; give --gres and "
        "the cluster's"
    ) in log_text
    assert os.listdir(tmp_path / "run" / "logs" / job) == []


@pytest.mark.slow
def test_a_job_that_is_cancelled_stays_so(slurm, default_data, tmp_path):
    job = submitted(slurm, tmp_path / "run", default_data)
    wait_until(lambda: steps_made(tmp_path / "run") > 3)
    say(slurm, "scancel", job)
    assert ended(slurm, job)["Restarts"] == "0"
    time.sleep(8)
    assert ended(slurm, job)["JobState"] == "CANCELLED"
    assert len((tmp_path / "run" / STARTS).read_text().splitlines()) == 1
