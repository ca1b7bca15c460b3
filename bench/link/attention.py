"""Measure the attention alone, forward and backward, between two emulated nodes with a slow link.

8 ranks in two network namespaces, as in ``python -m bench.link``, and no model: packed documents of log-normal lengths,
documents of about 500 tokens, one document under a window, and one document, also with a KV head for four query heads.
The method exchange, each row once per node, against every other method twice: sending only the rows that a query sees,
and sending all rows, as every method did before masks decided what travels.

    python -m bench.link.attention                                     # 16384 tokens, 8 heads of 32, 100 Mbit/s
    python -m bench.link.attention --cases short --methods ring zigzag --rate 50mbit
"""

import argparse
import os
import re
from pathlib import Path

from bench.link.attention_cases import CASES, METHODS
from bench.link.network import LINKS, check_permission
from runtime.errors import UserError
from tools.arguments import one_line_errors, parser_for, positive, run_command


def build_parser() -> argparse.ArgumentParser:
    """Build the command line's parser."""
    parser = parser_for("python -m bench.link.attention", __doc__)
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES), help="default: all")
    parser.add_argument("--methods", nargs="+", choices=tuple(METHODS), default=list(METHODS), help="default: all")
    parser.add_argument("--link", choices=LINKS, default="shared", help="default: %(default)s")
    parser.add_argument("--seq-length", type=positive, default=16384, help="default: %(default)s")
    parser.add_argument("--num-heads", type=positive, default=8, help="default: %(default)s")
    parser.add_argument("--head-dim", type=positive, default=32, help="default: %(default)s")
    parser.add_argument("--rate", default="100mbit", help="of the link or of each rail (default: %(default)s)")
    parser.add_argument("--repeats", type=positive, default=3, help="steps that count (default: %(default)s)")
    parser.add_argument(
        "--results", type=Path, metavar="FOLDER", help="write JSON lines and Markdown here, named after the machine"
    )
    parser.add_argument("--note", help="a remark for the results, such as what else the machine was doing")
    return parser


def bits_per_second(rate: str) -> float:
    """Return a rate in bits per second.

    Raises:
        UserError: it is not a number with kbit, mbit or gbit.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(k|m|g)bit", rate)
    if found is None or float(found[1]) <= 0:
        raise UserError(f"--rate is {rate!r}; give a number with kbit, mbit or gbit, such as 100mbit")
    return float(found[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[found[2]]


@one_line_errors
def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    args = build_parser().parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded, here and by the ranks' server
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns that namespaces have no name server
    bits_per_second(args.rate)
    check_permission()
    from bench.link.attention_measure import measure
    from bench.link.attention_report import markdown, write

    result = measure(args, bits_per_second(args.rate), tell=lambda line: print(line, flush=True))
    print("\n" + markdown(result))
    if args.results:
        print(f"wrote {write(result, args.results)} and its .jsonl")
    return 0


if __name__ == "__main__":
    run_command(main)
