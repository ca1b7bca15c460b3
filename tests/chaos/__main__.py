"""Kill, signal and start twice runs of 4 processes under torchrun.

They are compared with the run that nobody disturbed.

    make chaos ARGS="--kills 200 --signals 50 --starts 50"

A row is written as its trial ends; the same command goes on where it was stopped. Exit status 1 if
a row is wrong.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from data.text.prepare import prepare
from data.text.record import Request
from runtime.errors import UserError
from runtime.files import LOCK, write_text
from runtime.machine import describe, in_words
from runtime.progress import clock_time
from tests.chaos.victim import HOOKS, PLAN, marked
from tests.starts import ROOT
from tools.common.arguments import one_line_errors, parser_for, run_command
from train.callbacks.metrics import METRICS, read_metrics
from train.checkpoint.manifest import STARTS
from train.checkpoint.search import POINTER, find_checkpoint, saved_iterations

EXACT = (
    "iteration",
    "lm_loss",
    "grad_norm",
    "learning_rate",
    "consumed_samples",
    "consumed_tokens",
)
ON_ANY_RANK = ("shard", "asynchronous shard", "asynchronous staging", "fsync", "random")
LAST, RANKS, PATIENCE, ORPHANED = 40, 4, 900.0, 5.0
FLAGS = f"""
    --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 64 --device cpu
    --global-batch-size 4 --lr 1e-3
    --micro-batch-size 1 --eval-iters 0 --save-interval 2 --keep-last 1 --train-iters {LAST}
""".split()
LAUNCH = """
    -m torch.distributed.run --standalone --nproc-per-node 4 --signals-to-handle
    SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1
    --shutdown-timeout 300 -m tests.chaos.victim
""".split()
KILL, SIGNAL, STARTED, END = "SIGKILL", "signal", "runs into one folder", "end of a run"
TITLE = f"""# Chaos

Written by `make chaos`. A trial starts a run of 4 processes under torchrun, or goes on with that \
of the trial before,
and strikes. Right is: the next start goes on from the newest commit, which is whole; no process \
is left {ORPHANED:.0f}
seconds after the launcher's end; a signal's end is a clean save; losses, and at the end weights \
and moments, are those
of the undisturbed run to the bit. Of runs into one folder one trains at a time, and the others \
say so in a line. "Gone"
is the longest time in seconds from a launcher's end to that of its last process.

