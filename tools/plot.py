"""Pictures: who owns which token and each round's tiles of a method, packed documents, and the loss of runs.

python -m tools.plot layout --size 4 --seq-length 32 --output layouts.png
python -m tools.plot layout --methods ring striped --full --output full.png
python -m tools.plot layout --documents 20 5 11 3 14 7 4 --window 8 --output packed.png
python -m tools.plot arcs --documents 1300 180 620 90 900 --size 3 --output arcs.png
python -m tools.plot loss runs/llama_tiny runs/second --output loss.png
python -m tools.plot loss runs/llama_tiny --learning-rate --output longer.png
"""

import argparse
import sys
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:  # started as a file: the packages lie one folder up
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.errors import UserError
from tools.arguments import parser_for, positive

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOSSES = {"lm_loss": "training", "diffusion_loss": "training", "validation_loss": "validation"}
RATE = "learning_rate"
LARGEST_PICTURE = 512
LARGEST_ARCS = 16
ARCS = [1300, 180, 620, 90, 900, 260, 410, 336]
"""Tokens of the documents that ``arcs`` draws by default: those of docs/concepts/packed.md."""


def build_parser() -> argparse.ArgumentParser:
    """Build the command line's parser."""
    parser = parser_for("python -m tools.plot", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    layout = commands.add_parser("layout", help="who owns which token, and each round's tiles", allow_abbrev=False)
    methods = "default: ring striped zigzag allgather; with documents or a window exchange, not allgather"
    layout.add_argument("--methods", nargs="+", metavar="METHOD", help=methods)
    layout.add_argument("--seq-length", type=int, help="tokens (default: 32, or those of the documents)")
    _add_mask(layout)
    layout.add_argument("--output", type=Path, default=Path("layouts.png"), help="default: %(default)s")
    arcs = commands.add_parser("arcs", help="how the layout balanced divides packed documents", allow_abbrev=False)
    _add_mask(arcs)
    arcs.set_defaults(documents=ARCS)
    arcs.add_argument("--output", type=Path, default=Path("arcs.png"), help="default: %(default)s")
    loss = commands.add_parser("loss", help="training and validation loss of runs", allow_abbrev=False)
    loss.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or its metrics.jsonl")
    loss.add_argument("--learning-rate", action="store_true", help="draw the learning rate too, below")
    loss.add_argument("--output", type=Path, default=Path("loss.png"), help="default: %(default)s")
    return parser


def _add_mask(parser: argparse.ArgumentParser) -> None:
    """Add the ranks, and what their tokens see."""
    parser.add_argument("--size", type=int, default=4, help="ranks (default: %(default)s)")
    parser.add_argument("--documents", nargs="+", type=positive, metavar="LENGTH", help="tokens of packed documents")
    window = "tokens that each sees before itself, in full attention behind itself too; default: all"
    parser.add_argument("--window", type=positive, metavar="TOKENS", help=window)
    mask = parser.add_mutually_exclusive_group()
    mask.add_argument("--causal", dest="causal", action="store_true", default=True, help="causal mask (default)")
    mask.add_argument("--full", dest="causal", action="store_false", help="full attention")


def layout_figure(args: argparse.Namespace) -> "Figure":
    """Draw methods, by default ``PLAIN``, or ``PACKED`` under documents or a window.

    Raises:
        UserError: an unknown method, documents of another length, or a picture too large to read.
    """
    from tools.pictures.layouts import PACKED, PLAIN, draw, drawing

    lengths, length = args.documents, args.seq_length
    if lengths and length not in (None, sum(lengths)):
        raise UserError(f"--seq-length is {length} and --documents have {sum(lengths)} tokens; leave --seq-length out")
    length = sum(lengths) if lengths else 32 if length is None else length
    if length > LARGEST_PICTURE or args.size > length:
        raise UserError(
            f"--seq-length is {length} and --size {args.size}; a picture shows up to {LARGEST_PICTURE} tokens, and at "
            "least one for each rank"
        )
    documents = (0, *accumulate(lengths)) if lengths else None
    window = (args.window, 0 if args.causal else args.window) if args.window else None
    methods = args.methods or (PACKED if documents or window else PLAIN)
    return draw([drawing(method, length, args.size, args.causal, documents, window) for method in methods])


def arcs_figure(args: argparse.Namespace) -> "Figure":
    """Draw documents on a circle, and its cuts.

    Raises:
        UserError: a single rank, or a picture too large to read.
    """
    from tools.pictures.arcs import draw
    from tools.pictures.discs import drawing

    if not 2 <= args.size <= min(LARGEST_ARCS, sum(args.documents)):
        raise UserError(
            f"--size is {args.size} and --documents have {sum(args.documents)} tokens; a picture shows 2 to "
            f"{LARGEST_ARCS} ranks, and at least a token for each"
        )
    return draw(drawing(args.documents, args.size, args.causal, args.window))


def read_losses(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Read a run's (iteration, value) pairs by field; a repeated iteration, as after a resume, counts as last written.

    Raises:
        UserError: the file is missing, or a line is not the record of an iteration.
    """
    from train.metrics import read_metrics

    path = run / "metrics.jsonl" if run.is_dir() else run
    if not path.exists():
        raise UserError(f"{path} does not exist; name the folder of a run, or its metrics.jsonl")
    found: dict[str, dict[int, float]] = {field: {} for field in (*LOSSES, RATE)}
    for record in read_metrics(path):
        for field, values in found.items():
            if record.get(field) is not None:
                values[record["iteration"]] = record[field]
    if not any(found[field] for field in LOSSES):
        raise UserError(f"{path} holds no lm_loss and no diffusion_loss")
    return {field: sorted(values.items()) for field, values in found.items()}


def loss_figure(runs: list[Path], learning_rate: bool = False) -> "Figure":
    """Draw training loss as a line, validation loss as marks, a colour per run; optionally the learning rates below."""
    from matplotlib.figure import Figure

    from tools.pictures import PALETTE
    from train.metrics import LOSSES as UNITS

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    ratios = (3, 1) if learning_rate else (1,)
    axes, *below = figure.subplots(len(ratios), sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    units = set[str]()
    for index, run in enumerate(runs):
        losses, colour = read_losses(run), PALETTE[index % len(PALETTE)]
        name = (run if run.is_dir() else run.parent).resolve().name
        for rates in below:
            rates.plot(*zip(*losses[RATE], strict=True), color=colour, linewidth=1.2)
        for field, values in losses.items():
            if values and field in LOSSES:
                units |= {UNITS[field]} if field in UNITS else set()
                label = LOSSES[field] if len(runs) == 1 else f"{name}, {LOSSES[field]}"
                style = "o--" if field == "validation_loss" else "-"
                axes.plot(*zip(*values, strict=True), style, color=colour, label=label, linewidth=1.2, markersize=4)
    axes.set(ylabel=f"loss ({' or '.join(sorted(units))})")
    for rates in below:
        rates.set(ylabel="learning rate", ylim=(0, None))
    for panel in (axes, *below):
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    [axes, *below][-1].set(xlabel="iteration")
    axes.legend(frameon=False)
    return figure


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    args = build_parser().parse_args(argv)
    try:
        if args.command == "layout":
            figure = layout_figure(args)
        elif args.command == "arcs":
            figure = arcs_figure(args)
        else:
            figure = loss_figure(args.runs, args.learning_rate)
        args.output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(args.output, dpi=120)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"written: {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
