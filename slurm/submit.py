"""Submit a run to Slurm: a command, a cluster's file and a number of nodes make the script.

python -m slurm.submit --cluster h100 --nodes 4 pretrain_gpt.py --config FILE --save runs/NAME
python -m slurm.submit --cluster FILE --gpus 32 --time 4:00:00 pretrain_gpt.py ...
python -m slurm.submit --cluster FILE --nodes 1 --dry-run pretrain_gpt.py ...  # print the script
python -m slurm.submit --cluster FILE --nodes 1 --array "--lr 1e-3" "--lr 3e-4" -- pretrain_gpt.py

The script is slurm/SCRIPT.sbatch of the cluster's [slurm] table, with this job's options. The run
continues from its newest checkpoint and is queued again until it is finished; the runs of an array
are kept in runs/NAME/0, runs/NAME/1, ...
"""

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

from runtime.errors import UserError
from runtime.progress import counted
from slurm.environment import check_torch
from slurm.script import flag_value, job_script
from slurm.site import HERE, read_site
from slurm.values import check_text
from tools.common.arguments import parser_for, positive, run_command
from train.run import exit_status
from train.tasks.registry import ENTRIES

HINTS: dict[str, str] = tomllib.loads((HERE / "hints.toml").read_text(encoding="utf-8"))


def build_parser() -> argparse.ArgumentParser:
    """Define the job's flags; the run's flags follow the name of its entry script."""
    parser = parser_for("python -m slurm.submit", __doc__)
    add = parser.add_argument
    size = parser.add_mutually_exclusive_group(required=True).add_argument
    add(
        "--cluster",
        required=True,
        metavar="FILE|NAME",
        help="a file with a [slurm] table, or a name such as h100",
    )
    size("--nodes", type=positive, help="number of nodes")
    size("--gpus", type=positive, help="number of GPUs, a multiple of a node's")
    add("--time", metavar="D-HH:MM:SS", help="time limit of one start (default: the script's)")
    add("--name", help="name of the job (default: that of the run's folder)")
    add("--partition", help="partition (default: the cluster file's)")
    add("--account", help="account (default: the cluster file's)")
    add(
        "--lead",
        type=positive,
        default=600,
        metavar="SECONDS",
        help="time before the limit at which ranks are told to save (default: %(default)s)",
    )
    add("--after", metavar="JOB", help="start only after this job has ended without an error")
    add("--array", nargs="+", metavar="FLAGS", help="one run for each quoted word of flags")
    add("--launcher", choices=("ranks", "torchrun"), default="ranks", help="what srun starts")
    add("--container", metavar="IMAGE", help="image that the ranks run in")
    add(
        "--container-runtime",
        choices=("pyxis", "apptainer"),
        help="container runtime (default: pyxis)",
    )
    add("--container-mounts", metavar="A:B,...", help="folders to mount besides the checkout")
    add(
        "--option",
        action="append",
        default=[],
        metavar="X",
        help="further option of sbatch: --option=--KEY=VALUE",
    )
    add("--dry-run", action="store_true", help="print the script, submit nothing")
    add("command", nargs=argparse.REMAINDER, metavar="ENTRY FLAG...", help="entry and its flags")
    return parser


