"""The variables of srun become those of torchrun."""

import pytest

from runtime.errors import LaunchError
from runtime.slurm import hosts, launched_by_srun, tasks_per_node

STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NUM_TASKS": "20",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2),4",
    "SLURM_STEP_NODELIST": "gpu[007-008],login",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "11",
    "SLURM_LOCALID": "3",
}


def test_a_task_of_srun_gets_torchruns_variables():
    assert launched_by_srun(STEP) == {
        "RANK": "11",
        "WORLD_SIZE": "20",
        "LOCAL_RANK": "3",
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "gpu007",
        "MASTER_PORT": str(20_000 + 77 * 101 + 1),
    }
    last = launched_by_srun(
        {**STEP, "SLURM_NODEID": "2", "SLURM_PROCID": "19", "MASTER_ADDR": "10.0.0.1"}
    )
    assert (last["LOCAL_WORLD_SIZE"], last["MASTER_ADDR"]) == ("4", "10.0.0.1")
    other_step = launched_by_srun({**STEP, "SLURM_STEP_ID": "2"})
    assert other_step["MASTER_PORT"] != last["MASTER_PORT"], "two steps of a job do not meet"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # a batch script
        {**STEP, "SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash
        {**STEP, "RANK": "3", "WORLD_SIZE": "32", "GROUP_WORLD_SIZE": "20"},  # srun torchrun
        {**STEP, "RANK": "11", "WORLD_SIZE": "20"},  # a wrapper's own
    ],
)
def test_what_is_no_task_of_several_or_has_a_rank_is_left_alone(environ):
    assert launched_by_srun(environ) == {}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK is 0 in the environment, but srun set it to 3"),
        (
            {"RANK": "0", "WORLD_SIZE": "1"},
            "WORLD_SIZE is 1 in the environment, but srun started 20 tasks",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "1"},
            "each is a torchrun .* --ntasks-per-node 1",
        ),
        ({"SLURM_LOCALID": "8"}, "SLURM_LOCALID 8 and SLURM_NODEID 1 do not fit"),
        ({"SLURM_STEP_TASKS_PER_NODE": "8"}, "and SLURM_STEP_TASKS_PER_NODE 8"),
        ({"SLURM_PROCID": ""}, "SLURM_PROCID is not set"),
        ({"SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS is many"),
    ],
)
def test_contradictions_are_named(more, words):
    with pytest.raises(LaunchError, match=words):
        launched_by_srun({**STEP, **more})


@pytest.mark.parametrize(
    ("short", "names"),
    [
        ("one", ["one"]),
        ("gpu[1-3]", ["gpu1", "gpu2", "gpu3"]),
        (
            "r[1-2]n[08-10,12],login-1",
            [f"r{r}n{n}" for r in (1, 2) for n in ("08", "09", "10", "12")] + ["login-1"],
        ),
        ("a[1,3].site,b", ["a1.site", "a3.site", "b"]),
        ("", []),
    ],
)
def test_short_names_of_nodes(short, names):
    assert hosts(short) == names


def test_short_numbers_of_tasks():
    assert tasks_per_node("8(x3),4") == [8, 8, 8, 4]
    assert tasks_per_node("2") == [2]
    assert tasks_per_node("") == []
