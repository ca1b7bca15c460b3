"""Read and check the environment variables of torchrun or srun."""

import os

from runtime.errors import LaunchError
from runtime.slurm import launched_by_srun


def launched_world_size() -> int:
    """Return the number of processes that the launcher started; 1 without a launcher.

    A task of srun without RANK gets torchrun's variables from Slurm's.

    Raises LaunchError if RANK, WORLD_SIZE, LOCAL_RANK or LOCAL_WORLD_SIZE is not a number, out of
    range or missing, or contradicts Slurm's variables.
    """
    os.environ.update(launched_by_srun(os.environ))
    if "RANK" not in os.environ:
        world_size = read_number("WORLD_SIZE", 1, minimum=1)
        if world_size > 1:
            raise LaunchError(
                f"WORLD_SIZE is {world_size} but RANK is not set; start with torchrun, or unset "
                "WORLD_SIZE"
            )
        return 1

    world_size = read_number("WORLD_SIZE", None, minimum=1)
    read_number("RANK", None, limit=world_size, limit_name="WORLD_SIZE")
    local_size = read_number("LOCAL_WORLD_SIZE", world_size, minimum=1)
    limit_name = "LOCAL_WORLD_SIZE" if local_size < world_size else "WORLD_SIZE"
    read_number("LOCAL_RANK", 0, limit=local_size, limit_name=limit_name)
    return world_size


def read_number(
    name: str,
    default: int | None,
    *,
    minimum: int = 0,
    limit: int | None = None,
    limit_name: str = "",
) -> int:
    """Return an environment variable as a whole number, at least ``minimum`` and below ``limit``.

    Raises LaunchError if the variable is not such a number, or is missing and has no default.
    """
    text = os.environ.get(name)
    if text is None:
        if default is None:
            raise LaunchError(
                f"RANK is set but {name} is not; start with torchrun, or unset RANK to start alone"
            )
        return default

    try:
        value = int(text)
    except ValueError:
        value = minimum - 1
    if value >= minimum and (limit is None or value < limit):
        return value

    bounds = f"from {minimum}"
    if limit is not None:
        bounds += f" to {limit - 1}"
        if limit_name:
            bounds += f", below {limit_name}"
    raise LaunchError(
        f"{name} is {text!r} in the environment; it must be a whole number {bounds}; start with "
        "torchrun, which sets it, or unset RANK to start alone"
    )
