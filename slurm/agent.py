"""torchrun for a step of Slurm: it passes signals on to its ranks and waits, and ends with their
status.

torchrun itself gives ranks half a minute after a signal, and ends with status 1 and a traceback
whatever they do.

srun --ntasks-per-node 1 python -m slurm.agent --nnodes 2 --nproc-per-node 8 ... pretrain_gpt.py ...
as torchrun
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
    """Signal the ranks, or end where there are none. Slurm may have done so too; they take the two
    for one.
    """
    ranks = [
        rank
        for task in Path("/proc/self/task").iterdir()
        for rank in (task / "children").read_text().split()
    ]
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.kill(int(rank), number)
    if not ranks:
        os._exit(128 + number)


def bound_if_possible(argv: Sequence[str]) -> list[str]:
    """Return torchrun's arguments without its binding to CPUs, after a line, where the node lacks
    what that needs.

    torchrun would end there. The entry's own arguments stay as they are.
    """
    if torch.cuda.is_available() and shutil.which("numactl"):
        return list(argv)
    lacking = "the program numactl" if torch.cuda.is_available() else "a GPU that torch finds"
    bindings = [word for word in argv if word.startswith("--numa-binding=")]
    if bindings:
        print(
            f"note: {socket.gethostname()} lacks {lacking}, so its ranks are not bound to the cores beside their GPUs "
            f"({bindings[0]} is left out)",
            flush=True,
        )
    return [word for word in argv if word not in bindings]


def main(argv: list[str]) -> int:
    """Run torchrun; return its ranks' status, 128 + N where signal N ended the first that failed."""
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
