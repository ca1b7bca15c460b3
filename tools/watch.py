"""Watch runs in a terminal: progress and time left, loss, rate, memory, starts, the last checkpoint and who trains.

python -m tools.watch runs/llama_tiny runs/second
python -m tools.watch runs/* --once              print once, as into a file
python -m tools.watch --slurm                    the runs of your jobs in Slurm's queue
"""

import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

if not __package__:  # started as a file: the packages lie one folder up
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.errors import UserError
from runtime.files import LOCK, read_regular
from runtime.locks import alive, not_a_file
from runtime.progress import clock_time
from tools.common.arguments import one_line_errors, parser_for, positive, run_command

BARS = "▁▂▃▄▅▆▇█"
CLEAR = "\033[H\033[2J"
TAIL = 20
"""Iterations that rates and the time left are taken from."""
QUEUE = ("squeue", "--me", "--noheader", "--format=%A\t%i\t%j\t%T\t%R\t%Z\t%k")
"""Number, id as people write it (N_INDEX in an array), name, state, reason or nodes, working folder and comment of each
job; slurm.submit's comment is the run's folder."""
DEEPEST = 3
"""Folders between a job's working folder and a run's logs at most."""


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a curve of ``width`` characters, each the mean of its share of the values, from lowest to highest."""
    width = min(width, len(values))
    cuts = [len(values) * n // width for n in range(width + 1)] if width else []
    means = [fmean(values[a:b]) for a, b in pairwise(cuts)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    return "".join(BARS[round((value - low) / (high - low or 1) * (len(BARS) - 1))] for value in means)


_read: dict[Path, tuple[int, bytes, list[dict[str, Any]]]] = {}
"""Each metrics.jsonl's bytes read, of whole lines, the last of these lines, and the records."""


