"""Measure the gated delta rule: forward + backward beside transformers' and softmax attention, and over two processes.

Contestants in float32 on one CPU thread: chunked is this project's form, transformers its torch_chunk_gated_delta_rule
of Qwen3.5, softmax torch's scaled_dot_product_attention of the same shape. They take turns at every length; what the
two forms of the rule compute is compared before. Then two processes pinned to a core each share a sequence of the
longest length, in turn with one of them alone. The slower of the two counts.

    python -m bench.delta                                       # 512 to 8192 tokens, 4 heads of 128 (three minutes)
    python -m bench.delta --max-length 2048 --repeats 3 --results elsewhere
"""

import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from bench.harness import (
    add_rounds,
    add_sizes,
    check_same,
    clocked,
    failures_told,
    fingerprint,
    format_targets,
    measured,
    sizes_of,
    target,
)
from bench.linear import by_length, lengths_between, overtakes
from bench.shapes import AttentionShape
from kernels.delta.rule import delta_rule
from model.attention import sdpa
from parallel.context import context_parallel
from runtime.errors import UserError
from runtime.machine import OtherLoad, describe, results_file, usable_cores
from runtime.ranks import run_ranks
from tools.common.arguments import one_line_errors, parser_for, positive, run_command
from tools.common.report import Table, write_records

CONTESTANTS = ("chunked", "transformers", "softmax")
FASTER, SHARE = 3.0, 0.62
"""Times as fast as transformers, and two processes' share of one's time, that are asked at the longest length."""
RANKS = 2


def inputs(work: AttentionShape) -> tuple[list[Tensor], Tensor]:
    """Return q, k, v, log gates and beta of a layer at its initialisation, and the gradient of out."""
    q, k, v, dout = work.tensors()
    generator = torch.Generator().manual_seed(1)
    rates, betas = torch.randn(2, *v.shape[:3], generator=generator)
    return [F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, -F.softplus(rates - 3), betas.sigmoid()], dout


def ours(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, backend: str = "chunked") -> Tensor:
    """Return the rule's output ``[B, T, H, E]``."""
    return delta_rule(q * q.shape[-1] ** -0.5, k, v, g, beta, backend=backend)[0]


def theirs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Return transformers' output, which scales queries itself."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    found: Tensor = torch_chunk_gated_delta_rule(q, k, v, g, beta)[0]
    return found


