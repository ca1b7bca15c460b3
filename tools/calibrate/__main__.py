r"""Measure the devices and links at hand, and write a cluster file for the planner.

python -m tools.calibrate --out laptop.toml --links configs/clusters/cpu.toml  # links of that file
torchrun --nproc-per-node 4 -m tools.calibrate --out laptop.toml --links configs/clusters/cpu.toml
srun --nodes 2 --ntasks-per-node 8 python -m tools.calibrate --out pod.toml --name "our pod"
python -m tools.plan --config configs/models/llama_tiny.toml --cluster laptop.toml \
    --context-parallel-size 4 --vocab-size 8192
python -m tools.calibrate --ceilings  # peak rates of copies and matmuls on all cores; no file

To measure links inside nodes, start two processes on each node; for links between nodes, start two
nodes. A figure that was neither measured nor taken from --links becomes a comment in the file, and
the planner names it as missing. On a CPU every process has one thread.

All ranks measure at once, since those of a node may share cores, memory and network adapters. A
figure of the devices is the median over ranks; a link is timed by the slowest rank. For short work
the mean over repetitions counts, not the median: a rank that shares a core sometimes waits for it
longer than the work itself takes.
"""

import argparse
import json
import socket
from dataclasses import MISSING, fields
from pathlib import Path

import torch

from parallel.mesh import MeshConfig, distributed_mesh
from planner.cluster import Cluster, load_cluster
from runtime.errors import UserError
from runtime.files import unwritable, write_text
from runtime.machine import describe, in_words
from runtime.progress import counted
from runtime.together import from_first, is_first
from tools.calibrate.devices import Figures
from tools.calibrate.measure import measure
from tools.common.arguments import parser_for, positive, refuse_folder
from tools.common.ceilings import print_ceilings
from tools.common.report import write_records
from tools.common.shapes import AttentionShape
from train.run import run_entry

LENGTHS = {"cpu": (256, 512, 1024, 2048), "cuda": (2048, 4096, 8192, 16384)}
HEADS = {"cpu": 8, "cuda": 32}
HEAD_DIMS = {"cpu": 64, "cuda": 128}
ABOUT_LINKS = [
    entry.name for entry in fields(Cluster) if entry.name.startswith(("inside_", "between_"))
]


def checked(args: argparse.Namespace) -> Cluster | None:
    """Check the files of the command line; return the cluster of --links, if given.

    Raises UserError if --links cannot be read, or if --out exists or cannot be written.
    """
    refuse_folder("--out", args.out)
    if args.out.exists() and not args.force:
        raise UserError(
            f"--out is {args.out}, but that exists; give --force to replace it, or another --out"
        )

    why = unwritable(args.out.parent, "give another --out")
    if why:
        raise UserError(f"--out is {args.out}, in {args.out.parent}, {why}")

    return load_cluster(args.links) if args.links else None


def text_of(
    name: str, device: str, figures: Figures, links: Cluster | None, about: list[str]
) -> str:
    """Return a cluster file's text: ``about`` as comments, then a line for each figure.

    A figure of links that was not measured is taken from ``links``; other figures that were not
    measured are named as missing, if the planner needs them.
    """
    lines = [*(f"# {line}" for line in about), ""]
    values: Figures = {"name": (name, ""), "device": (device, ""), **figures}
    for entry in fields(Cluster):
        value, origin = values.get(entry.name, (None, ""))
        if value is None and links is not None and entry.name in ABOUT_LINKS:
            value = getattr(links, entry.name)
            origin = f"not measured: taken from {' '.join(links.name.split())}"
        if value is not None:
            written = f"{value:.4g}" if isinstance(value, float) else json.dumps(value)
            line = f"{entry.name} = {written}"
            if origin:
                line += f"  # {origin}"
            lines.append(line)
        elif entry.default is MISSING:
            lines.append(
                f"# {entry.name} is missing: the started processes could not measure it; add it"
            )

    return "\n".join(lines) + "\n"


def calibrate(argv: list[str]) -> None:
    """Measure, and write a cluster file or print the peak rates.

    Raises UserError for invalid flags, or if something cannot be measured.
    """
    args = _parse(argv)
    if args.ceilings:
        ceilings = print_ceilings(args.device)
        if args.json:
            write_records(args.json, ceilings)
        return

    torch.set_num_threads(1)
    with distributed_mesh(MeshConfig(device=args.device)) as mesh:
        device = mesh.device
        links = from_first(lambda: checked(args))
        heads = args.num_heads or HEADS[device.type]
        work = AttentionShape(
            batch=args.batch,
            num_heads=heads,
            kv_heads=heads,
            head_dim=args.head_dim or HEAD_DIMS[device.type],
            dtype="float32" if device.type == "cpu" else "bfloat16",
        )
        lengths = tuple(sorted(args.lengths or LENGTHS[device.type]))
        figures = measure(device, work, lengths)
        if is_first():
            _write(args, device.type, mesh.dp.size(), figures, links)


def _write(
    args: argparse.Namespace,
    device: str,
    world_size: int,
    figures: Figures,
    links: Cluster | None,
) -> None:
    """Write the cluster file, and print the figures that it lacks."""
    machine = describe(device)
    name = args.name or f"{world_size} x {machine['device']}"
    about = [
        f"Measured by python -m tools.calibrate on {socket.gethostname()}: {in_words(machine)}.",
        f"{counted(world_size, 'process')} at once.",
    ]
    text = text_of(name, device, figures, links, about)
    write_text(args.out, text)
    print(f"written: {args.out}")

    missing = [key for key in ABOUT_LINKS if f"# {key} is missing" in text]
    if missing:
        print(f"not measured, and missing from the file: {', '.join(missing)}")
        print(
            "start tools.calibrate on two nodes, with two processes on each, or take the missing "
            "figures from --links FILE"
        )


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = parser_for("python -m tools.calibrate", __doc__)
    add = parser.add_argument
    add(
        "--out",
        type=Path,
        default=Path("cluster.toml"),
        metavar="FILE",
        help="cluster file to write (default: %(default)s)",
    )
    add("--force", action="store_true", help="replace FILE if it exists")
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="device to measure (default: a GPU if there is one)",
    )
    add("--name", help="cluster's name in the planner's output (default: processes and device)")
    add(
        "--links",
        type=Path,
        metavar="FILE",
        help="cluster file that supplies the figures of links that cannot be measured here",
    )
    add("--num-heads", type=positive, metavar="N", help="number of heads of the measured attention")
    add("--head-dim", type=positive, metavar="N", help="number of channels per head")
    add(
        "--batch",
        type=positive,
        default=1,
        metavar="N",
        help="number of sequences in a batch of the measured attention (default: %(default)s)",
    )
    add(
        "--ceilings",
        action="store_true",
        help="measure one device's maximum rates, and write no cluster file",
    )
    add(
        "--json",
        type=Path,
        metavar="PATH",
        help="with --ceilings: file to write the rates to, as JSON lines",
    )
    add(
        "--lengths",
        type=positive,
        nargs="+",
        metavar="N",
        help="numbers of tokens per process at which to measure attention",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_entry(calibrate)