def records_of(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl, of which each look reads what is new, or all if it was written anew.

    Raises UserError for what no run writes.
    """
    from train.watching.metrics import parse_records

    if kind := not_a_file(path):
        raise UserError(f"{path} is {kind}, not a file; remove it")
    read, last, records = _read.get(path, (0, b"", []))
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(read - len(last))
        if file.read(len(last)) != last:  # by a run that goes on from a checkpoint
            read, records = file.seek(0), []
        whole, end, _ = file.read().rpartition(b"\n")
        if end:
            records = records + parse_records(path, whole.decode(errors="replace").split("\n"), len(records) + 1)
            _read[path] = read + len(whole + end), whole.rpartition(b"\n")[2] + end, records
    return records


def describe(run: Path, now: float, width: int) -> list[str]:
    """Return the lines that show a run at a time, in seconds since the epoch. Raises UserError: it cannot be read."""
    from checkpoint.manifest import STARTS
    from train.watching.health import FAILURES, read_failures
    from train.watching.metrics import METRICS, loss_name
    from train.watching.progress import flops_rate

    if not run.is_dir():
        return [f"{run}   is not there yet, or is not a folder"]
    records, holder = records_of(run / METRICS), alive(run / LOCK)
    starts = read_regular(run / STARTS).count("\n") if (run / STARTS).exists() else 0
    who = (f"training: {holder}" if holder else "nobody trains") + (f"; started {starts} times" if starts > 1 else "")
    lines = [f"{run}   {who}"]
    if not records:
        return [*lines, "  no iteration yet"]
    last, name = records[-1], loss_name(records[-1])
    losses = [record[name] for record in records if record.get(name) is not None]
    checks = [record for record in records if record.get("validation_loss") is not None]
    shown = f"  loss {losses[-1]:.4f} " if losses else "  loss not finite "
    if checks:
        shown += f"(validation {checks[-1]['validation_loss']:.4f} at {checks[-1]['iteration']}) "
    done = last["iteration"]
    goal, pace = _setting(run, "train", "train_iters", int) or done or 1, _mean(records, "iteration_time_ms") / 1e3
    left = f"{clock_time((goal - done) * pace)} left" if holder and pace else "stopped"
    left, share = left if done < goal else "done", min(1.0, done / goal)
    lines.append(f"  {'█' * int(30 * share):░<30} {share:4.0%}  iteration {done}/{goal}, {left}")
    lines.append(shown + sparkline(losses, max(0, width - len(shown))))
    tokens, tflops, mfu = (_mean(records, name) for name in ("tokens_per_second", "tflops_per_gpu", "mfu"))
    each = f"{flops_rate(tflops)} and {mfu:.1%} MFU each"
    lines.append(f"  {tokens:,.0f} tokens/s, {each}, {last.get('memory_gb', 0.0):.3g} GB")
    if last.get("skipped_iterations"):
        lines.append(f"  {last['skipped_iterations']} iterations skipped, their gradients not finite")
    if slow := [record for record in records[-TAIL:] if "slowest_rank" in record]:
        lines.append(f"  slowest: rank {slow[-1]['slowest_rank']}, {slow[-1]['slowest_behind']:.0%} behind the median")
    if failures := read_failures(run / FAILURES):
        lines.append(f"  failed at iteration {failures[-1]['iteration']}: {failures[-1]['why']}")
    return [*lines, *_kept(run, now)]


def _setting(run: Path, table: str, name: str, kind: type) -> Any:
    """Return a setting of a run's configuration; None if there is none. Raises UserError for what no run writes."""
    from checkpoint.manifest import is_count

    config = run / "config.toml"
    try:
        value = tomllib.loads(read_regular(config)).get(table, {}).get(name) if config.exists() else None
    except (tomllib.TOMLDecodeError, AttributeError, RecursionError) as error:
        raise UserError(f"{config} is no run's configuration ({error}); put the run's own back") from error
    if value is not None and not (is_count(value) and value > 0 if kind is int else type(value) is kind):
        raise UserError(f"{config}: {name} of [{table}] is {value!r:.40}, which no run writes; put the run's own back")
    return value


def _mean(records: Sequence[dict[str, Any]], name: str) -> float:
    """Return the mean of a field in the last iterations; 0 where none of them has it."""
    return fmean([record[name] for record in records[-TAIL:] if record.get(name) is not None] or [0.0])


def _kept(run: Path, now: float) -> list[str]:
    """Say which checkpoint is the newest, and its age; and which local one this machine has"""
    from checkpoint.manifest import checkpoint_folder, fingerprint
    from checkpoint.search import saved_iterations

    def newest(folder: Path) -> str:
        found = saved_iterations(folder)
        age = clock_time(now - checkpoint_folder(folder, found[0]).stat().st_mtime) if found else ""
        return f"iteration {found[0]}, {age} ago ({len(found)} kept)" if found else ""

    shared = newest(run)
    lines = [f"  last checkpoint: {shared}" if shared else "  no checkpoint yet"]
    local = _setting(run, "checkpoint", "non_persistent_local_ckpt_dir", str)
    if local and (name := fingerprint(run)) and (here := newest(Path(local) / name)):
        lines.append(f"  local one here: {here}")
    return lines


def queue() -> Iterator[tuple[str, Path | None]]:
    """Yield a line for each of the user's jobs in Slurm's queue, and the folder of its run, if it has begun.

    Raises UserError: Slurm is not there, or does not answer.
    """
    try:
        listed = subprocess.run(QUEUE, capture_output=True, text=True, timeout=30, check=True).stdout
    except FileNotFoundError as error:
        raise UserError("squeue was not found; run --slurm on a login node, or name the runs") from error
    except subprocess.TimeoutExpired as error:
        raise UserError("squeue gave no answer in 30 s; name the runs, or try again later") from error
    except subprocess.CalledProcessError as error:
        raise UserError(f"squeue failed: {error.stderr.strip()}; name the runs, or try again later") from error
    for line in listed.removesuffix("\n").split("\n") if listed else []:
        match line.split("\t"):
            case [job, shown, name, state, where, folder, comment] if job.isdecimal():
                yield f"job {shown} ({name}): {state.lower()} {where}", _run_of(job, Path(folder), comment)
            case _:  # a tab or a newline in a job's name, folder or comment
                yield f"no job as squeue writes it: {line}", None


def _run_of(job: str, folder: Path, comment: str) -> Path | None:
    """Find the run that keeps a job's logs: what its comment names, an array's below, or one below its folder."""
    places = [(folder / comment, 0), (folder / comment, 1), *((folder, depth) for depth in range(1, DEEPEST + 1))]
    found = (path for place, depth in places for path in place.glob(f"{'*/' * depth}logs/{job}"))
    return next((path.parent.parent for path in found), None)


def screen(runs: Sequence[Path], slurm: bool, width: int) -> str:
    """Return what one look at the runs shows."""
    others = [str(run) for run in runs if run.is_dir() and not is_run(run)]  # as runs/* names them
    looked: list[tuple[str, Path | None]] = [("", run) for run in runs if str(run) not in others]
    looked += [(f"no runs, as they have no config.toml: {', '.join(others)}", None)] if others else []
    blocks = []
    for line, run in [*looked, *(queue() if slurm else [])]:
        try:
            shown = describe(run, time.time(), width) if run else []
        except (UserError, OSError) as error:  # the other runs are shown all the same
            shown = [f"{run}   error: {error}"]
        blocks.append([*filter(None, [line]), *shown])
    lines = "\n\n".join("\n".join(line.replace("\n", " ") for line in block) for block in blocks)
    return "".join(c if c == "\n" or c.isprintable() else "?" for c in lines) or "no job in the queue"


def is_run(folder: Path) -> bool:
    """Return whether a folder is that of a run."""
    return (folder / "config.toml").exists()


@one_line_errors
def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status, 1 if a folder that was named is no run's."""
    parser = parser_for("python -m tools.watch", __doc__)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="folder of a run (--save)")
    parser.add_argument("--slurm", action="store_true", help="also show the jobs in Slurm's queue")
    parser.add_argument("--interval", type=positive, default=2, metavar="SECONDS", help="default: %(default)s")
    parser.add_argument("--once", action="store_true", help="print once and end")
    args = parser.parse_args(argv)
    if not args.runs and not args.slurm:
        raise UserError("no RUN is named; name the folders of runs, or give --slurm")
    while True:
        shown = screen(args.runs, args.slurm, shutil.get_terminal_size().columns)
        print(shown if args.once else f"{CLEAR}{shown}\n\n(Ctrl-C ends this, not the runs)", flush=True)
        if args.once:
            return int(not all(map(is_run, args.runs)))
        time.sleep(args.interval)


if __name__ == "__main__":
    run_command(main)
