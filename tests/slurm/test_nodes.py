"""On a real Slurm: nodes that die, and ranks that hang."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from runtime.watchdog import FOLDER
from tests.slurm.cluster import PROGRAMS, boot, kill, missing, virtual_cluster
from tests.slurm.test_virtual import curve, ended, of_step, say, steps_made, submitted
from tests.starts import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.needs(*PROGRAMS, unless=missing)]
WATCHED = ("--watchdog-factor", "20", "--watchdog-min-seconds", "20")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def cluster(folder):
    with virtual_cluster(folder, nodes=3) as environment:
        yield environment


@pytest.fixture
def slurm(cluster):
    """The cluster, with all of its nodes free."""
    wait_until(lambda: say(cluster, "sinfo", "-h", "-p", "gpu", "-o", "%T %D") == "idle 3\n")
    return cluster


def finished_as_undisturbed(slurm, job, save, want):
    """Slurm's record of a job that was queued again once and finished the run."""
    job_fields = ended(slurm, job)
    log_text = Path(f"{save}.log").read_text()
    assert (job_fields["JobState"], job_fields["ExitCode"], job_fields["Restarts"]) == (
        "COMPLETED",
        "0:0",
        "1",
    ), log_text
    assert f"finished: {save}\n" in log_text
    assert curve(save) == want
    return job_fields


def under_way(slurm, save, data, **more):
    """A job that has trained for some steps; its number."""
    job = submitted(slurm, save, data, **more)
    wait_until(lambda: steps_made(save) > 12)
    return job


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "dead", "away"),
    [("ranks", 1, 60), ("torchrun", 2, 60), ("ranks", 2, 10)],
)
def test_a_job_whose_node_dies_goes_on_without_it_or_with_it_if_it_is_back(
    launcher, dead, away, slurm, folder, undisturbed, default_data, tmp_path
):
    save = tmp_path / "run"
    job = under_way(slurm, save, default_data, LAUNCHER=launcher)
    kill(folder, f"node{dead}")
    time.sleep(away)  # Slurm takes a node for dead after 20 s
    boot(folder, f"node{dead}")
    job_fields = finished_as_undisturbed(slurm, job, save, undisturbed)
    assert (
        f"node{dead}" in say(slurm, "scontrol", "show", "hostnames", job_fields["NodeList"])
    ) == (away < 20)


def pid_of(task, job, slurm):
    """The process that srun started as a job's task."""
    for pid in of_step(slurm, job, f"SLURM_PROCID={task}"):
        with suppress(OSError):
            parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
            if "slurmstepd" in Path(f"/proc/{parent}/comm").read_text():
                return pid
    raise AssertionError(f"task {task} of job {job} does not run")


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_job_whose_rank_is_stopped_goes_on_without_its_node(
    stopped, slurm, undisturbed, default_data, tmp_path
):
    save = tmp_path / "run"
    job = under_way(slurm, save, default_data, extra=WATCHED)
    os.kill(pid_of(stopped, job, slurm), signal.SIGSTOP)
    job_fields = finished_as_undisturbed(slurm, job, save, undisturbed)
    assert job_fields["ExcNodeList"] == f"node{stopped + 1}"
    assert (save / FOLDER / "report.txt").read_text().startswith("hung: no step in ")
