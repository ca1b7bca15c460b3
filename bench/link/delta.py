"""Measure the gated delta rule over a slow link: passing states against gathering the sequence.

Two ranks, each a node of its own as in ``python -m bench.link``, share one document, forward and backward, without a
model; value heads are twice the key heads, as in Qwen3.5 9B. Each first step is compared with one process.

    python -m bench.link.delta                       # 8,192 tokens a rank, 2 key and 4 value heads of 128 (2 minutes)
    python -m bench.link.delta --tokens 2048 --rate 400mbit --repeats 1
"""

import argparse
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from bench.delta import inputs
from bench.harness import add_sizes, fingerprint, format_targets, forward_backward, heading, target
from bench.link import ranks
from bench.link.network import Network
from bench.link.ranks import result_head, text_of
from bench.shapes import AttentionShape
from kernels.delta.rule import delta_rule
from parallel.context import ContextParallel, context_parallel
from parallel.context.transport import Transport
from runtime.processes import process_group
from tools.common.arguments import one_line_errors, parser_for, positive, run_command
from tools.common.report import Column, Table

FASTER = 2.0
"""Times as fast as the gathered sequence that states are to be."""
SHARED = 2
"""Value heads of a key head."""
CONTESTANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "states": ("ring", {"layout": "contiguous", "delta_rule_schedule": "chain"}),
    "gather": ("allgather", {"layout": "contiguous"}),
}
"""Method and options: a chain of states, and all of the sequence on each rank."""
COLUMNS: dict[str, Column] = {
    "contestant": "{name}",
    **ranks.COLUMNS,
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


def by_formula(name: str, tokens: int, heads: int, width: int) -> int:
    """Return the float32 bytes that cross in the busier direction, forward and backward, at ``tokens`` a rank."""
    inputs, gates = (2 * heads // SHARED + heads) * width, 2 * heads
    sent = {
        "states": heads * width * width,  # forward there, backward back
        "gather": 2 * tokens * (inputs + gates),
    }
    return 4 * sent[name]


def attend(pipe: Connection, work: AttentionShape, name: str, truth: list[float], steps: int) -> None:
    """Join, and run so many forwards and backwards, as ``ranks.run_steps``."""
    method, options = CONTESTANTS[name]
    with process_group() as group:
        cp = context_parallel(method, seq_len=work.seq_length, group=group, **options)
        tensors, dout = tensors_of(work)
        parts = [cp.shard(x, dim=1).contiguous() for x in (*tensors, dout)]
        step = forward_backward(attention_of(name, cp), *parts)
        del tensors, dout
        ranks.run_steps(pipe, group, steps, step, name, truth, work.dtype, "one process")


def build_parser() -> argparse.ArgumentParser:
    """Build the command line's parser."""
    parser = parser_for("python -m bench.link.delta", __doc__)
    parser.add_argument(
        "--tokens", type=positive, default=8192, metavar="N", help="of each rank (default: %(default)s)"
    )
    add_sizes(parser, num_heads=4, head_dim=128)
    ranks.add_link(parser)
    return parser


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all contestants, with a line for each.

    Raises MeasureError: a rank failed, or computes something else than one process; NetworkError: the machine does not
    allow the namespaces.
    """
    about = result_head(args, "gated delta rule between two emulated nodes, forward + backward")
    rows = list[dict[str, Any]]()
    with Network(rails=False, ranks_per_node=1) as network:
        length, sizes = network.size * args.tokens, {"num_heads": args.num_heads, "head_dim": args.head_dim}
        work = AttentionShape(seq_length=length, kv_heads=args.num_heads, **sizes)
        tensors, dout = tensors_of(work)
        truth = fingerprint(forward_backward(lambda *x: delta_rule(*x)[0], *tensors, dout)()).tolist()
        for name in CONTESTANTS:
            found = ranks.figures(network, args, attend, work, name, truth)
            formula = by_formula(name, args.tokens, args.num_heads, args.head_dim)
            rows.append({"name": name, **found, "by_formula": formula})
            print(Table(COLUMNS).line(rows[-1]), flush=True)
    return {**about, "load_average": list(os.getloadavg()), "tokens": args.tokens, "workload": sizes, "rows": rows}


def targets(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return how many times as fast states are, beside what is asked."""
    times = {row["name"]: row["median"] for row in result["rows"]}
    return [target("states against gather", times["gather"] / times["states"], FASTER)]


def markdown(result: dict[str, Any]) -> str:
    """Format the machine, what was asked, the table, and the targets."""
    lines = [
        *heading(result),
        text_of("delta", result, key_heads=result["workload"]["num_heads"] // SHARED),
        "",
        *Table(COLUMNS, result["rows"]).markdown(),
        "",
        *(f"{line}." for line in format_targets(targets(result))),
    ]
    return "\n".join(lines) + "\n"


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    title = "The gated delta rule over a slow link"
    ranks.run_bench(build_parser().parse_args(argv), "link-delta", title, measure, markdown)


if __name__ == "__main__":
    run_command(main)
