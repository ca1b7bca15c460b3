"""Measure training steps between two emulated nodes with a slow link: every context-parallel method on 8 ranks.

The nodes are network namespaces of 4 ranks each. 100 Mbit/s join them, shared by all ranks of a node, or, as rails, 100
Mbit/s for each rank. A tiny GPT, a tiny LLaMA (grouped queries) and a tiny TransNormer (linear attention: LASP, Ulysses
and Megatron-SP) train on the standard library's sources by pretrain_gpt.py, each configuration first without a limit
and then within it. Needs Linux, iproute2 and root (or `unshare --user --map-root-user --net` before the command);
nothing is left behind, however it ends. How the planner's choices do is asked by ``bench.link.choices``.

    python -m bench.link                                           # every model, both links, every configuration
    python -m bench.link --models gpt --links rails --cases wallfacer_c2 double_ring --seq-length 1024 2048
"""

import argparse
import os
from pathlib import Path
from typing import Any

from bench.harness import add_results, heading
from bench.link.cases import CASES, LINEAR_CASES, MODELS, cases_of, command_line, corpus, reference_of
from bench.link.network import LINKS, Network, prepare_machine
from bench.link.ranks import attention_crossing, medians, result_head, text_of, train
from runtime.errors import UserError
from runtime.machine import describe, results_file
from tools.common.arguments import one_line_errors, parser_for, positive, run_command
from tools.common.report import Column, Table, read_records, write_tables
from train.config.language import parse_args

WARM_UP, FREE = 2, 3  # steps without the limit: connections are made; counted
NAME = "link"
"""Name of the files of results."""
KEY = ("model", "link", "seq_length", "batch")
"""Fields that identify a setting."""
SHARED = {"shared": "one link for all ranks", "rails": "a link for each rank"}
Row = dict[str, Any]
COLUMNS: dict[str, Column] = {
    "configuration": "{name}",
    "step, s": "{median:.2f}",
    "tokens/s": "{tokens_per_second:.0f}",
    "times as fast as {}": "{times_as_fast:.2f}",
    "without a limit, s": "{unlimited:.2f}",
    "crossed, MiB": "{crossed_mib:.1f}",
    "attention, MiB": "{attention_mib:.1f}",
}


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
    add("--rate", default="100mbit", help="of the link or of each rail, in tc's words (default: %(default)s)")
    add("--repeats", type=positive, default=5, help="steps of which the median counts (default: %(default)s)")
    add_results(parser)
    return parser


def check(args: argparse.Namespace) -> None:
    """Refuse numbers that no run can have, and results that this run's figures could not join.

    Removes models without any of the named cases from ``args``.

    Raises UserError: with the flag, the value and what it must be.
    """
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
        earlier(results_file(args.results, NAME, describe("cpu")), rate=args.rate, repeats=args.repeats)


def measure(args: argparse.Namespace, data: Path) -> Row:
    """Measure all settings of a command line on the corpus ``data``, with a line for each configuration.

    Raises MeasureError: a rank failed; NetworkError: the machine does not allow the namespaces, or tc does not know the
    rate.
    """
    found: dict[str, list[Row]] = {"settings": [], "cases": []}
    about = result_head(args, "training steps between two emulated nodes")
    for link in args.links:
        with Network(rails=link == "rails") as network:
            network.limit(args.rate)  # fails before training if tc does not know the rate
            for model in args.models:
                for length in args.seq_length:
                    batch = args.batch_size or args.tokens // length
                    found["settings"].append({"model": model, "link": link, "seq_length": length, "batch": batch})
                    found["cases"] += _setting(network, found["settings"][-1], data, args)
    return {**about, "load_average": list(os.getloadavg()), "ranks_per_node": network.ranks_per_node, **found}