| what | where | to whom | trials | wrong | gone |
| --- | --- | --- | ---: | ---: | ---: |
"""
Row = dict[str, Any]


class Hung(UserError):
    """A run did not end, and was killed."""


def start(save: Path, plan: Row, ranks: int = RANKS) -> tuple[subprocess.Popen[Any], IO[str]]:
    """Start a run or go on with it, with a plan for ``victim``.

    It is one of several ranks under torchrun.
    """
    data, flags = save.parent / "data", ["--save", str(save), "--load", str(save)]
    flags += ["--data-path", f"{data}", "--tokenizer-model", f"{data}.model"]
    flags += ["--async-save"] * plan.get("async", False)
    command = [sys.executable, *(LAUNCH if ranks > 1 else ["pretrain_gpt.py"]), *FLAGS, *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1", PLAN: mark(plan)}
    out = tempfile.TemporaryFile("w+")  # noqa: SIM115
    more: Row = {"stdout": out, "stderr": subprocess.STDOUT, "start_new_session": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, **more), out


def mark(plan: Row) -> str:
    """Return the value of CHAOS that the processes of a plan have, and no others."""
    return json.dumps(plan | {"by": os.getpid()})


def ended(process: subprocess.Popen[Any], out: IO[str], plan: Row) -> str:
    """Wait for the end of what was started with a plan, and return its output.

    Raises Hung: it does not end.
    """
    hung = False
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        hung = bool(kill(plan))
        process.wait()
    out.seek(0)
    output = out.read()
    if hung:
        raise Hung(f"hung for {PATIENCE:.0f} s, and was killed: {output[-300:]}")
    return output


def kill(plan: Row) -> list[int]:
    """Kill all processes of a plan, ranks in their own sessions too, and return their ids."""
    for pid in (left := marked(mark(plan))):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def newest(save: Path) -> int:
    """Return the iteration of the newest commit, 0 without any."""
    return next(iter(saved_iterations(save)), 0) if save.exists() else 0


def starts(save: Path) -> list[int]:
    """Return the iterations that the starts of a run went on from."""
    path = save / STARTS
    return (
        [json.loads(line)["iteration"] for line in path.read_text().splitlines()]
        if path.exists()
        else []
    )


def differs(save: Path, ranks: int = RANKS) -> str:
    """Say in what a run differs from the undisturbed one.

    Records are compared up to its newest commit, and at its end its tensors.
    """
    iteration, histories = newest(save), []
    for run in (save, save.parent / f"whole-{ranks}"):
        curve = [
            [record[name] for name in EXACT]
            for record in (read_metrics(run / METRICS)[:iteration] if iteration else [])
        ]
        histories.append(
            (curve, tensors(run / f"iter_{iteration:07d}") if iteration == LAST else {})
        )
    if histories[0][0] != histories[1][0] or len(histories[0][0]) != iteration:
        return f"records 1 to {iteration} are not those of the undisturbed run"
    (_, ours), (_, theirs) = histories
    equal = ours.keys() == theirs.keys() and all(
        torch.equal(value, theirs[name]) for name, value in ours.items()
    )
    return "" if equal else "weights or moments are not those of the undisturbed run"


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return a checkpoint's tensors: an asynchronous save lays the same ones out in other bytes."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.TemporaryDirectory() as scratch:
        dcp_to_torch_save(folder, file := f"{scratch}/whole.pt")
        leaves, _ = tree_flatten_with_path(torch.load(file, weights_only=True))
    return {keystr(path): value for path, value in leaves if isinstance(value, torch.Tensor)}


def planned(kind: str, number: int, draw: random.Random) -> Row:
    """Draw what is struck, when and how; half of the kills at hooks of saving."""
    kills, at_hook = kind == KILL, kind == KILL and number % 2
    hook = (
        draw.choice([*HOOKS][:-1])
        if at_hook
        else draw.choice(("random", "random", "random", "lock"))
    )
    return {
        "hook": hook,
        "rank": draw.randrange(RANKS) if hook in ON_ANY_RANK else 0,
        "nth": 1 if hook in ("lock", "prune") else draw.randint(1, 5),
        "when": draw.choice(("before", "after")) if at_hook else draw.uniform(0.01, 2),
        "whom": draw.choice(
            ("rank", "launcher", "group", "everything") if kills else ("rank", "launcher")
        ),
        "signal": int(
            signal.SIGKILL
            if kills
            else draw.choice((signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP))
        ),
        "async": hook != "shard" and (hook.startswith("async") or draw.random() < 0.5),
    }


def disturbed(kind: str, number: int, folder: Path, draw: random.Random) -> Row:
    """Start the current run or go on with it, strike, and look at what is left."""
    save, note = folder / "disturbed", folder / "struck"
    plan = planned(kind, number, draw) | {"note": str(note), "trial": f"{number} {os.getpid()}"}
    before, iteration = starts(save), newest(save)
    note.unlink(missing_ok=True)
    output = ended(*start(save, plan), plan)
    begun, late = time.monotonic(), 0
    while left := marked(mark(plan)):
        if time.monotonic() - begun > PATIENCE:
            raise Hung(
                f"hung: {len(kill(plan))} processes stayed for {PATIENCE:.0f} s, and were killed"
            )
        late = late or (len(left) if time.monotonic() - begun > ORPHANED else 0)
        time.sleep(0.05)
    gone, to, went = round(time.monotonic() - begun, 2), newest(save), starts(save)[len(before) :]
    clean = (
        to
        and (save / POINTER).exists()  # a kill may come before the first save writes it
        and (save / POINTER).read_text() == f"{to}\n"
        and read_metrics(save / METRICS)[-1]["iteration"] == to
    )
    clean = clean and not list(save.glob("*.tmp")) and not (save / LOCK).exists()
    saved = kind == SIGNAL and "ended early after iteration" in output
    checks = {
        f"{late} processes after {ORPHANED} s": late,
        f"went on from {went} to {to}, and {iteration} was committed": went not in ([], [iteration])
        or to < iteration,
        f"the commit {to} is not whole": to
        and find_checkpoint(save, report=lambda _: None) != save / f"iter_{to:07d}",
        f"ended by itself: {output[-300:]}": not note.exists() and to != LAST,
        f"no clean save at {to}: {output[-300:]}": saved and not clean,
        f"no clean exit at {to}: {output[-300:]}": kind == SIGNAL
        and not saved
        and to not in (iteration, LAST),
    }
    wrong = next((words for words, wrong in checks.items() if wrong), "") or differs(save)
    where = "random moment" if isinstance(plan["when"], float) else plan["hook"]
    what = kind if note.exists() else "(hook not reached)"
    return {
        "what": what,
        "where": where,
        "whom": plan["whom"],
        "from": iteration,
        "to": to,
        "gone": gone,
        "wrong": wrong,
    }


def together(kind: str, number: int, folder: Path, draw: random.Random) -> Row:
    """Start two or four runs into one folder, one after another.

    Each trains or is refused in a line.
    """
    save, processes = folder / "together", []
    shutil.rmtree(save, ignore_errors=True)
    for _ in range((2, 4)[number % 2]):
        processes.append(start(save, {}, ranks=1))
        time.sleep(draw.uniform(0, 2))
    outputs = [ended(*started, {}) for started in processes]
    ends = [
        (process.returncode, words) for (process, _), words in zip(processes, outputs, strict=True)
    ]
    lines = [outputs for status, outputs in ends if status == 1 and outputs.count("error: ") == 1]
    refused, trained = (
        sum(f"save is {save}, and" in outputs for outputs in lines),
        sum(status == 0 for status, _ in ends),
    )
    right = trained and trained + refused == len(ends) and newest(save) == LAST
    return {
        "what": kind,
        "where": f"{len(ends)} runs",
        "wrong": differs(save, 1) if right else str(ends)[-300:],
    }


def tried(what: str, trial: Callable[..., Row], *args: Any) -> Row:
    """Return a trial's row, or that it hung."""
    try:
        return trial(*args)
    except Hung as hung:
        return {"what": what, "where": "hung", "wrong": str(hung)}


