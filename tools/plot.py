"""Draw the layouts of context-parallel methods, with each round's tiles, or the losses of runs.

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

if not __package__:  # run as a script: the packages are one folder up
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.errors import UserError
from tools.common.arguments import one_line_errors, parser_for, positive, refuse_folder, run_command
from tools.common.report import PALETTE, plain, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOSSES = {"lm_loss": "training", "diffusion_loss": "training", "validation_loss": "validation"}
BY = {"iteration": "iteration", "tokens": "tokens", "hours": "hours of training"}
MAX_TOKENS = 512
"""Maximum number of tokens of a sequence that a picture can show."""


def layout_figure(args: argparse.Namespace) -> "Figure":
    """Draw methods, by default ``PLAIN``, or ``PACKED`` if there are documents or a window.

    Raises UserError for an unknown method, if --documents and --seq-length differ, or if the
    picture would be too large to read.
    """
    from tools.common.layouts.drawing import PACKED, PLAIN, drawing
    from tools.common.layouts.figure import draw

    lengths = args.documents
    cu_seqlens = None
    if lengths:
        length = sum(lengths)
        cu_seqlens = (0, *accumulate(lengths))
        if args.seq_length not in (None, length):
            raise UserError(
                f"--seq-length is {args.seq_length}, but --documents have {length} tokens; "
                "leave out --seq-length"
            )
    else:
        length = 32 if args.seq_length is None else args.seq_length

    if length > MAX_TOKENS or args.size > length:
        raise UserError(
            f"--seq-length is {length} and --size is {args.size}; give at most {MAX_TOKENS} "
            "tokens, and at least one for each rank"
        )

    window = None
    if args.window:
        window = (args.window, 0 if args.causal else args.window)
    methods = args.methods or (PACKED if cu_seqlens or window else PLAIN)
    drawings = []
    for method in methods:
        drawings.append(drawing(method, length, args.size, args.causal, cu_seqlens, window))

    return draw(drawings)


def read_curves(run: Path, fields: Sequence[str], by: str) -> dict[str, list[tuple[float, float]]]:
    """Read the curve of each field from a run's metrics: pairs of x and value.

    x is in the unit ``by``, a key of ``BY``. If an iteration was repeated, as after a resume, its
    last record counts.

    Raises UserError if the file is missing, a line is not the record of an iteration, or no line
    has the fields.
    """
    from train.callbacks.metrics import read_metrics

    path = run / "metrics.jsonl" if run.is_dir() else run
    if not path.exists():
        raise UserError(f"{path} does not exist; name the folder of a run, or its metrics.jsonl")

    by_iteration = {record["iteration"]: record for record in read_metrics(path)}
    curves: dict[str, list[tuple[float, float]]] = {field: [] for field in fields}
    hours = 0.0
    for iteration, record in sorted(by_iteration.items()):
        hours += (record.get("iteration_time_ms") or 0) / 3.6e6
        if by == "iteration":
            x = iteration
        elif by == "hours":
            x = hours
        else:
            x = record.get("consumed_tokens", 0)
        for field, curve in curves.items():
            if isinstance(record.get(field), int | float):
                curve.append((x, record[field]))

    if not any(curves.values()):
        present = "no iteration"
        if by_iteration:
            present = ", ".join(by_iteration[max(by_iteration)])
        raise UserError(f"{path} has no {' and no '.join(fields)}; it has {present}")

    return curves


def smoothed(points: Sequence[tuple[float, float]], share: float) -> list[tuple[float, float]]:
    """Smooth a curve by an exponential moving average with the decay ``share``.

    Dividing by the sum of the weights corrects for the mean's start at zero.
    """
    mean = 0.0
    weight = 0.0
    means = []
    for x, value in points:
        mean = share * mean + (1 - share) * value
        weight = share * weight + 1 - share
        means.append((x, mean / weight))

    return means


def losses_figure(runs: list[Path], metrics: list[str] | None, by: str, smooth: float) -> "Figure":
    """Draw training loss as a line and validation loss as marks, a colour per run.

    Other fields get a panel each.

    Raises UserError if ``smooth`` is out of range, or as ``read_curves`` does.
    """
    from matplotlib.figure import Figure

    if not 0 <= smooth < 1:
        raise UserError(f"--smooth is {smooth}; it must be at least 0 and below 1")

    requested = metrics or list(LOSSES)
    losses = tuple(field for field in requested if field in LOSSES)
    panels: dict[tuple[str, ...], None] = {}  # an ordered set of tuples
    for field in requested:
        panels[losses if field in LOSSES else (field,)] = None

    figure = Figure(figsize=(8, 4.5 + 2 * (len(panels) - 1)), layout="constrained")
    all_axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for axes, fields in zip(all_axes, panels, strict=True):
        units: set[str] = set()
        for index, run in enumerate(runs):
            colour = PALETTE[index % len(PALETTE)]
            folder = run if run.is_dir() else run.parent
            title = f"{folder.resolve().name}, " if len(runs) > 1 else ""
            curves = read_curves(run, fields, by)
            units |= _draw_curves(axes, curves, smooth, colour, title)

        label = fields[0].replace("_", " ")
        if units:
            label = f"loss ({' or '.join(sorted(units))})"
        axes.set(ylabel=label)
        plain(axes)
        axes.legend(frameon=False)

    axes.set(xlabel=BY[by])
    return figure


def _draw_curves(
    axes: "Axes",
    curves: dict[str, list[tuple[float, float]]],
    smooth: float,
    colour: str,
    title: str,
) -> set[str]:
    """Draw a run's curves in a panel; return the units of its losses."""
    from train.callbacks.metrics import LOSSES as UNITS

    units = set()
    for field, points in curves.items():
        if not points:
            continue
        if field in UNITS:
            units.add(UNITS[field])
        style = "o--"
        if field != "validation_loss":
            style = "-"
            points = smoothed(points, smooth)

        axes.plot(
            *zip(*points, strict=True),
            style,
            color=colour,
            label=title + LOSSES.get(field, field),
            linewidth=1.2,
            markersize=4,
        )

    return units


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Draw layouts or the losses of runs, and save the picture."""
    parser = parser_for("python -m tools.plot", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    layout_help = "the rank of each token, and each round's tiles"
    _add_layout(commands.add_parser("layout", help=layout_help, allow_abbrev=False))
    losses_help = "training and validation loss of runs, or other fields of metrics.jsonl"
    _add_losses(commands.add_parser("losses", help=losses_help, allow_abbrev=False))
    args = parser.parse_args(argv)

    refuse_folder("--output", args.output)
    if args.command == "layout":
        figure = layout_figure(args)
    else:
        figure = losses_figure(args.runs, args.metric, args.by, args.smooth)

    save(figure, args.output, "--output")


def _add_layout(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the layout command."""
    add = parser.add_argument
    mask = parser.add_mutually_exclusive_group().add_argument
    add(
        "--methods",
        nargs="+",
        metavar="METHOD",
        help=(
            "methods to draw (default: ring striped zigzag allgather; "
            "with documents or a window, exchange instead of allgather)"
        ),
    )
    add("--seq-length", type=int, help="number of tokens (default: 32, or all of the documents)")
    add("--size", type=int, default=4, help="number of ranks (default: %(default)s)")
    add(
        "--documents",
        nargs="+",
        type=positive,
        metavar="LENGTH",
        help="numbers of tokens of packed documents",
    )
    add(
        "--window",
        type=positive,
        metavar="TOKENS",
        help=(
            "number of tokens that each token sees before itself and, in full attention, "
            "after itself (default: all)"
        ),
    )
    mask("--causal", dest="causal", action="store_true", default=True, help="causal mask (default)")
    mask("--full", dest="causal", action="store_false", help="full attention")
    add(
        "--output",
        type=Path,
        default=Path("layouts.png"),
        help="picture to write (default: %(default)s)",
    )


def _add_losses(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the losses command."""
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or its metrics.jsonl")
    add(
        "--metric",
        nargs="+",
        metavar="FIELD",
        help="fields of metrics.jsonl to draw; losses share a panel (default: losses)",
    )
    add(
        "--by",
        choices=BY,
        default="iteration",
        help="unit of the horizontal axis (default: %(default)s)",
    )
    add(
        "--smooth",
        type=float,
        default=0.0,
        metavar="SHARE",
        help=(
            "share of the running mean in each point, from 0 to below 1 (default: 0); "
            "validation is not smoothed"
        ),
    )
    add(
        "--output",
        type=Path,
        default=Path("loss.png"),
        help="picture to write (default: %(default)s)",
    )


if __name__ == "__main__":
    run_command(main)
