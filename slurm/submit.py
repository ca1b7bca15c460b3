"""Submit a run to Slurm: a run's command, a cluster's file and a number of nodes make the job's
script.

python -m slurm.submit --cluster configs/clusters/h100_pod.toml --nodes 4 pretrain_gpt.py --config
FILE --save runs/NAME python -m slurm.submit --cluster FILE --gpus 32 --time 4:00:00 --dry-run
pretrain_gpt.py ...    only print the script python -m slurm.submit --cluster FILE --nodes 1 --array
"--lr 1e-3" "--lr 3e-4" -- pretrain_gpt.py ...    a sweep

The script is slurm/SCRIPT.sbatch of the cluster's [slurm] table, with this job's options. The run
goes on from its newest checkpoint and is queued again until it is finished; an array's runs are
kept in runs/NAME/0, runs/NAME/1, ...
"""

import argparse
import math
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path

from planner.cluster import ClusterError, cluster_file, load_cluster
from runtime.errors import UserError, printable
from runtime.progress import counted
from slurm.environment import DEFAULT_PYTHON, check_torch, digest_of_sources, interpreter
from slurm.header import COMMENTS, header
from slurm.values import check_text
from tools.common.arguments import parser_for, positive, run_command
from train.run import exit_status
from train.tasks.registry import ENTRIES

