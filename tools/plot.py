"""Pictures: who owns which token and each round's tiles of a method, and the loss of runs.

python -m tools.plot layout --size 4 --seq-length 32 --output layouts.png
python -m tools.plot layout --methods ring striped --full --output full.png
python -m tools.plot layout --documents 20 5 11 3 14 7 4 --window 8 --output packed.png
python -m tools.plot losses runs/llama_tiny runs/second --output loss.png
python -m tools.plot losses runs/* --by tokens --smooth 0.95 --metric grad_norm --output norms.png
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:  # started as a file: the packages lie one folder up
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.errors import UserError
from tools.common.arguments import one_line_errors, parser_for, positive, refuse_folder, run_command
from tools.common.report import PALETTE, plain, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOSSES = {"lm_loss": "training", "diffusion_loss": "training", "validation_loss": "validation"}
BY = {"iteration": "iteration", "tokens": "tokens", "hours": "hours of training"}
LARGEST_PICTURE = 512


def layout_figure(args: argparse.Namespace) -> "Figure":
    """Draw methods, by default ``PLAIN``, or ``PACKED`` under documents or a window.

    Raises UserError: an unknown method, documents of another length, or a picture too large to
    read.
    """
    from tools.common.layouts import PACKED, PLAIN, draw, drawing

    lengths, length = args.documents, args.seq_length
    if lengths and length not in (None, sum(lengths)):
        raise UserError(
            f"--seq-length is {length} and --documents have {sum(lengths)} tokens; leave --seq-length out"
        )
    length = sum(lengths) if lengths else 32 if length is None else length
    documents = (0, *accumulate(lengths)) if lengths else None
    if length > LARGEST_PICTURE or args.size > length:
        raise UserError(
            f"--seq-length is {length} and --size {args.size}; a picture shows up to {LARGEST_PICTURE} tokens, and at "
            "least one for each rank"
        )
    window = (args.window, 0 if args.causal else args.window) if args.window else None
    methods = args.methods or (PACKED if documents or window else PLAIN)
    return draw(
        [drawing(method, length, args.size, args.causal, documents, window) for method in methods]
    )


def read_curves(run: Path, fields: Sequence[str], by: str) -> dict[str, list[tuple[float, float]]]:
    """Read a run's (place, value) pairs by field; a repeated iteration, as after a resume, counts
    as last written.

    Raises UserError: the file is missing, a line is not the record of an iteration, or none has the
    fields.
    """
    from train.callbacks.metrics import read_metrics

    path = run / "metrics.jsonl" if run.is_dir() else run
    if not path.exists():
        raise UserError(f"{path} does not exist; name the folder of a run, or its metrics.jsonl")
    records = sorted({record["iteration"]: record for record in read_metrics(path)}.items())
    hours = accumulate((record.get("iteration_time_ms") or 0) / 3.6e6 for _, record in records)
    found: dict[str, list[tuple[float, float]]] = {field: [] for field in fields}
    for (iteration, record), hour in zip(records, hours, strict=True):
        place = {"iteration": iteration, "hours": hour}.get(by, record.get("consumed_tokens", 0))
        for field, values in found.items():
            if isinstance(record.get(field), int | float):
                values.append((place, record[field]))
    if not any(found.values()):
        held = ", ".join(records[-1][1]) if records else "no iteration"
        raise UserError(f"{path} holds no {' and no '.join(fields)}; it has {held}")
    return found


def smoothed(values: Sequence[tuple[float, float]], share: float) -> list[tuple[float, float]]:
    """Average the values exponentially, each point with ``share`` of the mean before it, without
    pull to the start.
    """
    mean, weight, found = 0.0, 0.0, []
    for place, value in values:
        mean, weight = share * mean + (1 - share) * value, share * weight + 1 - share
        found.append((place, mean / weight))
    return found


def losses_figure(runs: list[Path], metrics: list[str] | None, by: str, smooth: float) -> "Figure":
    """Draw training loss as a line and validation loss as marks, a colour per run; and other
    fields, a panel each.

    Raises UserError: ``smooth`` is out of range, or as ``read_curves``.
    """
    from matplotlib.figure import Figure

    from train.callbacks.metrics import LOSSES as UNITS

    if not 0 <= smooth < 1:
        raise UserError(f"--smooth is {smooth}; it must be 0 to below 1")
    wanted = metrics or list(LOSSES)
    losses = tuple(field for field in wanted if field in LOSSES)
    panels = list(dict.fromkeys(losses if field in LOSSES else (field,) for field in wanted))
    figure = Figure(figsize=(8, 4.5 + 2 * (len(panels) - 1)), layout="constrained")
    for axes, fields in zip(
        figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0], panels, strict=True
    ):
        units = set[str]()
        for index, run in enumerate(runs):
            colour, name = (
                PALETTE[index % len(PALETTE)],
                (run if run.is_dir() else run.parent).resolve().name,
            )
            for field, values in read_curves(run, fields, by).items():
                checks = field == "validation_loss"
                kind = LOSSES.get(field, field)
                label = f"{name}, {kind}" if len(runs) > 1 else kind
                if values:
                    units |= {UNITS[field]} if field in UNITS else set()
                    style, drawn = ("o--", values) if checks else ("-", smoothed(values, smooth))
                    axes.plot(
                        *zip(*drawn, strict=True),
                        style,
                        color=colour,
                        label=label,
                        linewidth=1.2,
                        markersize=4,
                    )
        axes.set(
            ylabel=f"loss ({' or '.join(sorted(units))})" if units else fields[0].replace("_", " ")
        )
        plain(axes)
        axes.legend(frameon=False)
    axes.set(xlabel=BY[by])
    return figure


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = parser_for("python -m tools.plot", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    layout = commands.add_parser(
        "layout", help="who owns which token, and each round's tiles", allow_abbrev=False
    )
    add, mask = layout.add_argument, layout.add_mutually_exclusive_group().add_argument
    methods = (
        "default: ring striped zigzag allgather; with documents or a window exchange, not allgather"
    )
    add("--methods", nargs="+", metavar="METHOD", help=methods)
    add("--seq-length", type=int, help="tokens (default: 32, or those of the documents)")
    add("--size", type=int, default=4, help="ranks (default: %(default)s)")
    add(
        "--documents", nargs="+", type=positive, metavar="LENGTH", help="tokens of packed documents"
    )
    window = (
        "tokens that each sees before itself, in full attention behind itself too; default: all"
    )
    add("--window", type=positive, metavar="TOKENS", help=window)
    mask("--causal", dest="causal", action="store_true", default=True, help="causal mask (default)")
    mask("--full", dest="causal", action="store_false", help="full attention")
    add("--output", type=Path, default=Path("layouts.png"), help="default: %(default)s")
    losses = "training and validation loss of runs, or other fields of metrics.jsonl"
    add = commands.add_parser("losses", help=losses, allow_abbrev=False).add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or its metrics.jsonl")
    add(
        "--metric",
        nargs="+",
        metavar="FIELD",
        help="of metrics.jsonl, losses in one panel (default: these)",
    )
    add("--by", choices=BY, default="iteration", help="what lies below (default: %(default)s)")
    smooth = "share that a point keeps of the mean before it, 0 to below 1 (default: 0); validation is not smoothed"
    add("--smooth", type=float, default=0.0, metavar="SHARE", help=smooth)
    add("--output", type=Path, default=Path("loss.png"), help="default: %(default)s")
    args = parser.parse_args(argv)
    refuse_folder("--output", args.output)
    layout = args.command == "layout"
    figure = (
        layout_figure(args)
        if layout
        else losses_figure(args.runs, args.metric, args.by, args.smooth)
    )
    save(figure, args.output, "--output")


if __name__ == "__main__":
    run_command(main)
