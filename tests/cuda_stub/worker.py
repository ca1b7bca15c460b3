"""A program of ours as a rank of ``tests.cuda_stub.check``.

It tells what torch's allocator and the stub counted.

torchrun ... -m tests.cuda_stub.worker FOLDER pretrain_gpt.py FLAGS...
"""

import ctypes
import os
import runpy
import sys
from collections import defaultdict
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from tools.common.report import write_records


def main(file, program):
    """Run the program.

    After each step write the most bytes yet, and its launches, waits and copies to the host.
    """
    counts = (ctypes.c_long * 3)()
    before = defaultdict(lambda: [0, 0, 0])  # by optimizer, since Muon's step has AdamW's within

    def told(optimizer, *_):
        ctypes.CDLL(None).stub_counts(counts)
        of_step = (now - earlier for now, earlier in zip(counts, before[optimizer], strict=True))
        counts_by_name = dict(zip(("launches", "waits", "copies"), of_step, strict=True))
        write_records(file, {"bytes": torch.cuda.max_memory_allocated(), **counts_by_name})
        before[optimizer] = list(counts)

    register_optimizer_step_post_hook(told)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    folder, *sys.argv = sys.argv[1:]
    main(Path(folder, f"rank-{os.environ['RANK']}.jsonl"), sys.argv[0])
