"""Submit a run to Slurm: a run's command, a cluster's file and a number of nodes make the job's script.

python -m slurm.submit --cluster configs/clusters/h100_pod.toml --nodes 4 pretrain_gpt.py --config FILE --save runs/NAME
python -m slurm.submit --cluster FILE --gpus 32 --time 4:00:00 --dry-run pretrain_gpt.py ...    only print the script
python -m slurm.submit --cluster FILE --nodes 1 --array "--lr 1e-3" "--lr 3e-4" -- pretrain_gpt.py ...    a sweep

The script is slurm/SCRIPT.sbatch of the cluster's [slurm] table, with this job's options. The run goes on from its
newest checkpoint and is queued again until it is finished; an array's runs are kept in runs/NAME/0, runs/NAME/1, ...
"""

import argparse
import math
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path

from planner.cluster import ClusterError, cluster_file, load_cluster
from runtime.errors import UserError, printable
from runtime.progress import counted
from tools.common.arguments import parser_for, positive, run_command
from tools.fit import ENTRIES
from train.run import exit_status

HERE = Path(__file__).resolve().parent
HINTS: dict[str, str] = tomllib.loads((HERE / "hints.toml").read_text(encoding="utf-8"))
NAME = (r"\w[\w.,-]*", "letters, digits, and any of . , - _ after the first")
TEXT = (r".*", "printable characters in a line")
PATH = (r"[^-].*", "printable characters in a line, the first no -")
FORMS = {
    "name": (r"\w[\w .,+=@~-]*", "letters, digits, blanks, and any of . , + = @ ~ - _ after the first"),
    "constraint": (r"[\w(\[][\w.,:&|*()\[\]-]*", "features, joined by any of & | ( ) [ ] * ,"),
    "interface": (r"[\w^=][\w.,:-]*", "names of interfaces, as NCCL_SOCKET_IFNAME takes them"),
    "after": (r"\d[\d:_]*", "the number of a job"),
    "time": (r"[\w:-]+", "minutes, H:MM:SS, D-HH:MM:SS or UNLIMITED"),
    "option": (r"--[a-z][a-z-]*(=.+)?", "written as sbatch takes it, --option=--KEY=VALUE"),
    **dict.fromkeys(("cluster", "save", "container", "container_mounts", "python"), PATH),
    **dict.fromkeys(("array", "command"), TEXT),
}
"""Pattern of a value by the name of its flag or key, so that none becomes a line or a command of the script, and the
pattern in words; NAME of all others, those that are yet to come as well."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """The [slurm] table of a cluster's file: what its Slurm calls things."""

    script: str
    """Script of this folder to start from: a100 or h100."""
    gpu: str | None = None
    """Name of the GPU in --gres; none asks for any."""
    partition: str | None = None
    account: str | None = None
    constraint: str | None = None
    cpus_per_gpu: int | None = None
    """Cores per rank; the script's if left out."""
    interface: str | None = None
    """Network interface of NCCL and gloo; by default the one that a node's name leads to."""


