"""Measure training over a slow link between two emulated nodes: every context-parallel method.

The nodes are network namespaces of 4 ranks each. They are joined by one link of 100 Mbit/s, which
all ranks of a node share, or by rails, a link of 100 Mbit/s for each rank. A tiny GPT, a tiny LLaMA
(grouped queries) and a tiny TransNormer (linear attention: LASP, Ulysses and Megatron-SP) train on
the source files of Python's standard library with pretrain_gpt.py, each configuration first without
the limit and then with it.

The column "attention by the plan" has the bytes over the link that the plans predict; the rest of
"crossed" is gradients, headers and other collectives. Needs Linux, iproute2 and root (or `unshare
--user --map-root-user --net` before the command); nothing is left behind, however it ends.

    # every model, both links, every configuration
    python -m bench.link
    python -m bench.link --models gpt --links rails --cases wallfacer_c2 double_ring \\
        --seq-length 1024 2048
"""

import argparse
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.link.cases import (
    CASES,
    LINEAR_CASES,
    MODELS,
    cases_of,
    command_line,
    corpus,
    reference_of,
)
from bench.link.network import LINKS, Network
from bench.link.ranks import (
    COLUMNS,
    SHARED,
    add_link,
    attention_crossing,
    figures,
    run_bench,
    train,
)
from tools.common.arguments import one_line_errors, parser_for, positive, run_command
from tools.common.report import Table
from train.config.language import parse_args

Row = dict[str, Any]


def build_parser() -> argparse.ArgumentParser:
    """Define the command line of ``python -m bench.link``."""
    parser = parser_for("python -m bench.link", __doc__)
    add = parser.add_argument
    add("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS), help="default: all")
    add("--links", nargs="+", choices=LINKS, default=list(LINKS), help="default: both")
    cases = (
        "configurations to measure in addition to the reference, which is ring, or lasp for linear "
        "attention (default: all)"
    )
    add("--cases", nargs="+", choices=tuple(dict.fromkeys([*CASES, *LINEAR_CASES])), help=cases)
    add(
        "--seq-length",
        type=positive,
        nargs="+",
        default=[1024],
        metavar="N",
        help="numbers of tokens per sequence (default: 1024)",
    )
    add(
        "--tokens",
        type=positive,
        default=8192,
        metavar="N",
        help="maximum number of tokens per step (default: %(default)s)",
    )
    batch_size = "number of sequences per step at every length, instead of --tokens"
    add("--batch-size", type=positive, metavar="N", help=batch_size)
    add_link(parser, repeats=5)
    return parser


def measure(args: argparse.Namespace) -> Row:
    """Measure all settings of a command line, and print a line for each configuration.

    Raises MeasureError if a rank failed, and NetworkError if the machine does not allow the
    namespaces, or tc does not know the rate.
    """
    rows: list[Row] = []
    with corpus() as data:
        for link in args.links:
            with Network(rails=link == "rails") as network:
                for model in args.models:
                    for length in args.seq_length:
                        batch = args.batch_size or max(1, args.tokens // length)
                        setting = {
                            "model": model,
                            "link": link,
                            "seq_length": length,
                            "batch": batch,
                        }
                        rows += measure_setting(network, setting, data, args)
    return {"cases": rows}


def measure_setting(
    network: Network, setting: Row, data: Path, args: argparse.Namespace
) -> list[Row]:
    """Measure a setting's configurations; return a row for each, the reference's first.

    A setting is a model, a link, a length and a batch size.
    """
    model = setting["model"]
    cases = cases_of(model)
    rows: list[Row] = []
    for name in dict.fromkeys((reference_of(model), *(args.cases or cases))):
        if name not in cases:
            continue

        def flags(steps: int, name: str = name) -> list[str]:
            shape = {"seq_length": setting["seq_length"], "batch": setting["batch"]}
            return command_line(model, cases[name], data, **shape, iterations=steps)

        row = figures(network, args, lambda before, steps: train(network, flags(steps), before))
        crossing = attention_crossing(parse_args(flags(1)), network.ranks_per_node)
        row["attention_by_plan"] = max(crossing)
        row["tokens_per_second"] = setting["batch"] * setting["seq_length"] / row["median"]
        reference = rows[0] if rows else row
        row["times_as_fast"] = reference["median"] / row["median"]
        rows.append({**setting, "name": name, **row})
        print(f"{setting['link']} {model} {Table(columns_of(model)).line(rows[-1])}", flush=True)
    return rows


def columns_of(model: str) -> dict[str, Any]:
    """Return the columns of a model's table."""
    compared = {
        "tokens/s": "{tokens_per_second:.0f}",
        f"times as fast as {reference_of(model)}": "{times_as_fast:.2f}",
    }
    return {**COLUMNS, **compared}


def markdown(result: Row) -> list[str]:
    """Format a table per setting, fastest first."""
    lines = []
    for setting, rows in groupby(
        result["cases"], lambda row: (row["model"], row["link"], row["batch"], row["seq_length"])
    ):
        model, link, batch, length = setting
        fastest = sorted(rows, key=lambda row: row["median"])
        lines += ["", f"**{model}**, {batch} x {length} tokens, {SHARED[link]}:", ""]
        lines += Table(columns_of(model), fastest).markdown()
    return lines


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Time training over the emulated links, and print and write a report."""
    args = build_parser().parse_args(argv)
    run_bench(args, "link", "Training over a slow link", measure, markdown)


if __name__ == "__main__":
    run_command(main)
