"""Write a job's script: the site's template with the job's options, variables and command."""

import argparse
import math
import re
import shlex
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from planner.cluster import load_cluster
from runtime.errors import UserError, printable
from runtime.progress import counted
from slurm.environment import DEFAULT_PYTHON, digest_of_sources, interpreter
from slurm.header import COMMENTS, header
from slurm.site import Site, read_template


def job_script(
    args: argparse.Namespace, site: Site, gpus: int, save: str, command: Sequence[str]
) -> str:
    """Return the job's script, which sbatch reads.

    Raises UserError as ``sbatch_options`` does, or if container flags are given without an image.
    """
    container = _container_variables(args)
    options = {"comment": shlex.quote(save)} | sbatch_options(args, site, gpus, save)
    head, body = read_template(site)

    # Drop the lines that say how to start the script by hand.
    head = re.sub(r"^#\n(# .*\n)+", "", head, count=1, flags=re.M)
    cluster = printable(load_cluster(args.cluster).name)
    title = f"# Train on {cluster}, {counted(gpus, 'GPU')} a node;"
    head = re.sub(r"^# Train on .*?;", lambda _: title, head, count=1, flags=re.M)
    by_hand = {option.removeprefix("--").partition("=")[0] for option in args.option}

    if site.interface:
        body = _with_interface(body, site.interface)
    body = re.sub(r"^export GPUS_PER_NODE=.*$", f"export GPUS_PER_NODE={gpus}", body, flags=re.M)
    exports = _exports(_variables(args, container, command))
    lines = [
        *header(head.split("\n"), options, by_hand),
        "",
        body + "\n".join(_start(args, save, command, exports)),
    ]
    return "\n".join(lines) + "\n"


def _container_variables(args: argparse.Namespace) -> dict[str, str]:
    """Return a container's variables, keyed by flag. Raises UserError if they lack an image."""
    flags: dict[str, str] = {}
    for name in ("container", "container_runtime", "container_mounts"):
        value = getattr(args, name)
        if value:
            if not args.container:
                raise UserError(
                    f"{name} is {value}, but container is not set; give the image with --container"
                )
            flags[name] = value
    if not flags:
        return {}
    return {"container_runtime": "pyxis"} | flags


def _with_interface(body: str, interface: str) -> str:
    """Return the template's body with the network interface of the site."""
    return re.sub(
        r"^# NCCL and gloo find each other .*\n# export NCCL_SOCKET_IFNAME=.*$",
        "# NCCL and gloo find each other over the interface of the cluster's file.\n"
        f"export NCCL_SOCKET_IFNAME={interface} GLOO_SOCKET_IFNAME={interface}",
        body,
        count=1,
        flags=re.M,
    )


def _variables(
    args: argparse.Namespace, container: dict[str, str], command: Sequence[str]
) -> dict[str, str]:
    """Return the variables that slurm/job.sh reads."""
    variables = {"LAUNCHER": args.launcher}
    for name, value in container.items():
        variables[name.upper()] = value
    python = interpreter(args.container)
    if python is not None and python != DEFAULT_PYTHON:
        variables["PYTHON"] = python

    # An array's runs may have different configurations; each computes its digest at first start.
    if not any("--config" in flags for flags in args.array or []):
        digest = digest_of_sources(flag_value(command, "--config"))
        if digest:
            variables["LONGMESH_SOURCES"] = digest
    return variables


def _exports(variables: dict[str, str]) -> list[str]:
    """Return the script's lines that export variables, each below its comment."""
    lines = []
    for name, value in variables.items():
        if name in COMMENTS:
            lines.append(f"# {COMMENTS[name]}")
        lines.append(f"export {name}={shlex.quote(value)}")
    return lines


def _start(
    args: argparse.Namespace, save: str, command: Sequence[str], exports: list[str]
) -> list[str]:
    """Return the last lines of the script, which start the run, or one run of an array."""
    if not args.array:
        return [*exports, f"train {shlex.quote(save)} {shlex.join(command)}"]
    cases = []
    for number, flags in enumerate(args.array):
        cases.append(f"{number}) sweep=({shlex.join(shlex.split(flags))}) ;;")
    folder = f'{shlex.quote(save)}/"$SLURM_ARRAY_TASK_ID"'
    return [
        "case $SLURM_ARRAY_TASK_ID in",
        *cases,
        "esac",
        *exports,
        f'train {folder} {shlex.join(command)} "${{sweep[@]}}"',
    ]


def sbatch_options(args: argparse.Namespace, site: Site, gpus: int, save: str) -> dict[str, str]:
    """Return sbatch's options for this job.

    Raises UserError if the time limit is invalid, or not longer than --lead.
    """
    gpu = "gpu"
    if site.gpu:
        gpu = f"gpu:{site.gpu}"
    options: dict[str, str | None] = {
        "job-name": shlex.quote(args.name or Path(save).name),
        "nodes": str(args.nodes or args.gpus // gpus),
        "ntasks-per-node": str(gpus),
        "gres": f"{gpu}:{gpus}",
        "cpus-per-task": None,
        "time": args.time,
        "signal": f"B:USR1@{args.lead}",
        "partition": args.partition or site.partition,
        "account": args.account or site.account,
        "qos": site.qos,
        "constraint": site.constraint,
        "dependency": args.after,
        "array": None,
        "output": None,
    }
    if site.cpus_per_gpu:
        options["cpus-per-task"] = str(site.cpus_per_gpu)
    if args.after:
        options["dependency"] = f"afterok:{args.after}"
    if args.array:
        options["array"] = f"0-{len(args.array) - 1}"
        options["output"] = "%x-%A_%a.log"
    for option in args.option:
        key, _, value = option.removeprefix("--").partition("=")
        options[key] = value and shlex.quote(value)
    if options["dependency"] is not None:
        options.setdefault("kill-on-invalid-dep", "yes")

    time_limit = options["time"]
    if time_limit is not None and seconds_of(time_limit) <= args.lead:
        raise UserError(
            f"time is {time_limit}, but the ranks are told to save {args.lead} s before it is "
            "over; give a longer --time or a shorter --lead"
        )
    return {key: value for key, value in options.items() if value is not None}


def seconds_of(limit: str) -> float:
    """Return a time limit of sbatch in seconds; infinity for UNLIMITED.

    The forms are M, M:S, H:M:S, D-H, D-H:M and D-H:M:S.
    """
    if limit.upper() in ("UNLIMITED", "INFINITE"):
        return math.inf
    days, dash, clock = limit.rpartition("-")
    parts = clock.split(":")
    numbers = [days, *parts] if dash else parts
    if len(parts) > 3 or not all(text.isascii() and text.isdecimal() for text in numbers):
        raise UserError(f"time is {limit}; write minutes, H:MM:SS, D-HH:MM:SS or UNLIMITED")

    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    seconds = 86400 * int(days or 0)
    for unit, part in zip(units, parts, strict=False):
        seconds += unit * int(part)
    return seconds


def flag_value(flags: Sequence[str], flag: str) -> str | None:
    """Return the last value of a flag in a command; None if the flag is missing."""
    values = []
    for word, next_word in pairwise([*flags, ""]):
        name, _, value = word.partition("=")
        if name == flag:
            values.append(value or next_word)
    return values[-1] if values else None
