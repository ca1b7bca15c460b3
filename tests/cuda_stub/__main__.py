"""Run a command with GPUs that are not there.

Everything works as with CUDA, but nothing is computed.

    python -m tests.cuda_stub --gpus 2 -- torchrun --nproc-per-node 2 pretrain_gpt.py ...

Needs Linux on x86_64, gcc, a CUDA build of torch (CUDA 13) and no GPU. Devices, allocations,
copies, streams, launches and NCCL's calls are real calls of torch's own code, answered by
``stub.c``: an error of the host's code shows, and so does what torch's allocator takes. Numbers are
garbage, and no time means anything.
"""

import argparse
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from runtime.errors import UserError
from tools.common.arguments import one_line_errors, parser_for, positive, run_command

SOURCE = Path(__file__).with_name("stub.c")
GPU = Path("/dev/nvidiactl")
CALLS = re.compile(r"(?:__)?(?:cuda[A-Z]|cu[A-Z]|cupti[A-Z]|cublas|cudnn|nccl)\w+")
LAUNCHES = re.compile(
    r"(__)?cu(da)?Launch\w*Kernel\w*|cublas\w*(Gemm\w*|gemm\w*|Matmul)|cudnnBackendExecute"
)
LAUNCHES_OF_NCCL = re.compile(r"nccl(All\w+|Broadcast|Bcast|Reduce\w*|Send|Recv)")
VERSIONS = re.compile(r"\w+Get(Cudart)?Version")
"""Left to the real libraries, which are loaded too; they need no GPU to answer."""


def check_machine() -> None:
    """Raise UserError: the stub cannot work here."""
    cuda = torch.version.cuda
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise UserError(
            f"this is {sys.platform} on {platform.machine()}; the stub is made for Linux on "
            f"x86_64 alone"
        )
    if GPU.exists():
        raise UserError(
            f"this machine has a GPU ({GPU} is there), which the stub would hide; run the "
            f"command itself"
        )
    if cuda is None or cuda.partition(".")[0] != "13":
        has = "no CUDA" if cuda is None else f"CUDA {cuda}"
        fix = "make cuda-stub without PY installs such a build into .venv-cuda"
        raise UserError(f"torch {torch.__version__} has {has}, and the stub needs CUDA 13; {fix}")
    if missing := [name for name in ("gcc", "nm") if shutil.which(name) is None]:
        raise UserError(
            f"{missing[0]} is not installed, which the stub is built with (Debian: apt-get "
            f"install gcc)"
        )


def symbols(kind: str) -> set[str]:
    """Return the names of calls that torch's libraries have, or leave to others.

    Those are ``defined``, or ``undefined``.
    """
    libraries = sorted(map(str, (Path(torch.__file__).parent / "lib").glob("*.so")))
    listed = subprocess.run(
        ["nm", "-D", f"--{kind}-only", *libraries], capture_output=True, text=True, check=True
    )
    last = (
        line.split()[-1].partition("@")[0] for line in listed.stdout.splitlines() if line.strip()
    )
    return {name for name in last if CALLS.fullmatch(name)}


def others() -> str:
    """Return C for the calls that ``stub.c`` leaves out.

    They return 0, and those that start kernels are counted.
    """
    names = symbols("undefined") - symbols("defined")
    triton = importlib.util.find_spec("triton")
    for folder in (triton.submodule_search_locations or ()) if triton else ():
        for driver in Path(folder, "backends/nvidia").glob(
            "driver.*"
        ):  # C, and Python that writes C
            names |= set(re.findall(r"\bcu[A-Z]\w+", driver.read_text(encoding="utf-8")))
    started = {
        name for name in names if LAUNCHES.fullmatch(name) or LAUNCHES_OF_NCCL.fullmatch(name)
    }
    weak = "__attribute__((weak)) long {0}(void) {{ return {1}; }}"
    chosen = sorted(name for name in names if not VERSIONS.fullmatch(name))
    lines = [weak.format(name, "stub_launch()" if name in started else "0") for name in chosen]
    return "\n".join(["int stub_launch(void);", *lines, ""])


def built() -> Path:
    """Return the folder of the stub for this torch, made if need be.

    Raises UserError: it cannot be built.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "longmesh"
    made_of = (
        b"".join(path.read_bytes() for path in (SOURCE, Path(__file__)))
        + torch.__version__.encode()
    )
    folder = cache / f"cuda-stub-{hashlib.sha256(made_of).hexdigest()[:12]}"
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as name:
        draft = Path(name) / "stub"
        draft.mkdir()
        (draft / "others.c").write_text(others())
        command = [
            "gcc",
            "-shared",
            "-fPIC",
            "-O1",
            "-fno-builtin",
            "-o",
            "libcuda.so.1",
            str(SOURCE),
            "others.c",
        ]
        done = subprocess.run(
            [*command, "-ldl", "-lpthread"], cwd=draft, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise UserError(
                f"gcc cannot build {SOURCE}: {(done.stderr.splitlines() or ['no message'])[0]}"
            )
        for name in ("libcuda.so", "libnvidia-ml.so.1"):
            (draft / name).symlink_to("libcuda.so.1")
        if not folder.exists():
            draft.rename(folder)
    return folder


def environment(gpus: int) -> dict[str, str]:
    """Return the environment of processes that find this many GPUs.

    Raises UserError: the stub cannot work here.
    """
    check_machine()
    folder = str(built())
    paths = filter(None, (folder, os.environ.get("LD_LIBRARY_PATH")))
    variables = {"LD_PRELOAD": f"{folder}/libcuda.so.1", "LD_LIBRARY_PATH": ":".join(paths)}
    return {**os.environ, **variables, "TRITON_LIBCUDA_PATH": folder, "CUDA_STUB_GPUS": str(gpus)}


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = parser_for("python -m tests.cuda_stub", __doc__)
    parser.add_argument(
        "--gpus", type=positive, default=1, metavar="N", help="that processes see (default: 1)"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --")
    args = parser.parse_args(argv)
    command = args.command[args.command[:1] == ["--"] :]
    if not command:
        raise UserError(
            "no command is given; name it after --, as in: -- python pretrain_gpt.py --device cuda"
        )
    os.execvpe(command[0], command, environment(args.gpus))


if __name__ == "__main__":
    run_command(main)