def check_text(values: Mapping[str, object], where: str = "", fix: str = "") -> None:
    """Check values, and each word of lists, by their names. Numbers, and words that are chosen from, always pass.

    Raises UserError naming the value after ``where``, and what it may be.
    """
    for name, value in values.items():
        (pattern, words), said = FORMS.get(name, NAME), name
        for text in value if isinstance(value, list) else [value]:
            if not isinstance(text, str) or not text:
                continue
            if name == "command" and (flag := re.match(r"--[a-z][a-z\d-]*", text)):
                said = flag[0]  # which the words after it belong to
            if not text.isprintable() or not re.fullmatch(pattern, text):
                raise UserError(f"{where}{said} is {text!r}; it must be {words}{fix}")


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
        raise ClusterError(f"{path}: {said}; add one of {', '.join(scripts)}, or name the file of a Slurm cluster")
    kinds = {entry.name: entry.type for entry in fields(Site)}
    for name, value in table.items():
        if name not in kinds:
            raise ClusterError(f"{path}: unknown key {name!r} of [slurm]; known are {', '.join(kinds)}")
        if type(value) is not (int if "int" in str(kinds[name]) else str) or (type(value) is int and value < 1):
            raise ClusterError(f"{path}: {name} of [slurm] is {value!r}; it must be of type {kinds[name]}")
    check_text(table, f"{path}: [slurm] ")
    return Site(**table), gpus


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of a job's own flags; the run's follow its entry."""
    parser = parser_for("python -m slurm.submit", __doc__)
    add, size = parser.add_argument, parser.add_mutually_exclusive_group(required=True).add_argument
    add("--cluster", required=True, metavar="FILE|NAME", help="a file with a [slurm] table, or a name such as h100")
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
    add("--option", action="append", default=[], metavar="X", help="for sbatch: --option=--KEY=VALUE")
    add("--dry-run", action="store_true", help="print the script, submit nothing")
    add("command", nargs=argparse.REMAINDER, metavar="ENTRY FLAG...", help="the run")
    return parser


def options(args: argparse.Namespace, site: Site, gpus: int, save: str) -> dict[str, str]:
    """Return sbatch's options for this job. Raises UserError if its time is none, or over before the ranks save."""
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
        "constraint": site.constraint,
        "dependency": args.after and f"afterok:{args.after}",
        "array": args.array and f"0-{len(args.array) - 1}",
        "output": "%x-%A_%a.log" if args.array else None,
    }
    for option in args.option:
        key, _, value = option.removeprefix("--").partition("=")
        wanted[key] = value and shlex.quote(value)
    if wanted["time"] is not None and _seconds(wanted["time"]) <= args.lead:
        raise UserError(
            f"time is {wanted['time']}, and the ranks are told to save {args.lead} s before it is over; give more "
            "--time, or less --lead"
        )
    return {key: value for key, value in wanted.items() if value is not None}


def _seconds(limit: str) -> float:
    """Return the seconds of a limit as sbatch takes it: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S, or a word for none."""
    if limit.upper() in ("UNLIMITED", "INFINITE"):
        return math.inf
    days, dash, rest = limit.rpartition("-")
    parts = rest.split(":")
    if not all(part.isascii() and part.isdecimal() for part in (*parts, *([days] if dash else []))) or len(parts) > 3:
        raise UserError(f"time is {limit}; write minutes, H:MM:SS, D-HH:MM:SS or UNLIMITED")
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return 86400 * int(days or 0) + sum(unit * int(part) for unit, part in zip(units, parts, strict=False))


