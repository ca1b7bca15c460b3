"""Gathers in flight over and over, in one process: what two workers of a gloo group damage the heap by.

python -m tests.runtime.heap --seconds 10 --two-workers; echo $?        # -6 or -11 within seconds, most times
"""

import argparse
import os
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
    """One run, which may abort."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--two-workers", action="store_true", help="as torch makes a group by itself")
    args = parser.parse_args()
    if args.two_workers:
        processes.use_one_worker = lambda: None
    processes.join(store=dist.HashStore())
    print(f"{gather(0, 1, args.seconds)} gathers", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