def softmax(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    """Return causal softmax attention, which has no gates."""
    return sdpa(q, k, v)


def step_of(attend: Callable[..., Tensor], tensors: list[Tensor], dout: Tensor) -> Callable[[], list[Tensor]]:
    """Return a step, forward and backward: out and the gradients of all tensors."""
    leaves = [x.requires_grad_() for x in tensors]

    def step() -> list[Tensor]:
        out = attend(*leaves)
        return [out.detach(), *(x for x in torch.autograd.grad(out, leaves, dout, allow_unused=True) if x is not None)]

    return step


def measure(shape: AttentionShape, lengths: list[int], repeats: int, max_seconds: float) -> list[dict[str, Any]]:
    """Time the contestants at every length, in rows of seconds.

    Raises MeasureError: the two forms of the rule differ in out or a gradient.
    """
    rows = list[dict[str, Any]]()
    ways: dict[str, Callable[..., Tensor]] = {"chunked": ours, "transformers": theirs, "softmax": softmax}
    for length in lengths:
        tensors, dout = inputs(replace(shape, seq_length=length))
        steps = {name: step_of(way, [x.clone() for x in tensors], dout) for name, way in ways.items()}
        prints = {name: fingerprint(step()).tolist() for name, step in steps.items()}  # also warms up
        check_same("chunked", prints["chunked"], prints["transformers"], "float32", "transformers")
        seconds = measured({name: clocked(step) for name, step in steps.items()}, repeats, max_seconds)
        rows += [{"name": name, "length": length, **summary(taken)} for name, taken in seconds.items()]
    return rows


def summary(seconds: list[float]) -> dict[str, Any]:
    """Return a row's figures."""
    return {"rounds": len(seconds), "median": median(seconds), "min": min(seconds), "max": max(seconds)}


def shared(rank: int, ranks: int, work: AttentionShape, repeats: int) -> dict[str, list[float]]:
    """Time a step of all ranks and, in turn, of rank 0 alone with the whole sequence, for as many rounds."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, [cores[rank % len(cores)]])
    torch.set_num_threads(1)
    cp = context_parallel("ring", seq_len=work.seq_length, group=dist.group.WORLD, backend="chunked")
    (q, *others), dout = inputs(work)
    parts = [cp.shard(x, dim=1).contiguous() for x in (q * work.head_dim**-0.5, *others)]
    alone, together = step_of(ours, [q, *others], dout), step_of(cp.attend_delta, parts, cp.shard(dout, dim=1))
    found: dict[str, list[float]] = {"one process": [], f"{ranks} processes": []}
    for _ in range(1 + repeats):  # the first warms up
        for taken, step in zip(found.values(), (alone, together), strict=True):
            dist.barrier()
            if step is together or rank == 0:
                taken.append(clocked(step)())
    return {name: taken[1:] for name, taken in found.items()}


def split(work: AttentionShape, repeats: int) -> list[dict[str, Any]]:
    """Return rows of one process and of two that share the sequence; of these the slower one counts."""
    with failures_told():
        ranks = run_ranks(shared, RANKS, work, repeats)
    one, two = ranks[0]
    slower = [max(pair) for pair in zip(*(found[two] for found in ranks), strict=True)]
    rows = {one: ranks[0][one], two: slower}
    return [{"name": name, "length": work.seq_length, **summary(taken)} for name, taken in rows.items()]


def targets(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what is asked of the longest length, beside what was measured."""
    last: dict[str, float] = {row["name"]: row["median"] for row in result["rows"]}
    one, two = (row["median"] for row in result["shared"])
    return [
        target("times as fast as transformers", last["transformers"] / last["chunked"], FASTER),
        target("two processes over one", two / one, None, SHARE),
    ]


def markdown(result: dict[str, Any]) -> str:
    """Format seconds of each contestant at each length, from where the rule is faster, and what is asked."""
    found = {name: by_length(result, name) for name in CONTESTANTS}
    rows = [
        {name: found[name][length]["median"] for name in CONTESTANTS}
        | {"length": length}
        | {f"over_{name}": found[name][length]["median"] / ours["median"] for name in CONTESTANTS[1:]}
        for length, ours in found["chunked"].items()
    ]
    seconds = {f"{name}, s": f"{{{name}:.3f}}" for name in CONTESTANTS}
    ratios = {f"{name} / chunked": f"{{over_{name}:.2f}}" for name in CONTESTANTS[1:]}
    lines = Table({"tokens": "{length:,}", **seconds, **ratios}, rows).markdown("---:")
    start = overtakes(result, "softmax")
    where = "nowhere faster" if start is None else f"faster from {start:,} tokens on"
    lines += ["", f"chunked is {where} than softmax"]
    lines += [f"{row['name']}, {row['length']:,} tokens: {row['median']:.3f} s" for row in result["shared"]]
    return "\n".join([*lines, *format_targets(targets(result))])


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = parser_for("python -m bench.delta", __doc__)
    add = parser.add_argument
    add_sizes(parser, num_heads=4, head_dim=128, batch=1)
    add("--min-length", type=positive, default=512, help="shortest sequence (default: %(default)s)")
    add("--max-length", type=positive, default=8192, help="longest; they double (default: %(default)s)")
    add_rounds(parser, 5, 60.0)
    where = "where delta-MACHINE.jsonl goes (default: %(default)s)"
    add("--results", type=Path, default=Path("bench/results"), metavar="FOLDER", help=where)
    args = parser.parse_args(argv)
    if args.max_length < args.min_length:
        raise UserError(f"--max-length is {args.max_length}; it must be --min-length, {args.min_length}, or more")
    if find_spec("transformers") is None:
        raise UserError("this compares with transformers, which is not installed; pip install -r requirements-dev.txt")
    shape = AttentionShape(seq_length=args.max_length, **sizes_of(args))
    threads, others, began = torch.get_num_threads(), OtherLoad(usable_cores()), time.process_time()
    torch.set_num_threads(1)
    try:
        lengths = lengths_between(args.min_length, args.max_length)
        rows = measure(shape, lengths, args.repeats, args.max_seconds)
    finally:
        torch.set_num_threads(threads)
    taken = others.cores_taken(time.process_time() - began)
    result: dict[str, Any] = {
        "benchmark": "the gated delta rule, forward + backward, one thread; and over two processes",
        "machine": describe("cpu"),
        "load": {"cores_taken_by_others": taken},
        "shape": {name: value for name, value in asdict(shape).items() if name != "seq_length"},
        "rows": rows,
        "shared": split(replace(shape, seq_length=lengths[-1]), args.repeats),
    }
    path = results_file(args.results, "delta", result["machine"])
    write_records(path, result)
    machine = result["machine"]
    print(f"{machine['device']}, torch {machine['torch']}, one thread\n\n{markdown(result)}\nwritten: {path}")


if __name__ == "__main__":
    run_command(main)