def script(args: argparse.Namespace, site: Site, gpus: int, save: str, command: Sequence[str]) -> str:
    """Return the job's script: the cluster's, with this job's options, variables and command.

    Raises UserError: as ``options``, or flags of a container are given without it.
    """
    names = ("container", "container_runtime", "container_mounts")
    given = {name: getattr(args, name) for name in names if getattr(args, name)}
    if given and not args.container:
        name, value = next(iter(given.items()))
        raise UserError(f"{name} is {value}, and container is not set; name the image with --container")
    wanted = {"comment": shlex.quote(save)} | options(args, site, gpus, save)  # where tools.watch looks for the run
    head, _, body = (HERE / f"{site.script}.sbatch").read_text(encoding="utf-8").partition("\nexport ")
    for key in wanted:
        head = re.sub(rf"^#SBATCH --{key}\b.*\n", "", head + "\n", flags=re.M).rstrip("\n")
    head = re.sub(r"^#\n(# .*\n)+", "", head, count=1, flags=re.M)  # how to start the file itself
    where = f"# Train on {printable(load_cluster(args.cluster).name)}, {counted(gpus, 'GPU')} a node;"
    head = re.sub(r"^# Train on .*?;", lambda _: where, head, count=1, flags=re.M)
    lines = [f"#SBATCH --{key}={value}" if value else f"#SBATCH --{key}" for key, value in wanted.items()]
    container = {"container_runtime": "pyxis"} | given if given else {}
    variables = {"LAUNCHER": args.launcher} | {name.upper(): value for name, value in container.items()}
    if not args.container and not Path(".venv/bin/python").exists():
        variables["PYTHON"] = sys.executable
    if site.interface:
        variables |= dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), site.interface)
    named = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    run, more, sweep = shlex.quote(save), "", []
    if args.array:
        cases = [f"{n}) sweep=({shlex.join(shlex.split(flags))}) ;;" for n, flags in enumerate(args.array)]
        run, more = f'{run}/"$SLURM_ARRAY_TASK_ID"', ' "${sweep[@]}"'
        sweep = ["case $SLURM_ARRAY_TASK_ID in", *cases, "esac"]
    start = [*sweep, *named, f"train {run} {shlex.join(command)}{more}"]
    body = re.sub(r"^export GPUS_PER_NODE=.*$", f"export GPUS_PER_NODE={gpus}", "export " + body, flags=re.M)
    return "\n".join([head, *lines, "", body.removesuffix('train "$@"\n') + "\n".join(start)]) + "\n"


def checked(args: argparse.Namespace, gpus: int) -> tuple[str, list[str]]:
    """Check the run for the processes of this job; return its folder, and its command without --save.

    Raises UserError: a value is no text for a script, the GPUs fill no nodes, or as the entry itself would once the job
    started.
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
    for more in args.array or [""]:
        try:
            words = shlex.split(more)
        except ValueError as error:
            raise UserError(f"array is {more!r}: {error}; write each run's flags as a shell takes them") from error
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
        entry.validate(replace(config, mesh=replace(config.mesh, device="cuda")), world_size)
    save = config.checkpoint.save
    if save is None:
        raise UserError("save is not set, and a job that is queued again goes on from there; give --save runs/NAME")
    check_text({"name": args.name or Path(save).name}, fix="" if args.name else "; give one with --name")
    pairs = pairwise(command)
    return save, [command[0], *(word for before, word in pairs if "--save" not in (before, word.split("=")[0]))]


def _value(flags: Sequence[str], flag: str) -> str | None:
    """Return a flag's value in a command; None if it is not there."""
    found = [word.partition("=")[2] or after for word, after in pairwise([*flags, ""]) if word.split("=")[0] == flag]
    return found[-1] if found else None


def check_login_node() -> None:
    """Raise UserError where there is no sbatch."""
    if shutil.which("sbatch") is None:
        raise UserError("there is no sbatch here; start on a login node, or print the script with --dry-run")


def submit(text: str) -> str:
    """Hand a script to sbatch, and return its words. Raises UserError with them and a hint if it refuses."""
    check_login_node()
    done = subprocess.run(["sbatch"], input=text, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return done.stdout.strip()
    words = " ".join(done.stderr.split()).removeprefix("sbatch: error: ")
    hints = [hint for pattern, hint in HINTS.items() if re.search(pattern, words)]
    raise UserError(f"sbatch refuses: {words}; {hints[0] if hints else 'look at the script with --dry-run'}")


def main(argv: list[str]) -> int:
    """Run the command; return its exit status."""

    def command(argv: list[str]) -> None:
        from planner.dry_run import with_files  # imports torch, which --help does without

        args = build_parser().parse_args(argv)
        site, gpus = read_site(args.cluster)
        save, run = checked(args, gpus)
        text = script(args, site, gpus, save, run)
        print(text if args.dry_run else submit(text), end="" if args.dry_run else "\n")
        for note in with_files(ENTRIES[run[0]].parse_args([*run[1:], "--save", save]))[1]:
            print(note, file=sys.stderr)

    return exit_status(command, argv)


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
