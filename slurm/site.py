"""Read the [slurm] table of a cluster's file, and the script template that it names."""

import re
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

from planner.cluster import ClusterError, cluster_file, load_cluster
from runtime.errors import UserError
from slurm.values import check_text

HERE = Path(__file__).resolve().parent
LAST_LINE = 'train "$@"'
"""Last line of a template, which a job's own command replaces."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """The [slurm] table of a cluster's file: names that this cluster's Slurm uses."""

    script: str
    """Name of the template in this folder that scripts are made from: "a100" or "h100"."""
    gpu: str | None = None
    """Type of GPU to request in --gres; None requests any GPU."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    """Features that nodes must have, in sbatch's notation."""
    cpus_per_gpu: int | None = None
    """CPUs that a node must have for each rank, counting each thread of a core; by default the
    script's 12.
    """
    interface: str | None = None
    """Network interface for NCCL and gloo; by default the one that a node's name resolves to."""


def read_site(path: str) -> tuple[Site, int]:
    """Return the [slurm] table of a cluster's file or name, and its GPUs per node.

    Raises UserError if the table is missing or wrong; the message has the file, the key and the
    fix.
    """
    check_text({"cluster": path})
    gpus = load_cluster(path).gpus_per_node
    table = tomllib.loads(cluster_file(path).read_text(encoding="utf-8")).get("slurm")
    scripts = sorted(file.stem for file in HERE.glob("*.sbatch"))
    name = table.get("script") if isinstance(table, dict) else table
    if not isinstance(table, dict) or name not in scripts:
        problem = f"script of [slurm] is {name!r}"
        if name is None:
            problem = "[slurm] has no script"
        raise ClusterError(
            f"{path}: {problem}; set script to one of {', '.join(scripts)}, or give the file of a "
            "Slurm cluster"
        )

    types = {field.name: field.type for field in fields(Site)}
    for key, value in table.items():
        if key not in types:
            raise ClusterError(
                f"{path}: unknown key {key!r} of [slurm]; use one of {', '.join(types)}"
            )
        required = int if "int" in str(types[key]) else str
        if type(value) is not required or (type(value) is int and value < 1):
            raise ClusterError(
                f"{path}: {key} of [slurm] is {value!r}; it must be of type {types[key]}"
            )
    check_text(table, f"{path}: [slurm] ")
    return Site(**table), gpus


def read_template(site: Site) -> tuple[str, str]:
    """Return the site's template in two parts: up to its last #SBATCH option, and the rest.

    The last line, which starts the training, is left out. Raises UserError if the template has no
    options, or another last line.
    """
    file = HERE / f"{site.script}.sbatch"
    template = file.read_text(encoding="utf-8").rstrip("\n")
    options = list(re.finditer(r"^#SBATCH .*$", template, flags=re.M))
    if not options or not template.endswith(f"\n{LAST_LINE}"):
        raise UserError(
            f"{file} has no #SBATCH line, or does not end with {LAST_LINE}; copy "
            "slurm/h100.sbatch again"
        )
    head_end = options[-1].end()
    body = template[head_end:].strip("\n")
    return template[:head_end], body.removesuffix(LAST_LINE)
