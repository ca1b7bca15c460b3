r"""Measure the devices at hand, and the links between the processes started, and write a cluster file for the planner.

python -m tools.calibrate --out laptop.toml --links configs/clusters/cpu.toml      # alone: links as in that file
torchrun --nproc-per-node 4 -m tools.calibrate --out laptop.toml --links configs/clusters/cpu.toml
srun --nodes 2 --ntasks-per-node 8 python -m tools.calibrate --out pod.toml --name "our pod"
python -m tools.plan --config configs/llama_tiny.toml --cluster laptop.toml --context-parallel-size 4 \
    --vocab-size 8192

Links inside nodes need two processes on each, links between nodes two nodes. What was not measured, and is not taken
from --links, stands in the file as a comment, and the planner names it. On a CPU every process has one thread.
"""

import argparse
import json
import socket
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import torch

from bench import calibration, ceilings
from bench.calibration import LENGTHS, WIDTHS, Figures
from bench.rounds import add_sizes, sizes_of
from bench.workload import Workload
from parallel.mesh import MeshConfig, distributed_mesh
from planner.cluster import Cluster, load_cluster
from runtime.errors import UserError
from runtime.files import unwritable, write_text
from runtime.machine import describe, in_words
from runtime.together import from_first, is_first
from runtime.words import counted
from tools.arguments import parser_for, positive
from train.run import run_entry

ABOUT_LINKS = [entry.name for entry in fields(Cluster) if entry.name.startswith(("inside_", "between_"))]


def build_parser() -> argparse.ArgumentParser:
    """Build the command line's parser."""
    parser = parser_for("python -m tools.calibrate", __doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path("cluster.toml"), metavar="FILE", help="to write (default: %(default)s)")
    add("--force", action="store_true", help="replace FILE")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda where there is one")
    add("--name", help="a few words for the planner's output (default: processes and device)")
    add("--links", type=Path, metavar="FILE", help="cluster file with the links that cannot be measured here")
    add_sizes(parser, num_heads=None, head_dim=None, batch=1)
    add("--lengths", type=positive, nargs="+", metavar="N", help="tokens of a process, at which to measure attention")
    return parser


def checked(args: argparse.Namespace) -> Cluster | None:
    """Return the cluster of --links. Raises UserError: it cannot be read, or the output exists or cannot be written."""
    folder = args.out.parent
    if not folder.is_dir():
        raise UserError(f"--out is {args.out}, and there is no folder {folder}; make it, or give another --out")
    if args.out.is_dir() or (args.out.exists() and not args.force):
        fix = "give a file" if args.out.is_dir() else "give --force to replace it, or another --out"
        raise UserError(f"--out is {args.out}, which exists; {fix}")
    if why := unwritable(folder, "give another --out"):
        raise UserError(f"--out is {args.out}, in {folder}, {why}")
    return load_cluster(args.links) if args.links else None


def text_of(name: str, device: str, figures: Figures, links: Cluster | None, about: list[str]) -> str:
    """Return a cluster file's text: ``about`` as comments, then a line for each figure, or its name as missing."""
    lines = [*(f"# {line}" for line in about), ""]
    known: Figures = {"name": (name, ""), "device": (device, ""), **figures}
    for entry in fields(Cluster):
        value, said = known.get(entry.name, (None, ""))
        if value is None and links is not None and entry.name in ABOUT_LINKS:
            value, said = getattr(links, entry.name), f"not measured: of {' '.join(links.name.split())}"
        if value is not None:
            written = f"{value:.4g}" if isinstance(value, float) else json.dumps(value)
            lines.append(f"{entry.name} = {written}" + (f"  # {said}" if said else ""))
        elif entry.default is MISSING:
            lines.append(f"# {entry.name} is missing: not measured by the processes started; add it")
    return "\n".join(lines) + "\n"


def calibrate(argv: list[str]) -> None:
    """Measure and write. Raises UserError: bad flags, or what cannot be measured."""
    args = build_parser().parse_args(argv)
    torch.set_num_threads(1)
    with distributed_mesh(MeshConfig(device=args.device)) as mesh:
        device, world_size = mesh.device, mesh.dp.size()
        links = from_first(lambda: checked(args))
        sizes: dict[str, Any] = {**WIDTHS[device.type], **{k: v for k, v in sizes_of(args).items() if v}}
        work = Workload(
            **{**sizes, "kv_heads": sizes["num_heads"]}, dtype="float32" if device.type == "cpu" else "bfloat16"
        )

        def say(line: str) -> None:
            if is_first():
                print(line, flush=True)

        lengths = tuple(sorted(args.lengths or LENGTHS[device.type]))
        figures = calibration.measure(device, work, lengths, say)
        if not is_first():
            return
        copies = ceilings.copy_bandwidth(device.type)
        say(f"copies inside the memory: {copies:.4g} GB/s read and written")
        machine = describe(device.type)
        name = args.name or f"{world_size} x {machine['device']}"
        about = [
            f"Measured by python -m tools.calibrate on {socket.gethostname()}: {in_words(machine)}.",
            f"{counted(world_size, 'process')}; copies inside the memory {copies:.4g} GB/s, which the planner does not "
            "count.",
        ]
        text = text_of(name, device.type, figures, links, about)
        write_text(args.out, text)
        missing = [key for key in ABOUT_LINKS if f"# {key} is missing" in text]
        print(f"written: {args.out}")
        if missing:
            print(f"not measured, and missing there: {', '.join(missing)}")
            print("start it on two nodes, with two processes on each, or take what is missing from --links FILE")


if __name__ == "__main__":
    run_entry(calibrate)