HERE = Path(__file__).resolve().parent
HINTS: dict[str, str] = tomllib.loads((HERE / "hints.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, kw_only=True)
class Site:
    """The [slurm] table of a cluster's file: what its Slurm calls things."""

    script: str
    """Script of this folder to start from: a100 or h100."""
    gpu: str | None = None
    """Name of the GPU in --gres; none asks for any."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    """Features that nodes must have, as sbatch takes them."""
    cpus_per_gpu: int | None = None
    """CPUs that a node must have for each rank, threads of a core counted apart; the script's 12 if
    left out.
    """
    interface: str | None = None
    """Network interface of NCCL and gloo; by default the one that a node's name leads to."""


def read_site(path: str) -> tuple[Site, int]:
    """Return the [slurm] table of a cluster's file or name, and its GPUs per node.

    Raises UserError naming the file, the key and the fix.
    """
    check_text({"cluster": path})
    gpus = load_cluster(path).gpus_per_node
    table = tomllib.loads(cluster_file(path).read_text(encoding="utf-8")).get("slurm")
    scripts = sorted(file.stem for file in HERE.glob("*.sbatch"))
    if not isinstance(table, dict) or table.get("script") not in scripts:
        found = table.get("script") if isinstance(table, dict) else table
        said = "[slurm] names no script" if found is None else f"script of [slurm] is {found!r}"
        raise ClusterError(
            f"{path}: {said}; add one of {', '.join(scripts)}, or name the file of a Slurm cluster"
        )
    kinds = {entry.name: entry.type for entry in fields(Site)}
    for name, value in table.items():
        if name not in kinds:
            raise ClusterError(
                f"{path}: unknown key {name!r} of [slurm]; known are {', '.join(kinds)}"
            )
        if type(value) is not (int if "int" in str(kinds[name]) else str) or (
            type(value) is int and value < 1
        ):
            raise ClusterError(
                f"{path}: {name} of [slurm] is {value!r}; it must be of type {kinds[name]}"
            )
    check_text(table, f"{path}: [slurm] ")
    return Site(**table), gpus


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of a job's own flags; the run's follow its entry."""
    parser = parser_for("python -m slurm.submit", __doc__)
    add, size = parser.add_argument, parser.add_mutually_exclusive_group(required=True).add_argument
    add(
        "--cluster",
        required=True,
        metavar="FILE|NAME",
        help="a file with a [slurm] table, or a name such as h100",
    )
    size("--nodes", type=positive, help="nodes of the job")
    size("--gpus", type=positive, help="GPUs of the job, a multiple of a node's")
    add("--time", metavar="D-HH:MM:SS", help="limit of one start (default: the script's)")
    add("--name", help="name of the job (default: that of the run's folder)")
    add("--partition", help="partition (default: the cluster file's)")
    add("--account", help="account (default: the cluster file's)")
    add("--lead", type=positive, default=600, metavar="SECONDS", help="before the limit, to save")
    add("--after", metavar="JOB", help="start when that job has ended without an error")
    add("--array", nargs="+", metavar="FLAGS", help="a run for each of these flags, each one word")
    add("--launcher", choices=("ranks", "torchrun"), default="ranks", help="what srun starts")
    add("--container", metavar="IMAGE", help="image that the ranks run in")
    add("--container-runtime", choices=("pyxis", "apptainer"), help="default: pyxis")
    add("--container-mounts", metavar="A:B,...", help="folders that it sees besides the checkout")
    add(
        "--option",
        action="append",
        default=[],
        metavar="X",
        help="for sbatch: --option=--KEY=VALUE",
    )
    add("--dry-run", action="store_true", help="print the script, submit nothing")
    add("command", nargs=argparse.REMAINDER, metavar="ENTRY FLAG...", help="the run")
    return parser


def options(args: argparse.Namespace, site: Site, gpus: int, save: str) -> dict[str, str]:
    """Return sbatch's options for this job. Raises UserError if its time is none, or over before
    the ranks save.
    """
    kind = f":{site.gpu}" if site.gpu else ""
    wanted = {
        "job-name": shlex.quote(args.name or Path(save).name),
        "nodes": str(args.nodes or args.gpus // gpus),
        "ntasks-per-node": str(gpus),
        "gres": f"gpu{kind}:{gpus}",
        "cpus-per-task": str(site.cpus_per_gpu) if site.cpus_per_gpu else None,
        "time": args.time,
        "signal": f"B:USR1@{args.lead}",
        "partition": args.partition or site.partition,
        "account": args.account or site.account,
        "qos": site.qos,
        "constraint": site.constraint,
        "dependency": args.after and f"afterok:{args.after}",
        "array": args.array and f"0-{len(args.array) - 1}",
        "output": "%x-%A_%a.log" if args.array else None,
    }
    for option in args.option:
        key, _, value = option.removeprefix("--").partition("=")
        wanted[key] = value and shlex.quote(value)
    if wanted["dependency"] is not None:
        wanted.setdefault("kill-on-invalid-dep", "yes")
    if wanted["time"] is not None and _seconds(wanted["time"]) <= args.lead:
        raise UserError(
            f"time is {wanted['time']}, and the ranks are told to save {args.lead} s before it is over; give more "
            "--time, or less --lead"
        )
    return {key: value for key, value in wanted.items() if value is not None}


def _seconds(limit: str) -> float:
    """Return the seconds of a limit as sbatch takes it: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S, or a
    word for none.
    """
    if limit.upper() in ("UNLIMITED", "INFINITE"):
        return math.inf
    days, dash, rest = limit.rpartition("-")
    parts = rest.split(":")
    if (
        not all(part.isascii() and part.isdecimal() for part in (*parts, *([days] if dash else [])))
        or len(parts) > 3
    ):
        raise UserError(f"time is {limit}; write minutes, H:MM:SS, D-HH:MM:SS or UNLIMITED")
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return 86400 * int(days or 0) + sum(
        unit * int(part) for unit, part in zip(units, parts, strict=False)
    )


def script(
    args: argparse.Namespace, site: Site, gpus: int, save: str, command: Sequence[str]
) -> str:
    """Return the job's script: the cluster's, with this job's options, variables and command.

    Raises UserError: as ``options``, or flags of a container are given without it.
    """
    names = ("container", "container_runtime", "container_mounts")
    given = {name: getattr(args, name) for name in names if getattr(args, name)}
    if given and not args.container:
        name, value = next(iter(given.items()))
        raise UserError(
            f"{name} is {value}, and container is not set; name the image with --container"
        )
    wanted = {"comment": shlex.quote(save)} | options(args, site, gpus, save)
    file = HERE / f"{site.script}.sbatch"
    template = file.read_text(encoding="utf-8").rstrip("\n")
    last_option = list(re.finditer(r"^#SBATCH .*$", template, flags=re.M))[-1:]
    if not last_option or not template.endswith('\ntrain "$@"'):
        raise UserError(
            f'{file} has no line of #SBATCH, or does not end with train "$@"; copy slurm/h100.sbatch again'
        )
    head, body = template[: last_option[0].end()], template[last_option[0].end() :].strip("\n")
    head = re.sub(r"^#\n(# .*\n)+", "", head, count=1, flags=re.M)  # how to start the file itself
    where = (
        f"# Train on {printable(load_cluster(args.cluster).name)}, {counted(gpus, 'GPU')} a node;"
    )
    head = re.sub(r"^# Train on .*?;", lambda _: where, head, count=1, flags=re.M)

    container = {"container_runtime": "pyxis"} | given if given else {}
    variables = {"LAUNCHER": args.launcher} | {
        name.upper(): value for name, value in container.items()
    }
    python = interpreter(args.container)
    if python not in (None, DEFAULT_PYTHON):
        variables["PYTHON"] = python
    if not any("--config" in flags for flags in args.array or []):
        digest = digest_of_sources(_value(command, "--config"))
        variables |= {"LONGMESH_SOURCES": digest} if digest else {}
    if site.interface:
        both = f"NCCL_SOCKET_IFNAME={site.interface} GLOO_SOCKET_IFNAME={site.interface}"
        body = re.sub(
            r"^# NCCL and gloo find each other .*\n# export NCCL_SOCKET_IFNAME=.*$",
            f"# NCCL and gloo find each other over the interface of the cluster's file.\nexport {both}",
            body,
            count=1,
            flags=re.M,
        )
    named = []
    for name, value in variables.items():
        if name in COMMENTS:
            named.append(f"# {COMMENTS[name]}")
        named.append(f"export {name}={shlex.quote(value)}")

    run, more, sweep = shlex.quote(save), "", []
    if args.array:
        cases = [
            f"{n}) sweep=({shlex.join(shlex.split(flags))}) ;;"
            for n, flags in enumerate(args.array)
        ]
        run, more = f'{run}/"$SLURM_ARRAY_TASK_ID"', ' "${sweep[@]}"'
        sweep = ["case $SLURM_ARRAY_TASK_ID in", *cases, "esac"]
    start = [*sweep, *named, f"train {run} {shlex.join(command)}{more}"]
    body = re.sub(r"^export GPUS_PER_NODE=.*$", f"export GPUS_PER_NODE={gpus}", body, flags=re.M)
    by_hand = {option.removeprefix("--").partition("=")[0] for option in args.option}
    lines = [
        *header(head.split("\n"), wanted, by_hand),
        "",
        body.removesuffix('train "$@"') + "\n".join(start),
    ]
    return "\n".join(lines) + "\n"


def checked(args: argparse.Namespace, gpus: int) -> tuple[str, list[str], set[str]]:
    """Check the run for the processes of this job; return its folder, its command without --save,
    and its devices.

    The command asks for ``--device cuda`` unless the run names a device: by default a rank that
    finds no GPU would train on the CPU. The devices are cuda or cpu, of an array's runs maybe both.

    Raises UserError: a value is no text for a script, the GPUs fill no nodes, or as the entry
    itself would once the job started.
    """
    check_text(vars(args))
    if args.gpus is not None and args.gpus % gpus:
        raise UserError(
            f"gpus is {args.gpus}, and {args.cluster} has {gpus} per node; give a multiple of {gpus}, or --nodes"
        )
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command or command[0] not in ENTRIES:
        raise UserError(
            f"the entry is {command[0] if command else 'missing'}; give {' or '.join(ENTRIES)}, and its flags"
        )
    entry, flags = ENTRIES[command[0]], command[1:]
    world_size = (args.nodes or args.gpus // gpus) * gpus
    devices = set()
    for more in args.array or [""]:
        try:
            words = shlex.split(more)
        except ValueError as error:
            raise UserError(
                f"array is {more!r}: {error}; write each run's flags as a shell takes them"
            ) from error
        config = entry.parse_args([*flags, *words])
        where = "" if _value(flags, "--save") else f"{_value(flags, '--config')}: "
        check_text({"save": config.checkpoint.save}, where)
        if config.dry.dry_run:
            raise UserError(
                "dry_run is among the run's flags, and a job trains until the run is finished; start the entry with it "
                "by hand (--dry-run before the entry prints the job's script)"
            )
        if any(word.partition("=")[0] == "--save" for word in words):
            fix = "and an array's runs have numbered folders in one; give it after the entry"
            raise UserError(f"save is in {more!r} of --array, {fix}")
        devices.add(config.mesh.device)
        entry.validate(config.updated(device="cuda"), world_size)
    save = config.checkpoint.save
    if save is None:
        raise UserError(
            "save is not set, and a job that is queued again goes on from there; give --save runs/NAME"
        )
    check_text(
        {"name": args.name or Path(save).name}, fix="" if args.name else "; give one with --name"
    )
    pairs = pairwise(command)
    rest = [word for before, word in pairs if "--save" not in (before, word.split("=")[0])]
    asking = ["--device", "cuda"] if "auto" in devices else []
    return (
        save,
        [command[0], *asking, *rest],
        {"cpu" if device == "cpu" else "cuda" for device in devices},
    )


def _value(flags: Sequence[str], flag: str) -> str | None:
    """Return a flag's value in a command; None if it is not there."""
    found = [
        word.partition("=")[2] or after
        for word, after in pairwise([*flags, ""])
        if word.split("=")[0] == flag
    ]
    return found[-1] if found else None


def check_login_node() -> None:
    """Raise UserError where there is no sbatch."""
    if shutil.which("sbatch") is None:
        raise UserError(
            "there is no sbatch here; start on a login node, or print the script with --dry-run"
        )


def submit(text: str) -> str:
    """Hand a script to sbatch, and return its words. Raises UserError with them and a hint if it
    refuses.
    """
    check_login_node()
    done = subprocess.run(["sbatch"], input=text, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return done.stdout.strip()
    words = " ".join(done.stderr.split()).removeprefix("sbatch: error: ")
    hints = [hint for pattern, hint in HINTS.items() if re.search(pattern, words)]
    raise UserError(
        f"sbatch refuses: {words}; {hints[0] if hints else 'look at the script with --dry-run'}"
    )


def main(argv: list[str]) -> int:
    """Run the command; return its exit status."""

    def command(argv: list[str]) -> None:
        from planner.dry_run import with_files  # imports torch, which --help does without

        args = build_parser().parse_args(argv)
        site, gpus = read_site(args.cluster)
        save, run, devices = checked(args, gpus)
        text = script(args, site, gpus, save, run)
        notes = []
        if "cpu" in devices:
            notes.append(
                f"note: device is cpu, and the job's {counted(gpus, 'GPU')} a node will do nothing"
            )
        if "cuda" in devices:
            try:
                check_torch(gpus, args.container)
            except UserError as error:
                if not args.dry_run:
                    raise
                notes.append(f"note: as it is, the job would be refused: {error}")
        print(text if args.dry_run else submit(text), end="" if args.dry_run else "\n")
        for note in [
            *notes,
            *with_files(ENTRIES[run[0]].parse_args([*run[1:], "--save", save]))[1],
        ]:
            print(note, file=sys.stderr)

    return exit_status(command, argv)


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