def _setting(network: Network, setting: Row, data: Path, args: argparse.Namespace) -> list[Row]:
    """Return the rows of one setting, the reference's first."""
    model, known = setting["model"], cases_of(setting["model"])
    rows: list[Row] = []
    for name in dict.fromkeys((reference_of(model), *(args.cases or known))):
        if name not in known:
            continue
        shape = {"seq_length": setting["seq_length"], "batch": setting["batch"]}
        flags = command_line(model, known[name], data, **shape, iterations=WARM_UP + FREE + 1 + args.repeats)
        found = medians(network, args.rate, lambda before, flags=flags: train(network, flags, before), WARM_UP, FREE)  # type: ignore[misc]
        by_plan = max(attention_crossing(parse_args(flags), network.ranks_per_node))
        rows.append({**setting, "name": name, **found, "attention_by_plan": by_plan})
        print(f"{setting['link']} {model} {Table(columns_of(model)).line(shown(rows[-1], rows[0]))}", flush=True)
    return rows


def columns_of(model: str) -> dict[str, Any]:
    """Return the columns of a model's table."""
    return {head.format(reference_of(model)): column for head, column in COLUMNS.items()}


def shown(row: Row, reference: Row) -> Row:
    """Return a row with what its table shows besides."""
    tokens = row["batch"] * row["seq_length"]
    return row | {
        "tokens_per_second": tokens / row["median"],
        "times_as_fast": reference["median"] / row["median"],
        "crossed_mib": row["crossed"] / 2**20,
        "attention_mib": row["attention_by_plan"] / 2**20,
    }


def markdown(result: Row) -> str:
    """Format the machine, and a table per setting, fastest first."""
    lines = [*heading(result), text_of("training", result)]
    for one in result["settings"]:
        date = f", {one['date'][:10]}" if "date" in one else ""
        tokens = f"{one['batch']} x {one['seq_length']} tokens"
        lines += ["", f"**{one['model']}**, {tokens}, {SHARED[one['link']]}{date}:", ""]
        rows = {row["name"]: row for row in result["cases"] if _key(row) == _key(one)}
        reference = rows[reference_of(one["model"])]
        fastest = sorted((shown(row, reference) for row in rows.values()), key=lambda row: row["median"])
        lines += Table(columns_of(one["model"]), fastest).markdown()
    return "\n".join(lines) + "\n"


def earlier(path: Path, **asked: Any) -> Row:
    """Read an earlier run's results, each setting and case with its date; nothing if there are none.

    Raises UserError: the file cannot be read, or its figures were taken with other values than ``asked`` (rate,
    repeats).
    """
    if not path.exists():
        return {"settings": [], "cases": []}
    try:
        before = read_records(path)
        different = [f"{name} {before[name]}, not {value}" for name, value in asked.items() if before[name] != value]
        for table in ("settings", "cases"):
            before[table] = [{"date": before["machine"]["date"], **row} for row in before[table]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not what this bench writes ({error!r}); give another --results") from None
    if different:
        raise UserError(f"{path} holds figures with {' and '.join(different)}; give another --results")
    return before


def write(result: Row, folder: Path) -> Path:
    """Write JSON lines and Markdown into files named after the machine; return the Markdown file's path.

    Settings and cases that an earlier run on the same machine measured, and this one did not, stay with their date.
    Raises UserError: as ``earlier``.
    """
    path = results_file(folder, NAME, result["machine"])
    before, date = earlier(path, rate=result["rate"], repeats=result["repeats"]), result["machine"]["date"]
    for table in ("settings", "cases"):
        rows = [*before[table], *({"date": date, **row} for row in result[table])]
        result = {**result, table: list({(*_key(row), row.get("name")): row for row in rows}.values())}
    result["settings"].sort(key=_key)
    return write_tables(path, result, "# Training over a slow link\n\n" + markdown(result))


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEY)


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    args = build_parser().parse_args(argv)
    check(args)
    prepare_machine()
    with corpus() as data:
        result = measure(args, data)
    print("\n" + markdown(result))
    if args.results:
        print(f"wrote {write(result, args.results)} and its .jsonl")


if __name__ == "__main__":
    run_command(main)
