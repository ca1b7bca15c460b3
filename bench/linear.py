"""Measure linear attention against quadratic over the length of a sequence: forward + backward on one CPU thread.

Three ways to attend, each to one causal sequence of the same q, k and v:

    chunked   linear attention with decay, 64 tokens at a time (kernels/linear_attention.py): what trains
    naive     the same numbers from all T x T scores at once (kernels/reference.py)
    softmax   torch's scaled_dot_product_attention, which never holds all scores but computes every one

Tokens per second of chunked stay level while those of the other two halve with each doubling, so that beyond some
length it wins however good the others' constant is; the last lines say from which. naive stops where the T x T scores
and decays that it keeps for its backward would exceed 1 GiB. The three take turns at each length, so that whatever else
the machine does hits all alike, and chunked must equal naive before it is timed. Medians count.

    python -m bench.linear                                      # 256 to 16384 tokens, 4 heads of 32 (about a minute)
    python -m bench.linear --num-heads 8 --head-dim 64 --max-length 8192
    python -m bench.linear --results elsewhere --picture elsewhere/linear.png
"""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from bench import lengths
from bench.harness import forward_backward
from bench.lengths import by_length, overtaking
from bench.shapes import AttentionShape
from kernels import reference
from kernels.linear_attention import SCAN_CHUNK, linear_attention
from model.attention import sdpa
from model.linear import alibi_slopes
from tools.common.arguments import one_line_errors, run_command
from tools.common.report import Table

CONTESTANTS = ("chunked", "naive", "softmax")
KEPT_BYTES = 1 << 30
"""Limit on the size of the T x T matrices that naive keeps for the backward."""
SCANS = 4
"""Scans of the chunked form: one in the forward, and one each for dq, dk and dv."""
MINIMUM_SECONDS = 0.5  # for all contestants at a length; the shortest step takes a millisecond


def fits(work: AttentionShape) -> bool:
    """Return whether the scores and decays that naive keeps for the backward take at most ``KEPT_BYTES``."""
    return 4 * (work.batch + 1) * work.num_heads * work.seq_length**2 <= KEPT_BYTES


def flops(name: str, work: AttentionShape) -> int:
    """Count floating-point operations of matrix products, forward and backward; a multiply-add is two.

    softmax computes the unmasked half of the scores, and again in the backward. naive computes all of them once, and
    the final state. Each scan of chunked computes 64 scores per token, and writes and reads the state.
    """
    width, rows = work.head_dim, work.batch * work.num_heads
    if name == "softmax":
        return work.flops(work.pairs)
    if name == "naive":
        return work.flops(work.seq_length**2, products=6) + 2 * rows * work.seq_length * width**2
    whole = math.ceil(work.seq_length / SCAN_CHUNK) * SCAN_CHUNK
    return SCANS * 2 * rows * whole * width * (2 * SCAN_CHUNK + 2 * width)


def attend(name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return one contestant's output ``[B, T, H, D]``, with the decays of a TransNormer's first layer."""
    if name == "softmax":
        return sdpa(q, k, v)
    log_decay = [-slope for slope in alibi_slopes(q.shape[2])]
    if name == "naive":
        return reference.linear_attention(q, k, v, log_decay)[0]
    return linear_attention(q, k, v, log_decay, backend="chunked")[0]


def steps_of(work: AttentionShape) -> dict[str, Callable[[], list[Tensor]]]:
    """Return what attends forward and backward, and returns out, dq, dk and dv, of each contestant that fits."""
    names = [name for name in CONTESTANTS if name != "naive" or fits(work)]
    return {name: forward_backward(partial(attend, name), *work.tensors()) for name in names}


def with_rates(row: dict[str, Any], shape: dict[str, Any]) -> dict[str, Any]:
    """Add what a contestant does in a second at a length."""
    work = AttentionShape(**shape, seq_length=row["length"])
    tokens, count = work.batch * work.seq_length / row["median"], flops(row["name"], work)
    return row | {"tokens_per_second": tokens, "flops": count, "gflops_per_second": count / row["median"] / 1e9}


def exponent(result: dict[str, Any], name: str) -> float | None:
    """Return p in time ~ length^p between the last two lengths of a contestant."""
    *_, before, last = [None, *by_length(result, name).values()]
    if before is None:
        return None
    return math.log(last["median"] / before["median"]) / math.log(last["length"] / before["length"])


def markdown(result: dict[str, Any]) -> str:
    """Format tokens per second of each contestant at each length, growth exponents and crossovers."""
    found = {name: by_length(result, name) for name in CONTESTANTS}
    rows = [
        {"length": length, "ratio": found["softmax"][length]["median"] / ours["median"]}
        | {name: found[name].get(length, {}).get("tokens_per_second") for name in CONTESTANTS}
        for length, ours in found["chunked"].items()
    ]
    rates = {name: f"{{{name}:,.0f}}" for name in CONTESTANTS}
    lines = Table({"tokens": "{length:,}", **rates, "chunked / softmax": "{ratio:.2f}"}, rows).markdown("---:")
    powers = {name: exponent(result, name) for name in CONTESTANTS}
    lines += [
        "",
        *(f"{n}: time grows as length^{p:.2f} over its last step" for n, p in powers.items() if p is not None),
    ]
    lines += [overtaking(result, name) for name in CONTESTANTS[1:]]
    return "\n".join(lines)


def picture(result: dict[str, Any], path: Path) -> None:
    """Plot tokens per second over length, both axes logarithmic."""
    from matplotlib.figure import Figure

    from tools.common.report import PALETTE, plain

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    labels = {"chunked": "linear, in chunks", "naive": "linear, all scores at once", "softmax": "softmax (SDPA)"}
    for name, colour, marker in zip(CONTESTANTS, PALETTE, "osD", strict=False):
        rows = by_length(result, name)
        rates = [row["tokens_per_second"] for row in rows.values()]
        axes.plot(list(rows), rates, marker=marker, color=colour, label=labels[name])
    tokens = list(by_length(result, "chunked"))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(tokens, [f"{length:,}" for length in tokens])
    shape = result["shape"]
    title = f"forward + backward, {shape['num_heads']} heads of {shape['head_dim']}, {shape['dtype']}, one thread"
    axes.set(xlabel="tokens in the sequence", ylabel="tokens per second", title=title)
    plain(axes)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = lengths.parser_of("linear", __doc__, 256, 16384, max_seconds=15.0, num_heads=4, head_dim=32)
    plot, where = Path("docs/images/linear_throughput.png"), "where the plot goes (default: %(default)s)"
    parser.add_argument("--picture", type=Path, default=plot, metavar="FILE", help=where)
    args = parser.parse_args(argv)
    about = "linear against quadratic attention over length, forward + backward, causal, one thread"
    result = lengths.measure(args, about, steps_of, ("naive", "the naive form"), MINIMUM_SECONDS)
    result["rows"] = [with_rates(row, result["shape"]) for row in result["rows"]]
    path, machine = lengths.write(args, "linear", result), result["machine"]
    picture(result, args.picture)
    print(f"{machine['device']}, torch {machine['torch']}, one thread; tokens per second\n\n{markdown(result)}")
    print(f"written: {path}, {args.picture}")


if __name__ == "__main__":
    run_command(main)
