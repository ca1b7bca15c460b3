"""Find the Python of a job's ranks, check its torch, and compute a digest of the sources."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from runtime.errors import UserError
from runtime.progress import counted
from slurm.values import check_text

HERE = Path(__file__).resolve().parent
DEFAULT_PYTHON = ".venv/bin/python"
TORCH = "2.13.0"
"""Version of torch in constraints.txt, for the message that names a build to install."""
ASK_TORCH = """
import importlib.util, runpy
spec = importlib.util.find_spec("torch")
values = runpy.run_path(spec.submodule_search_locations[0] + "/version.py") if spec else {}
print(values.get("__version__", ""), values.get("cuda") or values.get("hip") or "", sep="|")
"""
"""Program that prints the versions of an interpreter's torch and of its CUDA or HIP. It does not
import torch, which would take seconds."""


def interpreter(container: str | None = None) -> str | None:
    """Return the Python of a job's ranks, as slurm/job.sh chooses it; None in a container."""
    if container or os.environ.get("CONTAINER"):
        return None
    python = os.environ.get("PYTHON")
    if python:
        check_text({"python": python}, "the environment's ")
        return python
    return DEFAULT_PYTHON if Path(DEFAULT_PYTHON).exists() else sys.executable


def digest_of_sources(config: str | None) -> str:
    """Return the digest of the sources and of the configuration file that slurm/job.sh computes.

    It is empty if this machine lacks a program for it; the job's first start then computes it.
    """
    program = 'source slurm/job.sh && sources "$1" | digest'
    command = ["bash", "-c", program, "bash", config or ""]
    result = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else ""


def check_torch(gpus: int, container: str | None = None) -> None:
    """Raise UserError if the torch of a job for GPUs is built for CPUs, or is missing.

    The torch of a container, or of an interpreter that this machine lacks, is not checked.
    """
    python = interpreter(container)
    if python is None or shutil.which(python) is None:
        return
    result = subprocess.run([python, "-c", ASK_TORCH], capture_output=True, text=True, check=False)
    version, _, cuda = result.stdout.strip().partition("|")
    if cuda:
        return
    build = "no torch"
    if version:
        build = f"torch {version}, which is built for CPUs (torch.version.cuda is None)"
    raise UserError(
        f"{python} has {build}, but the job asks for {counted(gpus, 'GPU')} a node; install "
        f"PyTorch's build for GPUs (make venv TORCH=torch=={TORCH}, also on a machine without a "
        "GPU), set PYTHON to another interpreter, give an image with --container, or train on CPUs "
        "with --device cpu after the entry"
    )
