"""Check that your run, shrunk, computes the same on its mesh as in one process.

python -m tools.parity llama_tiny
python -m tools.parity runs/mine/config.toml --context-parallel-method ulysses \\
    --recompute-granularity full
python -m tools.parity llama3_8b --pipeline-model-parallel-size 2 --global-batch-size 64 \\
    --world-size 64

RUN is the name of a model of configs/models, a configuration's file, or a run's folder, and
--config may name it as in training; flags override it. The run gets the fewest layers that include
every kind, narrow heads, a short sequence and at most 8 processes; a dimension of the mesh above 1
stays above 1 if 8 processes allow it. The run takes two steps on a few samples of its own data
(made-up ones if there are none yet) in float32 on the CPU, and so does one process with plain
attention. The two are compared in the order of a step: initial weights, the batch, the output of
every module, the loss, every gradient, their norm, the second step and the validation. The first
difference is printed, with its size, and the exit status is 1. The command takes from seconds to a
few minutes.
"""

import sys
from pathlib import Path

from tools.common.arguments import parser_for, positive, run_command
from tools.fit import parsed
from tools.parity.own import compared, report
from train.config.common import CommonConfig
from train.run import exit_status


def configured(path: Path, flags: list[str]) -> CommonConfig:
    """Read a configuration for pretrain_gpt.py or pretrain_dit.py, and override it by flags.

    ``path`` is its file, or a run's folder.

    Raises UserError if the file cannot be read, or if a flag does not suit it.
    """
    file = path / "config.toml" if path.is_dir() else path
    return parsed(["--config", str(file), *flags])


def parity(argv: list[str]) -> None:
    """Compare the run on its mesh with one process, and print the result.

    The exit status is 1 if anything differs.

    Raises UserError if the run cannot be shrunk or started.
    """
    parser = parser_for("python -m tools.parity", __doc__)
    parser.add_argument(
        "run",
        type=Path,
        metavar="RUN",
        help="a model's name, a configuration's file, or a run's folder",
    )
    parser.add_argument(
        "--world-size",
        type=positive,
        metavar="N",
        help="number of processes of the run (default: for 2 data-parallel ranks if possible)",
    )
    words = [word.removeprefix("--config=") for word in argv if word != "--config"]
    args, flags = parser.parse_known_args(words)

    def print_progress(line: str) -> None:
        print(line, flush=True)

    config = configured(args.run, flags)
    differences = compared(config, args.world_size, say=print_progress)
    print(report(differences), flush=True)
    if not all(difference.within for difference in differences):
        raise SystemExit(1)


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    return exit_status(parity, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    run_command(main)
