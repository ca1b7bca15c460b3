"""A process and its Slurm: srun's variables as those that torchrun sets, and its end for the job's
script.
"""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from runtime.errors import LaunchError, printable

FIRST_PORT, PORTS = 20_000, 12_000
"""Ports of stores: below those that Linux hands out by itself."""


ENDINGS = "LONGMESH_ENDINGS"
"""Variable with the folder that slurm/job.sh reads a file of each rank from."""
AGAIN = 75
"""Status, EX_TEMPFAIL of sysexits.h, of a start that another process is to blame for: the next one
may succeed.
"""


def leave_ending(status: int, said: str) -> None:
    """Leave this rank's status and message to the script of its job, if it is of one."""
    if folder := os.environ.get(ENDINGS):
        rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
        with suppress(OSError):  # a full disk
            Path(folder).mkdir(parents=True, exist_ok=True)
            Path(folder, f"rank-{rank}").write_text(
                f"{status} {printable(said)}\n", encoding="utf-8"
            )


def launched_by_srun(environ: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for a task that srun started; empty unless it started several,
    and no torchrun.

    A step of one task, such as a shell, and a batch script are no ranks. MASTER_ADDR, MASTER_PORT
    are kept if set. Raises LaunchError: a variable of Slurm's is missing or odd, or contradicts one
    of torchrun's that is set.
    """
    if "SLURM_STEP_NUM_TASKS" not in environ or _number(environ, "SLURM_STEP_NUM_TASKS") < 2:
        return {}
    if "RANK" in environ:
        _check_apart(environ)
        return {}
    rank, size, local, node = (
        _number(environ, f"SLURM_{name}")
        for name in ("PROCID", "STEP_NUM_TASKS", "LOCALID", "NODEID")
    )
    per_node = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if sum(per_node) != size or node >= len(per_node) or rank >= size or local >= per_node[node]:
        raise LaunchError(
            f"SLURM_PROCID {rank}, SLURM_LOCALID {local} and SLURM_NODEID {node} do not fit SLURM_STEP_NUM_TASKS "
            f"{size} as SLURM_STEP_TASKS_PER_NODE {environ.get('SLURM_STEP_TASKS_PER_NODE')}; start with srun or "
            "torchrun, or unset SLURM_STEP_NUM_TASKS to start alone"
        )
    found = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": per_node[node],
    }
    for name, value in found.items():
        if environ.get(name, str(value)) != str(value):
            raise LaunchError(
                f"{name} is {environ[name]} in the environment, and srun made it {value}; unset {name}, which a shell "
                "or another launcher left, or start with torchrun, which sets RANK too"
            )
    # The ranks meet at the first node, at a port that this step has for itself.
    nodes = hosts(environ.get("SLURM_STEP_NODELIST", ""))
    if not nodes:
        raise LaunchError(
            "SLURM_STEP_NODELIST is not set, so that the ranks cannot meet; set MASTER_ADDR, MASTER_PORT"
        )
    job, step = (_number(environ, f"SLURM_{name}") for name in ("JOB_ID", "STEP_ID"))
    meeting = {"MASTER_ADDR": nodes[0], "MASTER_PORT": str(FIRST_PORT + (job * 101 + step) % PORTS)}
    own = {name: str(value) for name, value in found.items()}
    return own | {name: environ.get(name) or value for name, value in meeting.items()}


def _check_apart(environ: Mapping[str, str]) -> None:
    """Raise LaunchError if each of srun's tasks is told of fewer: by a torchrun of its own, or by
    an old shell.
    """
    tasks, agents = environ["SLURM_STEP_NUM_TASKS"], environ.get("GROUP_WORLD_SIZE")
    size = environ.get("WORLD_SIZE", "")
    if agents is None and size.isdigit() and int(size) < int(tasks):
        raise LaunchError(
            f"WORLD_SIZE is {size} in the environment, and srun started {tasks} tasks; unset RANK and WORLD_SIZE, "
            "which a shell or another launcher left, or unset SLURM_STEP_NUM_TASKS to train apart"
        )
    if agents is not None and agents != tasks:
        raise LaunchError(
            f"srun started {tasks} tasks, each of them a torchrun of its own, which knows of {agents}: they would "
            "train apart into one folder; give srun --ntasks-per-node 1 and torchrun --nnodes $SLURM_NNODES, let srun "
            "start the ranks without torchrun, or unset SLURM_STEP_NUM_TASKS to train apart"
        )


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdigit():
        raise LaunchError(
            f"{name} is {text or 'not set'}, and srun makes it a number; start with srun or torchrun, or unset "
            "SLURM_STEP_NUM_TASKS to start alone"
        )
    return int(text)


def tasks_per_node(text: str) -> list[int]:
    """Return the tasks of each node from Slurm's short form, such as ``8(x3),4``."""
    parts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(",")]
    return [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]


def hosts(text: str) -> list[str]:
    """Return the names in Slurm's short form, such as ``gpu[01-03,07],login``, in its order."""
    found: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        names = [""]
        for plain, ranges in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", part):
            spans = [span.partition("-") for span in filter(None, ranges.split(","))]
            numbers = [(len(a), n) for a, _, b in spans for n in range(int(a), int(b or a) + 1)]
            ends = [plain] if plain else [f"{number:0{digits}d}" for digits, number in numbers]
            names = [name + end for name in names for end in ends]
        found += names
    return found
