"""Measurements of rows: a Slurm job of each that takes a paper's GPUs, and runs here, kept as each ends.

A row's folder is RUNS/PAPER/TABLE/ROW, with metrics.jsonl of its run, or folders 0, 1, ... of several in the order of
``Job.cases``; each has a file ``commit`` that the job wrote at its start. ``job`` in the row's has sbatch's words.
"""

import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from data.latents.folder import write_latents
from data.text.indexed import open_indexed, write_index, writing
from data.text.prepare import Request, prepare
from planner.cluster import load_cluster
from runtime.errors import UserError
from runtime.machine import commit_of, describe, stamp
from slurm.submit import build_parser, checked, read_site, script, submit
from tools.common.report import read_records, write_records
from train.checkpoint.manifest import STARTS
from train.watching.metrics import METRICS, read_metrics

Figures = Mapping[str, float | int | str | None]
"""Figures by name; None where there is none."""
Result = dict[str, Any]
"""The settings, the machine of the first runs, and each finished run's figures by name, with its date and commit."""
SHORT, LONG = 12, 2
"""Iterations of a run, of which the first third, or the first, does not count: LONG where a step may take hours."""
LIMIT = "24:00:00"
TOKENS = 1 << 24
"""Tokens of the text that runs read, at least: more than the longest sequence has."""
SAMPLES = 4
OUT_OF_MEMORY = "out of memory"
"""Torch's words in the log of a task."""


class Run(NamedTuple):
    """Figures of a run; None if it was out of memory."""

    tokens_per_s: float | None
    memory_gb: float | None

    @property
    def fits(self) -> bool:
        """Return whether the run was not out of memory."""
        return self.tokens_per_s is not None


Runs = Mapping[str, Run]
"""A row's runs by the name of their case."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A measurement of a row: the paper's hardware, and runs of the entry with a configuration of configs/."""

    gpu: str = "a100"
    """Or h100."""
    memory_gb: int = 80
    gpus: int
    per_node: int = 8
    """GPUs of a node, where the row has as many."""
    config: str
    flags: str = ""
    """More flags of all runs."""
    cases: Mapping[str, str]
    """A run for each of these flags, by its name."""
    figures: Callable[[Runs], Figures]
    """The row's measured figures, comparable to published ones of the same name."""
    iterations: int = SHORT
    latents: tuple[int, ...] = ()
    """Shape of a sample of a diffusion transformer; empty for a language model."""

    @property
    def hardware(self) -> str:
        """Name what the job needs."""
        return f"{self.gpus} {self.gpu.upper()} of {self.memory_gb} GB, {self.in_node} in a node"

    @property
    def in_node(self) -> int:
        """Return the GPUs of a node that the job takes."""
        return min(self.gpus, self.per_node)

    def runs(self, row: Path) -> dict[str, Path]:
        """Return the folder of each case."""
        return {name: row / str(n) if len(self.cases) > 1 else row for n, name in enumerate(self.cases)}

    def command(self, data: Path) -> list[str]:
        """Return the entry and the flags of all runs but --save."""
        entry = "pretrain_dit.py" if self.latents else "pretrain_gpt.py"
        named = ["--config", f"configs/models/{self.config}.toml", *self.flags.split()]
        if self.latents:
            reads = ["--data-path", str(latents_of(data, self.latents)), "--split", "1,0"]
            reads += ["--latent-shape", *map(str, self.latents)]
        else:
            reads = ["--data-path", str(data / "long"), "--tokenizer-model", str(data / "text.model")]
            reads += ["--split", "1,0,0"]
        short = ["--train-iters", str(self.iterations), "--eval-iters", "0", "--log-interval", "1"]
        only = [] if len(self.cases) > 1 else next(iter(self.cases.values())).split()
        return [entry, *named, *reads, *short, *only]


