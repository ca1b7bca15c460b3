"""Measure the gated delta rule over a slow link: passing states against exchanging heads and gathering the sequence.

Two ranks, each a node of its own as in ``python -m bench.link``, share one document, forward and backward, without a
model; value heads are twice the key heads, as in Qwen3.5 9B. Each first step is compared with one process.

    python -m bench.link.delta                       # 8,192 tokens a rank, 2 key and 4 value heads of 128 (2 minutes)
    python -m bench.link.delta --tokens 2048 --rate 400mbit --repeats 1
"""

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.delta import inputs, step_of
from bench.harness import add_results, add_sizes, check_same, fingerprint, format_targets, heading, target
from bench.link.attention import FREE, WARM_UP, bits_per_second
from bench.link.network import Network, prepare_machine
from bench.link.ranks import WARM_UP_LIMITED, Iteration, began, iterate, medians, report
from bench.shapes import AttentionShape
from kernels.delta.rule import delta_rule
from parallel.context import ContextParallel, context_parallel
from parallel.context.transport import Transport
from runtime.machine import results_file
from runtime.processes import process_group
from tools.common.arguments import one_line_errors, parser_for, positive, run_command
from tools.common.report import Column, Table, write_tables

FASTER = 2.0
"""Times as fast as each other contestant that states are to be."""
SHARED = 2
"""Value heads of a key head."""
CONTESTANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "states": ("ring", {"layout": "contiguous", "delta_rule_schedule": "chain"}),
    "heads": ("ulysses", {"delta_rule_schedule": "ulysses"}),
    "gather": ("allgather", {"layout": "contiguous"}),
}
"""Method and options: a chain of states, an all-to-all over heads, and all of the sequence on each rank."""
COLUMNS: dict[str, Column] = {
    "contestant": "{name}",
    "step, s": "{median:.3f}",
    "on the link": "{on_link:.0%}",
    "without a limit, s": "{unlimited:.3f}",
    "crossed, MiB": lambda row: f"{row['crossed'] / 2**20:.2f}",
    "by the formula, MiB": lambda row: f"{row['by_formula'] / 2**20:.2f}",
}


class Gathered(torch.autograd.Function):
    """Tokens of all ranks, ``[B, T, ...] -> [B, ranks * T, ...]``; the gradients of a rank's tokens are added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, transport: Transport) -> Tensor:
        ctx.transport, ctx.ranks = transport, tuple(range(transport.geometry.size))
        (whole,) = transport.gather((x,), ctx.ranks)()
        return whole

    @staticmethod
    def backward(ctx: Any, dwhole: Tensor) -> tuple[Tensor, None]:
        return ctx.transport.reduced(dwhole, ctx.ranks), None


def attention_of(name: str, cp: ContextParallel) -> Callable[..., Tensor]:
    """Return a contestant's attention of this rank's tensors.

    Where the sequence is gathered, a rank computes it up to its own last token.
    """
    if name != "gather":
        return cp.attend_delta
    first, last = int(cp.positions[0]), int(cp.positions[-1])

    def attend(*tensors: Tensor) -> Tensor:
        whole = [Gathered.apply(x, cp.transport)[:, : last + 1] for x in tensors]
        return delta_rule(*whole)[0][:, first:]

    return attend


def tensors_of(work: AttentionShape) -> tuple[list[Tensor], Tensor]:
    """Return q, k, v, log gates and beta of the whole sequence, and the gradient of out."""
    (q, k, *others), dout = inputs(work)
    keys = work.num_heads // SHARED
    return [q[:, :, :keys] * work.head_dim**-0.5, k[:, :, :keys], *others], dout


def by_formula(name: str, tokens: int, heads: int, width: int, ranks: int = 2) -> int:
    """Return the float32 bytes that cross in the busier direction, forward and backward, at ``tokens`` a rank."""
    inputs, out, gates = (2 * heads // SHARED + heads) * width, heads * width, 2 * heads
    sent = {
        "states": heads * width * width,  # forward there, backward back
        "heads": 2 * tokens * (inputs + out + gates) // ranks,
        "gather": 2 * tokens * (inputs + gates),
    }
    return 4 * sent[name]


def attend(pipe: Connection, work: AttentionShape, name: str, truth: list[float], steps: int) -> None:
    """Join, check the first of so many forwards and backwards against ``truth``, and report the time of each.

    A step lasts from a barrier until its slowest rank has ended.

    Raises MeasureError: the squares of out and the gradients do not sum to ``truth``.
    """
    method, options = CONTESTANTS[name]
    with process_group() as group:
        cp = context_parallel(method, seq_len=work.seq_length, group=group, **options)
        tensors, dout = tensors_of(work)
        parts = [cp.shard(x, dim=1).contiguous() for x in tensors]
        step = step_of(attention_of(name, cp), parts, cp.shard(dout, dim=1))
        del tensors, dout
        for index in range(steps):
            dist.barrier(group)
            start = time.perf_counter()
            found = step()
            seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(seconds, dist.ReduceOp.MAX, group)
            if index == 0:
                sums = fingerprint(found)
                dist.all_reduce(sums, group=group)
                check_same(name, sums.tolist(), truth, work.dtype, "one process")
            if dist.get_rank(group) == 0:
                report(pipe, float(seconds))


def build_parser() -> argparse.ArgumentParser:
    """Build the command line's parser."""
    parser = parser_for("python -m bench.link.delta", __doc__)
    add = parser.add_argument
    add("--tokens", type=positive, default=8192, metavar="N", help="of each rank (default: %(default)s)")
    add_sizes(parser, num_heads=4, head_dim=128)
    add("--rate", default="100mbit", help="of the link (default: %(default)s)")
    add("--repeats", type=positive, default=3, help="steps that count (default: %(default)s)")
    add_results(parser)
    return parser