def finished(folder: Path) -> Row:
    """Let the disturbed run go to its end, compare it with the undisturbed one, and remove it."""
    save, plan = folder / "disturbed", {"hook": ""}
    output = ended(*start(save, plan), plan) if newest(save) != LAST else ""
    wrong = (
        differs(save)
        if newest(save) == LAST
        else f"came to iteration {newest(save)}: {output[-300:]}"
    )
    shutil.rmtree(save)
    return {"what": END, "where": "", "wrong": wrong}


def table(rows: list[Row]) -> str:
    """Return what the trials showed as Markdown, and below it whatever was wrong."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault(
            (row["what"], "" if row["what"] == END else row["where"], row.get("whom", "")), []
        ).append(row)
    text = TITLE
    for place, group in sorted(groups.items()):
        gone = max((row["gone"] for row in group if "gone" in row), default="")
        text += (
            f"| {' | '.join(place)} | {len(group)} | "
            f"{sum(bool(row['wrong']) for row in group)} | {gone} |\n"
        )
    wrong = [f"* {row['what']}, {row['where']}: {row['wrong']}\n" for row in rows if row["wrong"]]
    return text + "\n" * bool(wrong) + "".join(wrong)


@one_line_errors
def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = parser_for("python -m tests.chaos", __doc__)
    for name, many in (("kills", 200), ("signals", 50), ("starts", 50)):
        parser.add_argument(f"--{name}", type=int, default=many, help="default: %(default)s")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/chaos"), help="of the runs (default: %(default)s)"
    )
    parser.add_argument(
        "--results", type=Path, default=ROOT / "bench" / "results" / "chaos.md", help="the table"
    )
    args = parser.parse_args(argv)
    folder, path = args.folder.resolve(), args.folder / "trials.jsonl"
    prepare(Request(max_bytes=2_000_000), folder / "data", progress=False)
    for ranks in (RANKS, 1):
        if newest(whole := folder / f"whole-{ranks}") != LAST:
            output = ended(*start(whole, plan := {"hook": ""}, ranks), plan)
            if newest(whole) != LAST:
                raise UserError(
                    f"the undisturbed run of {ranks} did not reach its end; look at it: "
                    f"{output[-300:]}"
                )
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    requested, begun, before = (
        {KILL: args.kills, SIGNAL: args.signals, STARTED: args.starts},
        time.monotonic(),
        len(rows),
    )

    def add(row: Row) -> None:
        rows.append(row)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        left = (Counter(requested) - Counter(row["what"] for row in rows)).total()
        each = (time.monotonic() - begun) / (len(rows) - before)
        print(f"{json.dumps(row)}: {left} left, {clock_time(left * each)}", flush=True)

    while behind := Counter(requested) - Counter(row["what"] for row in rows):
        what = max(behind, key=lambda what: behind[what] / requested[what])  # all kinds grow alike
        number = requested[what] - behind[what]
        trial, draw = (
            together if what == STARTED else disturbed,
            random.Random(f"{what} {len(rows)}"),
        )
        add(tried(what, trial, what, number, folder, draw))
        if newest(folder / "disturbed") == LAST:
            add(tried(END, finished, folder))
    if (folder / "disturbed").exists():
        add(tried(END, finished, folder))
    write_text(args.results, table(rows) + f"\n{in_words(describe('cpu'))}\n")
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    run_command(main)
