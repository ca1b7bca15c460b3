"""Convert srun's variables to torchrun's, and report how a rank ended to the job script."""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from runtime.errors import LaunchError, printable

FIRST_PORT = 20_000
"""First port that a store may use."""
PORTS = 12_000
"""Number of ports that stores may use; Linux assigns higher ports to other programs."""


ENDINGS = "LONGMESH_ENDINGS"
"""Environment variable that names the folder where each rank leaves its exit status and error
message for slurm/job.sh."""
AGAIN = 75
"""Exit status (EX_TEMPFAIL of sysexits.h) if another process caused the failure, so that the next
start may succeed.
"""


def leave_ending(status: int, message: str) -> None:
    """Write this rank's status and message for its job script, if there is one."""
    folder = os.environ.get(ENDINGS)
    if not folder:
        return
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    with suppress(OSError):  # the disk is full
        Path(folder).mkdir(parents=True, exist_ok=True)
        file = Path(folder, f"rank-{rank}")
        file.write_text(f"{status} {printable(message)}\n", encoding="utf-8")


def launched_by_srun(environ: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for a task of srun.

    The result is empty unless srun started several tasks, none of them a torchrun: a batch script,
    or a step of one task, such as a shell, is not a rank. MASTER_ADDR and MASTER_PORT are kept if
    set.

    Raises LaunchError if one of Slurm's variables is missing or invalid, or contradicts a variable
    of torchrun that is set.
    """
    if "SLURM_STEP_NUM_TASKS" not in environ or _number(environ, "SLURM_STEP_NUM_TASKS") < 2:
        return {}
    if "RANK" in environ:
        _check_torchrun(environ)
        return {}

    rank = _number(environ, "SLURM_PROCID")
    world_size = _number(environ, "SLURM_STEP_NUM_TASKS")
    local_rank = _number(environ, "SLURM_LOCALID")
    node = _number(environ, "SLURM_NODEID")
    per_node = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    is_consistent = sum(per_node) == world_size and node < len(per_node) and rank < world_size
    if not is_consistent or local_rank >= per_node[node]:
        raise LaunchError(
            f"SLURM_PROCID {rank}, SLURM_LOCALID {local_rank} and SLURM_NODEID {node} do not fit "
            f"SLURM_STEP_NUM_TASKS {world_size} and SLURM_STEP_TASKS_PER_NODE "
            f"{environ.get('SLURM_STEP_TASKS_PER_NODE')}; start with srun or torchrun, or unset "
            "SLURM_STEP_NUM_TASKS to start alone"
        )

    numbers = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": per_node[node],
    }
    variables: dict[str, str] = {}
    for name, number in numbers.items():
        value = str(number)
        if environ.get(name, value) != value:
            raise LaunchError(
                f"{name} is {environ[name]} in the environment, but srun set it to {value}; unset "
                f"{name}, which a shell or another launcher left, or start with torchrun, which "
                "sets RANK too"
            )
        variables[name] = value

    # The ranks connect at the first node, on a port that no other step uses.
    nodes = hosts(environ.get("SLURM_STEP_NODELIST", ""))
    if not nodes:
        raise LaunchError(
            "SLURM_STEP_NODELIST is not set, so the ranks cannot connect; start with srun or "
            "torchrun, or unset SLURM_STEP_NUM_TASKS to start alone"
        )
    job = _number(environ, "SLURM_JOB_ID")
    step = _number(environ, "SLURM_STEP_ID")
    port = FIRST_PORT + (job * 101 + step) % PORTS
    variables["MASTER_ADDR"] = environ.get("MASTER_ADDR") or nodes[0]
    variables["MASTER_PORT"] = environ.get("MASTER_PORT") or str(port)
    return variables


def _check_torchrun(environ: Mapping[str, str]) -> None:
    """Raise LaunchError if srun's tasks would not form a single run.

    Either each task is a torchrun that does not know the others, or RANK is left over from a shell.
    """
    tasks = environ["SLURM_STEP_NUM_TASKS"]
    agents = environ.get("GROUP_WORLD_SIZE")
    world_size = environ.get("WORLD_SIZE", "")
    if agents is None and world_size.isdigit() and int(world_size) < int(tasks):
        raise LaunchError(
            f"WORLD_SIZE is {world_size} in the environment, but srun started {tasks} tasks; unset "
            "RANK and WORLD_SIZE, which a shell or another launcher left, or unset "
            "SLURM_STEP_NUM_TASKS to train separately"
        )
    if agents is not None and agents != tasks:
        raise LaunchError(
            f"srun started {tasks} tasks, but each is a torchrun that expects {agents}, so they "
            "would train separately into one folder; give srun --ntasks-per-node 1 and torchrun "
            "--nnodes $SLURM_NNODES, let srun start the ranks without torchrun, or unset "
            "SLURM_STEP_NUM_TASKS to train separately"
        )


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdigit():
        raise LaunchError(
            f"{name} is {text or 'not set'}, but srun sets it to a number; start with srun or "
            "torchrun, or unset SLURM_STEP_NUM_TASKS to start alone"
        )
    return int(text)


def tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks on each node, from Slurm's short form such as ``8(x3),4``."""
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match:
            tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def hosts(text: str) -> list[str]:
    """Return the host names of Slurm's short form, such as ``gpu[01-03,07],login``, in order."""
    all_names: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        names = [""]
        for plain, ranges in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", part):
            endings = [plain] if plain else _expanded(ranges)
            names = [name + ending for name in names for ending in endings]
        all_names += names
    return all_names


def _expanded(ranges: str) -> list[str]:
    """Return the numbers in ranges such as ``01-03,07``, including leading zeros."""
    numbers: list[str] = []
    for span in filter(None, ranges.split(",")):
        first, _, last = span.partition("-")
        for number in range(int(first), int(last or first) + 1):
            numbers.append(f"{number:0{len(first)}d}")
    return numbers
