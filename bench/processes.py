"""Contestants on the CPU: ranks pinned to one core each, and one process with all those cores.

Every process waits for its next step in a blocking read, so that none spins while another is timed.
"""

import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.harness import as_measure_errors, clocked, fingerprint, forward_backward
from bench.shapes import MaskedShape
from parallel.context import ContextParallel
from runtime.ranks import Rank, join_here, one_of_each, receive, send, started
from tools.common.ceilings import matmul_rate
from tools.common.shapes import DTYPES

ONE_PROCESS = "one_process"
ANSWER_WITHIN = 600.0
BUCKET = 512
"""Number of queries and keys in a tile of ring-attention-pytorch; this is the package's default."""


class Contestants:
    """All processes of a measurement: the ranks, and the single one; a context manager.

    Leaving the context ends the processes. Methods are named as in ``MaskedShape.plan``.

    Raises MeasureError if a process failed, died or did not answer.
    """

    def __init__(self, work: MaskedShape, methods: tuple[str, ...], cores: list[int]) -> None:
        self._work = work
        self._methods = methods
        self._cores = cores

    def __enter__(self) -> "Contestants":
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            processes: list[tuple[list[int], int | None]] = [
                ([core], rank) for rank, core in enumerate(self._cores)
            ]
            processes.append((self._cores, None))
            bodies = []
            for cores, rank in processes:
                arguments = (self._work, self._methods, cores, rank, len(self._cores), folder)
                bodies.append((_serve, arguments))
            *self._ranks, self._single = stack.enter_context(started(bodies))
            self._ending = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.close()

    def step(self, name: str) -> list[float]:
        """Run a method (or ``ONE_PROCESS``) forward and backward; return each rank's seconds."""
        return self._ask(name, "step")

    def fingerprint(self, name: str) -> list[float]:
        """Return the sums of squares of out, dq, dk and dv over the whole sequence.

        The first call also warms the method up.
        """
        return list(self._ask(name, "fingerprint")[0])

    def matmul_tflops(self) -> float:
        """Return the single process's matmul rate in TFLOP/s, on all its threads."""
        return float(self._ask(ONE_PROCESS, "matmul")[0])

    def _ask(self, name: str, request: str) -> list[Any]:
        ranks: list[Rank] = [self._single] if name == ONE_PROCESS else self._ranks
        for rank in ranks:
            send(rank.pipe, (request, name))
        with as_measure_errors(f"{name} at {request}: "):
            return one_of_each(ranks, ANSWER_WITHIN)


def _serve(
    pipe: Connection,
    work: MaskedShape,
    methods: tuple[str, ...],
    cores: list[int],
    rank: int | None,
    ranks: int,
    folder: str,
) -> None:
    """Answer requests for steps and fingerprints until the process is ended.

    The process is a rank, on its core, or the single process on all cores.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)  # before any thread starts, so that all threads inherit it
    torch.set_num_threads(len(cores))
    answer = _prepare(work, methods, rank, ranks, folder)
    while True:
        send(pipe, answer(*receive(pipe)))


def _prepare(
    work: MaskedShape, methods: tuple[str, ...], rank: int | None, ranks: int, folder: str
) -> Callable[[str, str], Any]:
    tensors = work.tensors()
    steps: dict[str, Callable[[], list[Tensor]]] = {}
    valid: dict[str, Tensor] = {}  # indices of local rows that are not padding
    if rank is None:
        steps[ONE_PROCESS] = forward_backward(work.attend, *tensors)
        valid[ONE_PROCESS] = torch.arange(work.seq_length)
    else:
        join_here(rank, ranks, folder)
        for method in methods:
            # Keys and values move in the backward pass too, as in the papers. If queries moved,
            # ranks that are idle in a ring would take over work of others.
            cp = ContextParallel(work.plan(method, ranks, backward="kv"), dist.group.WORLD)
            package = method.partition("@")[2]
            attend = attention_of(package) if package else cp.attend
            steps[method] = forward_backward(attend, *(cp.shard(x, dim=1) for x in tensors))
            valid[method] = (cp.positions < work.seq_length).nonzero()[:, 0]

    def answer(request: str, name: str) -> Any:
        if request == "matmul":
            return matmul_rate("cpu", DTYPES[work.dtype])
        if request == "step":
            if rank is not None:
                dist.barrier()
            return clocked(steps[name])()
        sums = fingerprint([x[:, valid[name]] for x in steps[name]()])
        if rank is not None:
            dist.all_reduce(sums)
        return sums.tolist()

    return answer


def attention_of(name: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a package's attention over the ranks of the default group.

    Each rank has a contiguous shard ``[B, T, H, D]``. The striped form of ring-attention-pytorch
    would not be faster: without CUDA, it computes the tiles that it does not need too, and masks
    them.
    """
    assert name == "ring-attention-pytorch"
    from ring_attention_pytorch import ring, ring_flash_attention

    def ring_pass(*arguments: Any) -> Any:
        return ring.ring_pass(*arguments)[0]

    # Without this, ring-attention-pytorch 0.5.20 takes the tensors received and sent in its last
    # pass as dk and dv, and these gradients are wrong.
    ring_flash_attention.ring_pass = ring_pass

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_flash_attention.ring_flash_attn(q, k, v, None, True, BUCKET, True)

    return attend
