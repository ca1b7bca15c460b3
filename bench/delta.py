"""Measure the gated delta rule: forward + backward beside transformers' and softmax attention, and over two processes.

Contestants in float32 on one CPU thread: chunked is this project's form, transformers its torch_chunk_gated_delta_rule
of Qwen3.5, softmax torch's scaled_dot_product_attention of the same shape. They take turns at every length; what the
two forms of the rule compute is compared before. Then two processes pinned to a core each share a sequence of the
longest length, in turn with one of them alone. The slower of the two counts.

    python -m bench.delta                                       # 512 to 8192 tokens, 4 heads of 128 (three minutes)
    python -m bench.delta --max-length 2048 --repeats 3 --results elsewhere
"""

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from bench import lengths
from bench.harness import as_measure_errors, clocked, format_targets, forward_backward, target
from bench.lengths import by_length, overtaking, summary
from bench.shapes import AttentionShape
from kernels.delta.rule import delta_rule
from model.attention import sdpa
from parallel.context import context_parallel
from runtime.errors import UserError
from runtime.ranks import run_ranks
from tools.common.arguments import one_line_errors, run_command
from tools.common.report import Table

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


def steps_of(work: AttentionShape) -> dict[str, Callable[[], list[Tensor]]]:
    """Return a step of each contestant: out, and the gradients of what it takes."""
    tensors, dout = inputs(work)
    ways: dict[str, Callable[..., Tensor]] = {"chunked": ours, "transformers": theirs, "softmax": softmax}
    return {name: forward_backward(way, *(x.clone() for x in tensors), dout) for name, way in ways.items()}


def shared(rank: int, ranks: int, work: AttentionShape, repeats: int) -> dict[str, list[float]]:
    """Time a step of all ranks and, in turn, of rank 0 alone with the whole sequence, for as many rounds."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, [cores[rank % len(cores)]])
    torch.set_num_threads(1)
    cp = context_parallel("ring", seq_len=work.seq_length, group=dist.group.WORLD, backend="chunked")
    (q, *others), dout = inputs(work)
    parts = [cp.shard(x, dim=1).contiguous() for x in (q * work.head_dim**-0.5, *others)]
    alone = forward_backward(ours, q, *others, dout)
    together = forward_backward(cp.attend_delta, *parts, cp.shard(dout, dim=1))
    found: dict[str, list[float]] = {"one process": [], f"{ranks} processes": []}
    for _ in range(1 + repeats):  # the first warms up
        for taken, step in zip(found.values(), (alone, together), strict=True):
            dist.barrier()
            if step is together or rank == 0:
                taken.append(clocked(step)())
    return {name: taken[1:] for name, taken in found.items()}


def split(work: AttentionShape, repeats: int) -> list[dict[str, Any]]:
    """Return rows of one process and of two that share the sequence; of these the slower one counts."""
    with as_measure_errors():
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
    lines += ["", overtaking(result, "softmax")]
    lines += [f"{row['name']}, {row['length']:,} tokens: {row['median']:.3f} s" for row in result["shared"]]
    return "\n".join([*lines, *format_targets(targets(result))])


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    args = lengths.parser_of("delta", __doc__, 512, 8192, max_seconds=60.0, num_heads=4, head_dim=128).parse_args(argv)
    if find_spec("transformers") is None:
        raise UserError("this compares with transformers, which is not installed; make venv EXTRAS=dev")
    about = "the gated delta rule, forward + backward, one thread; and over two processes"
    result = lengths.measure(args, about, steps_of, ("transformers", "transformers"))
    longest = AttentionShape(**result["shape"], seq_length=result["rows"][-1]["length"])
    result["shared"] = split(longest, args.repeats)
    path, machine = lengths.write(args, "delta", result), result["machine"]
    print(f"{machine['device']}, torch {machine['torch']}, one thread\n\n{markdown(result)}\nwritten: {path}")


if __name__ == "__main__":
    run_command(main)
