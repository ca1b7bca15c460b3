"""Environment that a job's ranks run in: their interpreter, its torch, and the sources at
submission.
"""

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
"""The version of constraints.txt."""
ASK_TORCH = """
import importlib.util, runpy
spec = importlib.util.find_spec("torch")
values = runpy.run_path(spec.submodule_search_locations[0] + "/version.py") if spec else {}
print(values.get("__version__", ""), values.get("cuda") or values.get("hip") or "", sep="|")
"""
"""Program that prints the version of an interpreter's torch and of its CUDA; importing torch would
take seconds.
"""


def interpreter(container: str | None = None) -> str | None:
    """Return the Python of a job's ranks, as slurm/job.sh would choose it; None if an image has its
    own.
    """
    if container or os.environ.get("CONTAINER"):
        return None
    if named := os.environ.get("PYTHON"):
        check_text({"python": named}, "the environment's ")
        return named
    return DEFAULT_PYTHON if Path(DEFAULT_PYTHON).exists() else sys.executable


def digest_of_sources(config: str | None) -> str:
    """Return the digest by which slurm/job.sh knows the sources, and the configuration's file, of a
    start.

    Empty on a machine whose shell lacks what it takes; the job's first start then makes it.
    """
    program = 'source slurm/job.sh && sources "$1" | digest'
    command = ["bash", "-c", program, "bash", config or ""]
    done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def check_torch(gpus: int, container: str | None = None) -> None:
    """Raise UserError if the torch of a job that asks for GPUs is built for CPUs, or there is none.

    An image's is not looked at, nor that of an interpreter which this machine lacks.
    """
    python = interpreter(container)
    if python is None or shutil.which(python) is None:
        return
    done = subprocess.run([python, "-c", ASK_TORCH], capture_output=True, text=True, check=False)
    version, _, cuda = done.stdout.strip().partition("|")
    if cuda:
        return
    build = (
        f"torch {version}, whose torch.version.cuda is None: it is built for CPUs"
        if version
        else "no torch"
    )
    raise UserError(
        f"{python} has {build}, and the job asks for {counted(gpus, 'GPU')} a node; make venv TORCH=torch=={TORCH} "
        "installs PyTorch's build for GPUs, also on a machine without one; or name another interpreter in PYTHON, "
        "or an image with --container; --device cpu after the entry trains on CPUs"
    )
