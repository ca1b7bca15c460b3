"""Train a small diffusion transformer on long videos and tell what memory each process needs, by length and processes.

Each row is a few iterations of pretrain_dit.py, float32, on one video per iteration of 3D latents of noise (4
channels, 64 x 64, in patches of 2 x 2) whose frames give the length; keys and values of all patches go round the
processes, and layers keep their inputs and the attention's results alone (--recompute-granularity
attention_boundary). "MiB" is what the largest process grew by during the iterations beyond what it held before the
first one (the highest resident set that Linux counted, VmHWM, with malloc told to give back every block of 64 KiB or
more); "s" is the fastest iteration after the first one, the processes sharing this machine's cores.

    python -m bench.video                                           # 4,096 to 32,768 patches on 1 and 4 processes
    python -m bench.video --frames 32 --processes 4 --method ulysses
    python -m bench.video --json bench/results/video-NAME.jsonl
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import pretrain_dit
from bench.memory import CLEAR, ENVIRONMENT, status
from data.latents.writer import write_latents
from runtime.errors import UserError
from testing.machine import describe
from testing.ranks import run_ranks
from testing.records import write_records
from testing.training import Records, trainer_of
from tools.arguments import parser_for

CHANNELS, SIDE, PATCH = 4, 64, 2
METHODS = ("ring", "allgather", "wallfacer", "ulysses", "double_ring")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The model to train, and the number of iterations."""

    num_layers: int = 2
    hidden_size: int = 64
    num_attention_heads: int = 2
    train_iters: int = 4


SIZES = {
    "num_layers": "layers",
    "hidden_size": "channels",
    "num_attention_heads": "heads",
    "train_iters": "iterations, of which the first is not timed",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A finished case."""

    patches: int
    processes: int
    resident_mib: float
    seconds: float
    loss: float

    def __str__(self) -> str:
        figures = f"{self.resident_mib:,.0f} | {self.seconds:.1f} | {self.loss:.4f}"
        return f"| {self.patches:,} | {self.processes} | {self.patches // self.processes:,} | {figures} |"


HEADER = """\
| patches | processes | patches of each | MiB of each | s | loss |
| --- | --- | --- | --- | --- | --- |"""


def train(rank: int, world_size: int, flags: Sequence[str]) -> tuple[float, list[dict[str, Any]]]:
    """Return the bytes that this process grew by in the iterations, and on the first rank their records."""
    log = Records()
    with trainer_of(pretrain_dit, flags, log) as trainer:
        before = status("VmRSS")
        if before is not None:
            CLEAR.write_text("5")  # resets VmHWM
        trainer.run()
        after = status("VmHWM")
    return float("nan") if before is None or after is None else after - before, log.records


def measure(folder: Path, frames: int, processes: int, method: str, shape: Shape) -> Row:
    """Measure one case in fresh processes; write the latents if they are missing."""
    data = folder / str(frames)
    if not data.exists():
        noise = np.random.RandomState(0).standard_normal((2, CHANNELS, frames, SIDE, SIDE)).astype(np.float32)
        write_latents(data, [(noise, np.array([0, 1]))])
    flags = [*f"--latent-shape {CHANNELS} {frames} {SIDE} {SIDE} --patch-size {PATCH} --num-classes 2".split()]
    flags += ["--data-path", str(data), "--split", "50,50", "--eval-iters", "0", "--device", "cpu"]
    flags += ["--recompute-granularity", "attention_boundary", "--log-interval", "1000"]
    flags += ["--context-parallel-size", str(processes), "--context-parallel-method", method]
    if method == "wallfacer" and processes % 4 == 0:
        flags += ["--context-parallel-team-size", "2"]
    for name, value in asdict(shape).items():
        flags += [f"--{name.replace('_', '-')}", str(value)]
    pretrain_dit.validate(pretrain_dit.parse_args(flags), processes)
    ranks = run_ranks(train, processes, flags, timeout=1800.0)
    records = ranks[0][1]
    return Row(
        patches=frames * (SIDE // PATCH) ** 2,
        processes=processes,
        resident_mib=max(grown for grown, _ in ranks) / 2**20,
        seconds=min(record["iteration_time_ms"] for record in records[1:]) / 1e3,
        loss=records[-1]["diffusion_loss"],
    )


def parser() -> argparse.ArgumentParser:
    """Build the command line's parser."""
    found = parser_for("python -m bench.video", __doc__)
    found.add_argument("--frames", type=int, nargs="+", default=[4, 8, 16, 32], help="lengths, 1,024 patches a frame")
    found.add_argument("--processes", type=int, nargs="+", default=[1, 4], help="default: 1 4")
    found.add_argument("--method", choices=METHODS, default="ring", help="default: %(default)s")
    for name, value in asdict(Shape()).items():
        flag = name.replace("_", "-")
        found.add_argument(f"--{flag}", type=int, default=value, help=f"{SIZES[name]} (default: %(default)s)")
    found.add_argument("--json", type=Path, metavar="PATH", help="write every figure here too, as JSON lines")
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    args = parser().parse_args(argv)
    os.environ.update(ENVIRONMENT)  # before the fork server starts: its malloc reads it
    shape = Shape(**{name: getattr(args, name) for name in asdict(Shape())})
    try:
        if shape.train_iters < 2 or min(*args.frames, *args.processes, 1) < 1:
            raise UserError(
                f"train_iters is {shape.train_iters}, frames {args.frames}, processes {args.processes}; the first must "
                "be 2 or more, since the first iteration is not timed, the others 1 or more"
            )
        print(HEADER, flush=True)
        rows = []
        with tempfile.TemporaryDirectory() as folder:
            for frames in args.frames:
                for processes in args.processes:
                    rows.append(measure(Path(folder), frames, processes, args.method, shape))
                    print(rows[-1], flush=True)
        if args.json:
            found: dict[str, Any] = {"benchmark": "long videos, memory of each process", "machine": describe("cpu")}
            found |= {"method": args.method, "shape": asdict(shape), "rows": [asdict(row) for row in rows]}
            write_records(args.json, found)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
