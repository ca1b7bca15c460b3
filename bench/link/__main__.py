"""Measure training steps between two emulated nodes with a slow link: every context-parallel method on 8 ranks.

The nodes are network namespaces of 4 ranks each. 100 Mbit/s join them, shared by all ranks of a node, or, as rails, 100
Mbit/s for each rank. A tiny GPT, a tiny LLaMA (grouped queries) and a tiny TransNormer (linear attention: LASP, Ulysses
and Megatron-SP) train on the standard library's sources by pretrain_gpt.py, each configuration first without a limit
and then within it. Needs Linux, iproute2 and root (or `unshare --user --map-root-user --net` before the command);
nothing is left behind, however it ends.

    python -m bench.link                                           # every model, both links, every configuration
    python -m bench.link --models gpt --links rails --cases wallfacer_c2 double_ring --seq-length 1024 2048
"""

import argparse
import tempfile
from pathlib import Path

from bench.link import measure, report
from bench.link.cases import CASES, LINEAR_CASES, MODELS, cases_of
from bench.link.network import LINKS, prepare_machine
from data.text.prepare import prepare
from runtime.errors import UserError
from tools.arguments import one_line_errors, parser_for, positive, run_command

PROFILED_RATE = "100mbit"  # of the cluster files


def build_parser() -> argparse.ArgumentParser:
    """Build the command line's parser."""
    parser = parser_for("python -m bench.link", __doc__)
    add = parser.add_argument
    add("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS), help="default: all")
    add("--links", nargs="+", choices=LINKS, default=list(LINKS), help="default: both")
    cases = "configurations besides ring, or lasp of linear attention, which all are compared with (default: all)"
    add("--cases", nargs="+", choices=tuple(dict.fromkeys([*CASES, *LINEAR_CASES])), help=cases)
    add("--seq-length", type=int, nargs="+", default=[1024], metavar="N", help="one or more (default: 1024)")
    add("--tokens", type=int, default=8192, metavar="N", help="tokens of a step, in sequences (default: %(default)s)")
    size = "sequences of a step instead, so that tokens grow with the length"
    add("--batch-size", type=positive, metavar="N", help=size)
    add("--rate", default=PROFILED_RATE, help="of the link or of each rail, in tc's words (default: %(default)s)")
    add("--repeats", type=positive, default=5, help="steps of which the median counts (default: %(default)s)")
    profile = (
        "in each setting let the planner predict all methods, profile its N best for 3 iterations each, and say how "
        "its choice does against the best that was measured (default: 0, none)"
    )
    add("--profile", type=int, default=0, metavar="N", help=profile)
    report.add_results(parser)
    return parser


def check(args: argparse.Namespace) -> None:
    """Refuse numbers that no run can have, and results that this run's figures could not join.

    Removes models without any of the named cases from ``args``.

    Raises UserError: with the flag, the value and what it must be.
    """
    if args.profile < 0 or (args.profile and args.rate != PROFILED_RATE):
        raise UserError(
            f"--profile is {args.profile} with --rate {args.rate}; it must be 0 or more, and bench/link/clusters/ is "
            f"about {PROFILED_RATE}"
        )
    if args.cases:
        having = [model for model in args.models if any(name in cases_of(model) for name in args.cases)]
        if not having:
            known = "; ".join(f"{model} has {', '.join(cases_of(model))}" for model in args.models)
            raise UserError(f"--cases is {' '.join(args.cases)}, none of which any of --models has; {known}")
        args.models = having
    for length in args.seq_length:
        if length < 16 or (args.batch_size is None and (args.tokens < length or args.tokens % length)):
            raise UserError(
                f"--seq-length is {length} with --tokens {args.tokens}; it must be 16 or more, and "
                "tokens a multiple of it, or give --batch-size"
            )
    if args.results:
        report.earlier(report.path_of(args.results), rate=args.rate, repeats=args.repeats)


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    args = build_parser().parse_args(argv)
    check(args)
    prepare_machine()
    with tempfile.TemporaryDirectory(prefix="longmesh-link-") as folder:
        data = Path(folder) / "stdlib"
        prepare(measure.CORPUS, data, progress=False)
        result = measure.measure(args, data)
    print("\n" + report.markdown(result))
    if args.results:
        print(f"wrote {report.write(result, args.results)} and its .jsonl")


if __name__ == "__main__":
    run_command(main)