def lengths(flag: str, published: int) -> dict[str, str]:
    """Return cases that look for the longest sequence: half, once and twice the published length in tokens."""
    return {str(tokens): f"{flag} {tokens}" for tokens in (published // 2, published, 2 * published)}


def longest_of(name: str) -> Callable[[Runs], Figures]:
    """Return the figures of ``lengths``: the longest that ran, in 1,024 tokens, and tokens/s at the published one."""

    def figures(runs: Runs) -> Figures:
        longest = max((int(tokens) // 1024 for tokens, run in runs.items() if run.fits), default=0)
        return {name: longest, "tokens_per_s": shown([*runs.values()][1].tokens_per_s)}

    return figures


def shown(value: float | None, digits: int = 1) -> float | str:
    """Return a figure to print, OOM for none."""
    return "OOM" if value is None else round(value, digits)


def run_of(folder: Path, iterations: int) -> Run | None:
    """Read a run's folder; None if it is not finished and does not say that it was out of memory."""
    records = read_metrics(folder / METRICS) if (folder / METRICS).exists() else []
    if records and records[-1]["iteration"] >= iterations:
        counted = [record["tokens_per_second"] for record in records[max(1, iterations // 3) :]]
        return Run(median(counted), records[-1]["memory_gb"])
    logs = (path.read_text(encoding="utf-8", errors="replace") for path in folder.glob("logs/*/task-*.log"))
    return Run(None, None) if any(OUT_OF_MEMORY in text.lower() for text in logs) else None


def measured(job: Job, row: Path) -> Figures | None:
    """Return what a row's runs gave and on what; None if not all have ended."""
    found = {name: run_of(folder, job.iterations) for name, folder in job.runs(row).items()}
    runs = {name: run for name, run in found.items() if run is not None}
    if len(runs) < len(found):
        return None
    origins = dict.fromkeys(origin(job, folder) for folder in job.runs(row).values())
    return {**job.figures(runs), "on": " / ".join(origins)}


def origin(job: Job, folder: Path) -> str:
    """Return the device, date and commit of a run, and in which of them it is not the paper's, or of this commit."""
    lines = (folder / STARTS).read_text(encoding="utf-8").splitlines() if (folder / STARTS).exists() else []
    start = json.loads(lines[-1]) if lines else {}
    device = start.get("device", "unknown device")
    date = datetime.fromtimestamp(start["time"], UTC).date().isoformat() if start else "unknown date"
    commit = (folder / "commit").read_text().strip() if (folder / "commit").exists() else "unknown"
    known = job.gpu in device.lower() and ("GB" not in device or f"{job.memory_gb}GB" in device)
    other = "" if known else f", ANOTHER DEVICE than {job.gpu.upper()} of {job.memory_gb} GB"
    return f"{device}, {date}, {commit_told(commit, other)}"


def commit_told(commit: str, between: str = "") -> str:
    """Return a run's commit in words, then ``between``, and that it is another than this one, if it is."""
    other = "" if commit == commit_of().removesuffix(" with changes") else ", ANOTHER COMMIT than this one"
    return f"commit {commit}{between}{other}"


def latents_of(data: Path, shape: tuple[int, ...]) -> Path:
    """Return the folder of latents of a shape."""
    return data / f"latents_{'x'.join(map(str, shape))}"


def write_data(job: Job, data: Path) -> None:
    """Write what the job's runs read, where it is not there: the standard library over and over, or noise."""
    if job.latents:
        if not (folder := latents_of(data, job.latents)).exists():
            noise, labels = np.random.default_rng(0), np.arange(SAMPLES)
            print(f"writing {SAMPLES * prod(job.latents) >> 20} million random latents to {folder}", file=sys.stderr)
            write_latents(folder, ((noise.standard_normal((1, *job.latents)), labels[n : n + 1]) for n in labels))
        return
    prepare(Request(), data / "text", progress=False)
    if not (data / "long.idx").exists():
        text = open_indexed(data / "text")
        times = -(-TOKENS // text.tokens)
        with writing(data / "long.bin", data / "long.idx") as (binary, index):
            np.tile(text.token_ids(), times).tofile(binary)
            write_index(index, text.dtype, np.tile(text.lengths, times))


def script_of(job: Job, row: Path, data: Path, cluster: str) -> str:
    """Return the job's script, that of ``slurm.submit``; it notes the commit, and removes the runs' checkpoints.

    Raises:
        UserError: as ``slurm.submit.checked``.
    """
    nodes, several = job.gpus // job.in_node, len(job.cases) > 1
    own = ["--cluster", cluster, "--nodes", str(nodes), "--time", LIMIT, "--name", "-".join(row.parts[-3:])]
    own.append(f"--option=--ntasks-per-node={job.in_node}")  # of all GPUs of a node, which the job has for itself
    cases = ["--array", *job.cases.values(), "--"] if several else []
    args = build_parser().parse_args([*own, *cases, *job.command(data), "--save", str(row)])
    site, gpus = read_site(cluster)
    save, command, _ = checked(args, job.in_node)
    text = script(args, site, gpus, save, command)
    head, mark, start = text.rpartition("\ntrain ")
    folder = shlex.quote(str(row)) + ('/"$SLURM_ARRAY_TASK_ID"' if several else "")
    notes = [
        f"measured={folder}",
        'mkdir -p "$measured"',
        '{ git describe --always --dirty=" with changes" --abbrev=40 --exclude="*" 2>/dev/null || echo unknown; } '
        '>"$measured/commit"',
        "# Measured runs are not gone on with: their last checkpoint would only fill the disk.",
        """trap 'finished "$measured" && rm -rf "$measured"/iter_*' EXIT""",
    ]
    return "\n".join([head, *notes]) + mark + start


def submit_row(job: Job, row: Path, cluster: str, dry_run: bool) -> str:
    """Submit a row's job, or return its script; say in a line what hinders it. Writes nothing into a folder that is.

    Raises:
        UserError: as ``slurm.submit``'s functions.
    """
    site, has = read_site(cluster)[0], load_cluster(cluster)
    kind = (site.gpu or site.script).lower()
    if job.gpu not in kind or abs(has.memory_gb / job.memory_gb - 1) > 0.15:
        return f"not submitted: it needs {job.hardware}; {cluster} has {kind} of {has.memory_gb:g} GB"
    if has.gpus_per_node < job.in_node:
        return f"not submitted: it needs {job.hardware}; {cluster} has {has.gpus_per_node} in a node"
    if (found := measured(job, row)) is not None:
        return f"not submitted: measured already on {found['on']}"
    if (row / "job").exists():
        said = (row / "job").read_text(encoding="utf-8").strip()
        return f"not submitted: it was before ({said}) and has no result yet; to do it again, move {row} away"
    if row.exists():
        return f"not submitted: {row} is there and no job of this program made it; move it away"
    data = row.parents[2] / "data"
    text = script_of(job, row, data, cluster)
    if dry_run:
        return text
    write_data(job, data)
    row.mkdir(parents=True)
    try:
        said = submit(text)
    except BaseException:
        row.rmdir()
        raise
    (row / "job").write_text(said + "\n", encoding="utf-8")
    return said


def read_runs(path: Path, settings: dict[str, Any] | None = None) -> Result:
    """Read a file of results; no runs if it does not exist.

    Raises UserError: it has no settings of runs, or others than ``settings``, where these are given.
    """
    result: Result = {"runs": {}, **(read_records(path) if path.exists() else {})}
    if path.exists() and "settings" not in result:
        raise UserError(f"{path} holds no settings of runs; give another --results")
    if settings is not None and result.setdefault("settings", settings) != settings:
        raise UserError(f"{path} holds runs of {result['settings']}, not of {settings}; give another --results")
    return result


def keep_run(result: Result, path: Path, name: str, measured: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Measure a run, write it to ``path`` with the others, and return it."""
    result.setdefault("machine", describe("cpu"))
    start = time.perf_counter()
    found = result["runs"][name] = measured() | {"seconds": time.perf_counter() - start, **stamp()}
    write_records(path, result)
    return found


def run_all(main: Callable[[list[str]], int]) -> None:
    """Run a command that keeps its runs, with its lines on stderr. Raises UserError: it did not end well."""
    with redirect_stdout(sys.stderr):
        status = main([])
    if status:
        raise UserError("the runs did not end well; the reason stands above")
