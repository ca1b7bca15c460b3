"""Fit a run to this machine: choose the number of processes, and the flags they need.

    python -m tools.fit pretrain_gpt.py --config llama_tiny

Prints one line for a shell, such as `4`, or on one GPU `1 --bf16 --context-parallel-size 1`, and
reports changes on stderr. Each GPU gets one process, up to 8, and softmax attention computes in
bfloat16 there, since its kernels do not support float32. A context-parallel size that does not fit
the processes is replaced by the nearest that does, unless the command line sets the size.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from runtime import __version__
from runtime.errors import UserError, divisors
from runtime.progress import counted
from train.config import diffusion, language
from train.config.common import CommonConfig
from train.config.flags import ConfigError
from train.config.suggest import belongs_to
from train.run import run_entry
from train.tasks.registry import ENTRIES

CPU_PROCESSES = 4
MAX_PROCESSES = 8


def parsed(arguments: Sequence[str]) -> CommonConfig:
    """Parse flags of pretrain_gpt.py or pretrain_dit.py; the configuration's file decides which.

    Raises UserError if a flag, or the configuration's file, is invalid.
    """
    try:
        return language.parse_args(arguments)
    except ConfigError as error:
        if belongs_to("pretrain_dit.py") not in str(error):
            raise
    return diffusion.parse_args(arguments)


def main(argv: list[str]) -> None:
    """Print the number of processes, and the flags to add to the command line.

    A non-empty NPROC in the environment sets the number of processes.
    """
    entry, *flags = argv or ["--help"]
    if entry == "--version":
        print(f"longmesh {__version__}")
        return
    if entry in ("-h", "--help"):
        print(__doc__)
        return
    if entry not in ENTRIES:
        raise ConfigError(
            f"the entry is {entry!r}; give {' or '.join(ENTRIES)}, and then its flags"
        )
    if {"-h", "--help", "--version"} & set(flags):
        print(1)  # one process of the entry prints its help or version
        return

    nproc = os.environ.get("NPROC", "")
    if nproc and not (nproc.isdigit() and int(nproc)):
        raise ConfigError(f"NPROC is {nproc!r}; it must be a whole number of 1 or more")

    size, added_flags = fit(entry, flags, int(nproc) if nproc else None)
    print(size, *added_flags)
    if added_flags:
        processes = counted(size, "process")
        print(f"added to fit {processes} on this machine: {' '.join(added_flags)}", file=sys.stderr)


def fit(entry: str, flags: list[str], processes: int | None) -> tuple[int, list[str]]:
    """Return the number of processes and the flags to add.

    ``processes`` sets the number; by default it depends on the device. If no context-parallel size
    fits, no size is added, and the entry reports the reason.
    """
    config = ENTRIES[entry].parse_args(flags)
    on_gpu = config.mesh.device_type == "cuda"
    if processes:
        size = processes
    elif on_gpu:
        gpus = torch.cuda.device_count() or 1  # the entry reports a missing CUDA device
        size = min(MAX_PROCESSES, gpus)
    else:
        size = CPU_PROCESSES

    added_flags = []
    if on_gpu and _needs_bf16(config):
        added_flags.append("--bf16")
        config = config.updated(bf16=True)

    configured = config.mesh.context_parallel_size
    candidates = [configured]
    names = [flag.split("=")[0] for flag in flags]
    if "--context-parallel-size" not in names:
        candidates = sorted(divisors(size), key=lambda n: (n != configured, abs(n - configured)))
    for ranks in candidates:
        try:
            ENTRIES[entry].validate(config.updated(context_parallel_size=ranks), size)
        except UserError:
            continue
        if ranks != configured:
            added_flags += ["--context-parallel-size", str(ranks)]
        break

    return size, added_flags


def _needs_bf16(config: Any) -> bool:
    """Return True if softmax attention runs on GPU kernels, none of which supports float32."""
    context = config.context
    softmax = not config.model.linear_attention or config.model.own_softmax_layout
    plain = context.context_parallel_method == "none" or context.attention_backend == "reference"
    return bool(softmax and not plain and not config.train.bf16)


if __name__ == "__main__":
    run_entry(main)
