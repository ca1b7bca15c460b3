"""Run torchrun in a step of Slurm: pass on signals, wait, and end with the ranks' status.

torchrun itself gives ranks half a minute after a signal, too short for a checkpoint, and ends with
status 1 and a traceback whatever they do. This program takes torchrun's arguments:

srun --ntasks-per-node 1 python -m slurm.agent --nnodes 2 --nproc-per-node 8 ... pretrain_gpt.py ...
"""

import os
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

import torch
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from runtime.signals import ASKING


def _pass_on(number: int, frame: FrameType | None) -> None:
    """Send the signal to the ranks; without ranks, end this process.

    Slurm may have sent the signal to the ranks too; they count both as one.
    """
    ranks: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        ranks += (task / "children").read_text().split()
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.kill(int(rank), number)
    if not ranks:
        os._exit(128 + number)


def bound_if_possible(argv: Sequence[str]) -> list[str]:
    """Return torchrun's arguments; if the node cannot bind, print a note and drop --numa-binding.

    On such a node torchrun would end with an error.
    """
    has_gpu = torch.cuda.is_available()
    if has_gpu and shutil.which("numactl"):
        return list(argv)
    missing = "the program numactl" if has_gpu else "a GPU that torch finds"
    bindings = [word for word in argv if word.startswith("--numa-binding=")]
    if bindings:
        print(
            f"note: {socket.gethostname()} lacks {missing}, so its ranks are not bound to the "
            f"cores beside their GPUs ({bindings[0]} is left out)",
            flush=True,
        )
    return [word for word in argv if word not in bindings]


def main(argv: list[str]) -> int:
    """Run torchrun; return 0, or the status of the first rank that failed.

    The status is 128 + N if signal N ended this rank.
    """
    for number in ASKING:
        signal.signal(number, _pass_on)
    try:
        run.main(["--signals-to-handle", "SIGINT,SIGQUIT", *bound_if_possible(argv)])
    except ChildFailedError as error:
        status = error.get_first_failure()[1].exitcode
        return status if status >= 0 else 128 - status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
