"""Gathers in flight over and over, in one process: what two workers of a gloo group damage the heap by.

python -m tests.runtime.heap --seconds 10 --two-workers; echo $?        # -6 or -11 within seconds, most times
python -m tests.runtime.heap --seconds 10 --runs 20                     # each in a process of its own
"""

import argparse
import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist

from runtime import processes

IN_FLIGHT = 64


def gather(rank, world_size, seconds):
    """Functional all-gathers of 16 KB, 64 at a time; returns how many were made."""
    assert dist.group.WORLD is not None
    tensor, name = torch.ones(4096), dist.group.WORLD.group_name
    made, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        flying = [torch.ops._c10d_functional.all_gather_into_tensor(tensor, world_size, name) for _ in range(IN_FLIGHT)]
        for gathered in flying:
            torch.ops._c10d_functional.wait_tensor(gathered)
        made += IN_FLIGHT
    return made


def main():
    """One run, or many and how many of them aborted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--two-workers", action="store_true", help="as torch makes a group by itself")
    parser.add_argument("--runs", type=int, default=1)
    args = parser.parse_args()
    if args.runs > 1:
        command = [sys.executable, "-m", "tests.runtime.heap", "--seconds", str(args.seconds)]
        command += ["--two-workers"] * args.two_workers
        ended = [subprocess.run(command, check=False).returncode for _ in range(args.runs)]
        print(f"{sum(code != 0 for code in ended)} of {args.runs} runs aborted: {ended}")
        return
    if args.two_workers:
        processes.use_one_worker = lambda: None
    processes.join(store=dist.HashStore())
    print(f"{gather(0, 1, args.seconds)} gathers", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