def measure(args: argparse.Namespace, rate: float) -> dict[str, Any]:
    """Measure all contestants at ``rate`` bits per second, with a line for each.

    Raises MeasureError: a rank failed, or computes something else than one process; NetworkError: the machine does not
    allow the namespaces.
    """
    about = began(args, "gated delta rule between two emulated nodes, forward + backward")
    rows, steps = list[dict[str, Any]](), WARM_UP + FREE + WARM_UP_LIMITED + args.repeats
    with Network(rails=False, ranks_per_node=1) as network:
        length, sizes = network.size * args.tokens, {"num_heads": args.num_heads, "head_dim": args.head_dim}
        work = AttentionShape(seq_length=length, kv_heads=args.num_heads, **sizes)
        tensors, dout = tensors_of(work)
        truth = fingerprint(step_of(lambda *x: delta_rule(*x)[0], tensors, dout)()).tolist()
        for name in CONTESTANTS:
            found = medians(network, args.rate, partial(_steps, network, work, name, truth, steps), WARM_UP, FREE)
            formula = by_formula(name, args.tokens, args.num_heads, args.head_dim)
            on_link = found["crossed"] * 8 / rate / found["median"]
            rows.append({"name": name, **found, "by_formula": formula, "on_link": on_link})
            print(Table(COLUMNS).line(rows[-1]), flush=True)
    return {**about, "load_average": list(os.getloadavg()), "tokens": args.tokens, "workload": sizes, "rows": rows}


def _steps(network: Network, *given: Any) -> list[Iteration]:
    return iterate(network, given[-1], attend, *given[:-1])


def targets(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return how many times as fast states are, beside what is asked."""
    times = {row["name"]: row["median"] for row in result["rows"]}
    return [target(f"states against {name}", times[name] / times["states"], FASTER) for name in ("heads", "gather")]


def markdown(result: dict[str, Any]) -> str:
    """Format the machine, what was asked, the table, and the targets."""
    sizes = result["workload"]
    lines = [
        *heading(result),
        f"Two nodes of one rank, {result['rate']} between them in each direction; {result['tokens']} tokens a rank of "
        f"one document, {sizes['num_heads'] // SHARED} key and {sizes['num_heads']} value heads of "
        f"{sizes['head_dim']}, float32, forward and backward, medians of {result['repeats']} steps. States pass in a "
        'chain; "heads" is an all-to-all of tokens for heads and back; "gather" gathers q, k, v, gates and beta, '
        'computes up to its own last token, and adds gradients where they belong. "On the link" is what the bytes that '
        "crossed in the busier direction take at the link's rate, as a share of the step.",
        "",
        *Table(COLUMNS, result["rows"]).markdown(),
        "",
        *(f"{line}." for line in format_targets(targets(result))),
    ]
    return "\n".join(lines) + "\n"


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    args = build_parser().parse_args(argv)
    rate = bits_per_second(args.rate)
    prepare_machine()
    result = measure(args, rate)
    print("\n" + markdown(result))
    if args.results:
        path = results_file(args.results, "link-delta", result["machine"])
        text = f"# The gated delta rule over a slow link\n\n{markdown(result)}"
        print(f"wrote {write_tables(path, result, text)} and its .jsonl")


if __name__ == "__main__":
    run_command(main)