def checked(args: argparse.Namespace, gpus: int) -> tuple[str, list[str], set[str]]:
    """Check the run for the processes of this job; return its folder, its command and its devices.

    The command is without --save. It gets ``--device cuda`` unless the run names a device: by
    default, a rank that finds no GPU would train on the CPU. The devices are "cuda" or "cpu", or
    both in an array.

    Raises UserError if a value is not allowed in a script, the GPUs do not fill whole nodes, or the
    entry itself would refuse the run once the job started.
    """
    check_text(vars(args))
    if args.gpus is not None and args.gpus % gpus:
        raise UserError(
            f"gpus is {args.gpus}, but {args.cluster} has {gpus} per node; give a multiple of "
            f"{gpus}, or --nodes"
        )
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command or command[0] not in ENTRIES:
        name = command[0] if command else "missing"
        raise UserError(f"the entry is {name}; give {' or '.join(ENTRIES)}, and its flags")

    save = None
    devices: set[str] = set()
    world_size = (args.nodes or args.gpus // gpus) * gpus
    for array_flags in args.array or [""]:
        save, device = _check_run(command, array_flags, world_size)
        devices.add(device)
    if save is None:
        raise UserError(
            "save is not set, but a job that is queued again resumes from that folder; give --save "
            "runs/NAME"
        )
    fix = "" if args.name else "; give one with --name"
    check_text({"name": args.name or Path(save).name}, fix=fix)

    flags: list[str] = []
    for previous, word in pairwise(command):
        if "--save" not in (previous, word.split("=")[0]):
            flags.append(word)
    if "auto" in devices:
        flags = ["--device", "cuda", *flags]
    device_types = {"cpu" if device == "cpu" else "cuda" for device in devices}
    return save, [command[0], *flags], device_types


def _check_run(command: list[str], array_flags: str, world_size: int) -> tuple[str | None, str]:
    """Check one run with its flags from --array; return its folder and its device."""
    entry = ENTRIES[command[0]]
    flags = command[1:]
    try:
        words = shlex.split(array_flags)
    except ValueError as error:
        raise UserError(
            f"array is {array_flags!r} ({error}); quote each run's flags as for a shell"
        ) from error

    config = entry.parse_args([*flags, *words])
    place = "" if flag_value(flags, "--save") else f"{flag_value(flags, '--config')}: "
    check_text({"save": config.checkpoint.save}, place)
    if config.dry.dry_run:
        raise UserError(
            "dry_run is among the run's flags, but a job trains until the run is finished; start "
            "the entry with --dry-run by hand (--dry-run before the entry prints the job's script)"
        )
    if any(word.partition("=")[0] == "--save" for word in words):
        raise UserError(
            f"save is in {array_flags!r} of --array, but an array's runs have numbered folders in "
            "one folder; give --save after the entry"
        )
    entry.validate(config.updated(device="cuda"), world_size)
    return config.checkpoint.save, config.mesh.device


def check_login_node() -> None:
    """Raise UserError if this machine has no sbatch, so it is no login node."""
    if shutil.which("sbatch") is None:
        raise UserError(
            "there is no sbatch here; start on a login node, or print the script with --dry-run"
        )


def submit(text: str) -> str:
    """Pass a script to sbatch, and return its output.

    Raises UserError if sbatch refuses the script; the message has sbatch's words and a hint.
    """
    check_login_node()
    result = subprocess.run(["sbatch"], input=text, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        return result.stdout.strip()
    words = " ".join(result.stderr.split()).removeprefix("sbatch: error: ")
    hints = [hint for pattern, hint in HINTS.items() if re.search(pattern, words)]
    hint = hints[0] if hints else "look at the script with --dry-run"
    raise UserError(f"sbatch refused the job: {words}; {hint}")


def main(argv: list[str]) -> int:
    """Run the command; return its exit status."""

    def command(argv: list[str]) -> None:
        from planner.dry_run import with_files  # imports torch, which --help does not need

        args = build_parser().parse_args(argv)
        site, gpus = read_site(args.cluster)
        save, run, devices = checked(args, gpus)
        text = job_script(args, site, gpus, save, run)
        notes = []
        if "cpu" in devices:
            notes.append(
                f"note: device is cpu, so the job's {counted(gpus, 'GPU')} a node will be idle"
            )
        if "cuda" in devices:
            try:
                check_torch(gpus, args.container)
            except UserError as error:
                if not args.dry_run:
                    raise
                notes.append(f"note: as it is, the job would be refused: {error}")

        if args.dry_run:
            print(text, end="")
        else:
            print(submit(text))
        config = ENTRIES[run[0]].parse_args([*run[1:], "--save", save])
        notes += with_files(config)[1]
        for note in notes:
            print(note, file=sys.stderr)

    return exit_status(command, argv)


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
