"""Fit a run to this machine: choose how many processes, and the flags that its configuration lacks
for them.

    python -m tools.fit pretrain_gpt.py --config llama_tiny

Prints one line for a shell, such as `4`, or on one GPU `1 --bf16 --context-parallel-size 1`, and
reports changes on stderr. Each GPU gets one process, up to MOST, and softmax attention computes in
bfloat16 there, since its kernels take no float32. A context-parallel size that does not fit the
processes is replaced by the nearest that does; flags of the command line stay.
"""

import os
import sys
from collections.abc import Sequence

import torch

from runtime import __version__
from runtime.errors import UserError, divisors
from runtime.progress import counted
from train.config import diffusion, language
from train.config.common import CommonConfig
from train.config.flags import ConfigError
from train.run import run_entry
from train.tasks.registry import ENTRIES

ON_CPU = 4
MOST = 8


def parsed(arguments: Sequence[str]) -> CommonConfig:
    """Return the configuration of the entry that flags, with their file, are for. Raises UserError."""
    try:
        return language.parse_args(arguments)
    except ConfigError as error:
        if "that is for pretrain_dit.py" not in str(error):
            raise
    return diffusion.parse_args(arguments)


def main(argv: list[str]) -> None:
    """Print the number of processes and the flags; a non-empty NPROC in the environment sets the
    number.
    """
    entry, *flags = argv or ["--help"]
    if entry in ("-h", "--help", "--version"):
        print(f"longmesh {__version__}" if entry == "--version" else __doc__)
        return
    if entry not in ENTRIES:
        raise ConfigError(
            f"the entry is {entry!r}; give {' or '.join(ENTRIES)}, and then its flags"
        )
    if {"-h", "--help", "--version"} & set(flags):
        print(1)  # the entry prints it
        return
    asked = os.environ.get("NPROC", "")
    if asked and not (asked.isdigit() and int(asked)):
        raise ConfigError(f"NPROC is {asked!r}; it must be a whole number from 1")
    size, more = fit(entry, flags, int(asked) if asked else None)
    print(size, *more)
    if more:
        print(
            f"to suit {counted(size, 'process')} on this machine: {' '.join(more)}", file=sys.stderr
        )


def fit(entry: str, flags: list[str], processes: int | None) -> tuple[int, list[str]]:
    """Return the number of processes and the flags to add; none if nothing fits, and the entry says
    why.
    """
    config = ENTRIES[entry].parse_args(flags)
    on_gpu = config.mesh.device_type == "cuda"
    gpus = torch.cuda.device_count() or 1  # the entry reports a missing CUDA device
    size = processes or (min(MOST, gpus) if on_gpu else ON_CPU)
    context, linear = config.context, config.model.linear_attention
    softmax = not linear or config.model.own_softmax_layout
    plain = context.context_parallel_method == "none" or context.attention_backend == "reference"
    # every GPU kernel of softmax attention refuses float32
    more = ["--bf16"] if on_gpu and softmax and not plain and not config.train.bf16 else []
    if more:
        config = config.updated(bf16=True)
    own = config.mesh.context_parallel_size
    sizes = [own]
    if not any(flag.split("=")[0] == "--context-parallel-size" for flag in flags):
        sizes = sorted(divisors(size), key=lambda n: (n != own, abs(n - own)))
    for ranks in sizes:
        try:
            ENTRIES[entry].validate(config.updated(context_parallel_size=ranks), size)
        except UserError:
            continue
        return size, more + ([] if ranks == own else ["--context-parallel-size", str(ranks)])
    return size, more


if __name__ == "__main__":
    run_entry(main)
