"""Ring Attention's last table at small scale: do earlier attempts in the context help the next one?

A small GPT is trained on chains of 1, 4, 16 and 64 attempts at tasks of the world of doors, each
time with the same attempts and the same number of tokens. It then plays unseen tasks, and each
finished attempt is added to its context. In a control, every attempt is at another task than those
in the context, so the context cannot help. Finished runs are saved at once, and the same command
resumes.

    make rl-table
    python -m papers.trajectories.attempts --tasks 64 --iterations 8 --unseen 16 \\
        --results runs/rl --data runs/rl
"""

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import pretrain_gpt
from bench.runs import flags_of, keep_run, read_runs
from data.text.record import TOKENIZER
from model.generate import Draw, Read
from papers import rows
from papers.trajectories import doors
from papers.trajectories.doors import BEST, STEPS, Rooms, episodes, histories
from papers.trajectories.episodes import Chains, Codec, write_chains
from runtime.errors import UserError
from runtime.ranks import run_ranks
from tools.common.arguments import one_line_errors, parser_for, positive, run_command
from tools.common.training import PEAK
from train.callbacks.metrics import METRICS, read_metrics
from train.generation import opened

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = rows.FOLDER / "results" / "ring_rl.jsonl"
"""Results file, with a line for each finished run."""
CHAIN_LENGTHS = (1, 4, 16, 64)
LONGEST = max(CHAIN_LENGTHS)
CONTROL = "shuffled"
"""Name of the control: the longest chain's model, with attempts of other tasks in its context."""
RANKS = 2
BATCH = 2
SEED = 0
TOKENS = LONGEST * (4 * STEPS + 1)
"""Number of tokens of a sample: one longest chain, or shorter chains that fill the same length."""
FLAGS = f"""
    --model-type gpt --position-embedding-type rope --num-layers 2 --hidden-size 64
    --num-attention-heads 4 --init-method-std 0.06 --seq-length {TOKENS}
    --global-batch-size {BATCH} --sft --reset-attention-mask --reset-position-ids --split 1,0,0
    --eval-iters 0 --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 20
    --weight-decay 0.0 --adam-beta2 0.98 --device cpu --context-parallel-method ring
"""
TEMPERATURE = 0.4
"""Sampling temperature for the model's doors. The model also learns the slips (random doors) of the
players that it is trained on; at a temperature below 1 it makes fewer of them."""
LATER = 16
"""Number, from 1, of the attempt whose return is compared with the first one's."""
ERRORS = 2.0
"""Number of standard errors that a difference must exceed to count as a gain."""
LAST = 50
"""Number of final updates whose mean loss is the run's loss."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of an experiment; the defaults are the table's."""

    tasks: int = 800
    """Number of tasks to train on."""
    iterations: int = 400
    unseen: int = 200
    """Number of other tasks that the trained model plays."""


def command_line(trajectories: int, data: Path, save: Path, iterations: int) -> list[str]:
    """Return the flags of pretrain_gpt.py for a run; only the longest chains are sharded."""
    cp = RANKS if trajectories == LONGEST else 1
    flags = {
        "data-path": data,
        "tokenizer-model": f"{data}{TOKENIZER}/tokenizer.json",
        "micro-batch-size": BATCH * cp // RANKS,
        "context-parallel-size": cp,
        "train-iters": iterations,
        "log-interval": iterations,
        "save": save,
    }
    return [*FLAGS.split(), *flags_of(flags)]


def train(rank: int, world_size: int, flags: Sequence[str]) -> None:
    """Train one rank of a run of pretrain_gpt.py, and discard its output."""
    with redirect_stdout(StringIO()):
        pretrain_gpt.main(list(flags), PEAK)


def roll_out(
    read: Read, codec: Codec, right: np.ndarray, attempts: int, *, shuffled: bool = False
) -> np.ndarray:
    """Play K tasks with N ``attempts`` each; return the attempts' returns, int64 [K, N].

    The context is as in training, but in order of time: the remaining return, the room, the door
    and the reward of each step, and at an attempt's end the mark that tells if it reached the best
    return.

    Args:
        read: function from ``Writer.begin`` that reads tokens and samples each task's next door.
        right: the right doors, int64 [K, R].
        shuffled: move on to the next one of the K tasks after each attempt, so that no attempt in
            the context is at the current task.
    """
    num_tasks = len(right)
    returns = np.zeros((num_tasks, attempts), np.int64)
    action = int(np.flatnonzero(codec.acts)[0])
    num_read = 0

    def next_door(tokens: np.ndarray) -> np.ndarray:
        """Append tokens [K, S] to the context; return the ids of doors [K, 1]."""
        nonlocal num_read
        start = num_read
        num_read += tokens.shape[1]
        position_ids = torch.arange(start, num_read)[None]
        lengths = torch.full((num_tasks,), num_read)
        return read(torch.from_numpy(tokens), position_ids, lengths).numpy()[:, None]

    unread = np.zeros((num_tasks, 0), np.int64)  # tokens that follow the last door
    for attempt in range(attempts):
        world = Rooms(np.roll(right, attempt, axis=0) if shuffled else right)
        total = np.zeros(num_tasks, np.int64)

        for _ in range(STEPS):
            # The columns of a step [K, 4]; the door and the reward are not known yet.
            step = np.stack((BEST - total, world.room, 0 * total, 0 * total), -1)
            before_door = codec.encode(step)[:, :action]
            ids = next_door(np.concatenate((unread, before_door), 1))

            reward = world.open(ids[:, 0] - codec.offsets[action])
            total = total + reward
            step[:, -1] = reward
            unread = np.concatenate((ids, codec.encode(step)[:, -1:]), 1)

        marks = np.array([[codec.mark(float(value), BEST)] for value in total])  # [K, 1]
        unread = np.concatenate((unread, marks), 1)
        returns[:, attempt] = total
    return returns


def play(
    run: Path, codec: Codec, right: np.ndarray, attempts: int, *, shuffled: bool = False
) -> np.ndarray:
    """Play tasks with a run's model, which samples the doors; arguments as in ``roll_out``.

    Only tokens of doors are sampled, since no other token is a move in the world.
    """
    first = int(codec.offsets[codec.acts][0])
    draw = Draw(temperature=TEMPERATURE, generator=torch.Generator().manual_seed(SEED))

    def door(hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return first + draw(hidden, logits[:, first : first + doors.DOORS])

    with torch.no_grad(), opened(run) as writer:
        return roll_out(writer.begin(2, door), codec, right, attempts, shuffled=shuffled)


def figures(returns: np.ndarray) -> dict[str, list[float]]:
    """Return the mean return of each attempt, and the standard error of this mean.

    ``returns`` is [K, N], and the mean is over the K tasks. Both lists are rounded to 3 decimals.
    """
    error = returns.std(0, ddof=1) / len(returns) ** 0.5
    return {"mean": returns.mean(0).round(3).tolist(), "error": error.round(3).tolist()}


def gain(
    later: dict[str, Any], attempt: int, first: dict[str, Any], first_attempt: int = 1
) -> tuple[float, float]:
    """Return the difference of two attempts' mean returns, and its standard error.

    Attempts are numbered from 1. The error is that of two independent samples of tasks.
    """
    error = (later["error"][attempt - 1] ** 2 + first["error"][first_attempt - 1] ** 2) ** 0.5
    return later["mean"][attempt - 1] - first["mean"][first_attempt - 1], error


def compared(runs: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return a line per comparison of finished runs, and the names of failed comparisons.

    The paper's claim holds if a later attempt has a higher return than the first, and a longer
    chain a higher one than a shorter chain. The control must not gain: this shows that the gain
    comes from attempts at the same task, and not from a longer context.
    """
    longest = runs.get(str(LONGEST))
    short = runs.get("4")
    control = runs.get(CONTROL)
    lines: list[str] = []
    wrong: list[str] = []

    def compare(name: str, result: tuple[float, float], expected: bool = True) -> None:
        difference, error = result
        in_errors = difference / (error or np.inf)
        lines.append(f"{name:62}{difference:+.3f}, {in_errors:+.1f} standard errors")
        if (difference > ERRORS * error) != expected:
            wrong.append(name)

    if longest:
        name = f"attempt {LATER} above the first, {LONGEST} in the context"
        compare(name, gain(longest, LATER, longest))
    if longest and short:
        name = f"the last of {LONGEST} in the context above the last of 4"
        compare(name, gain(longest, LONGEST, short, 4))
    if control:
        name = f"attempt {LATER} above the first, of shuffled tasks (control)"
        compare(name, gain(control, LATER, control), expected=False)
    return lines, wrong


def finished(size: Size, data: Path, path: Path) -> dict[str, Any]:
    """Train, play and save the runs that ``path`` lacks; return all results of ``path``.

    Raises UserError if ``path`` holds runs of another size, or has another format, and RuntimeError
    if a rank failed.
    """
    result = read_runs(path, asdict(size))
    missing = [str(n) for n in CHAIN_LENGTHS if str(n) not in result["runs"]]
    if not missing and CONTROL in result["runs"]:
        print(
            f"all runs are in {path} already, so nothing is trained; give another --results to "
            "start another table"
        )
        return result

    def keep(name: str, measure: Callable[[], dict[str, Any]]) -> None:
        run = keep_run(result, path, name, measure)
        print(
            f"{name:10}return {run['mean'][0]:.2f} at the first attempt, {run['mean'][-1]:.2f} at "
            f"the last, {run['seconds']:.0f} s",
            flush=True,
        )

    right = doors.tasks(SEED, 0, size.tasks + size.unseen)
    trained_on = right[: size.tasks]
    unseen = right[size.tasks :]
    history = episodes(trained_on, LONGEST, SEED) if missing else []
    for name in missing:
        keep(name, partial(_train_and_play, int(name), history, unseen, size.iterations, data))

    # References for the picture: players like those of the training data, and perfect ones.
    for name, perfect in (("players", False), ("perfect", True)):
        rewards = histories(unseen, LONGEST, SEED + 1, perfect=perfect)[2]
        result["runs"][name] = figures(rewards.sum(-1))

    prefix = data / f"{LONGEST}"
    codec = Codec.load(prefix)
    keep(CONTROL, lambda: figures(play(_run_of(prefix), codec, unseen, LATER, shuffled=True)))
    return result


def _run_of(prefix: Path) -> Path:
    return prefix.with_name(f"run-{prefix.name}")


def _train_and_play(
    trajectories: int, history: list[Any], unseen: np.ndarray, iterations: int, data: Path
) -> dict[str, Any]:
    """Write a run's data, train on it, and play with its model; return the loss and the returns.

    All runs have the same attempts, whatever the length of their chains.
    """
    prefix = data / str(trajectories)
    write_chains(history, prefix, Chains(trajectories=trajectories, seq_length=TOKENS, seed=SEED))

    run = _run_of(prefix)
    if run.exists():
        shutil.rmtree(run)  # left by an interrupted start
    run_ranks(train, RANKS, command_line(trajectories, prefix, run, iterations), timeout=3600)

    losses = [record["lm_loss"] for record in read_metrics(run / METRICS)]
    returns = play(run, Codec.load(prefix), unseen, trajectories)
    return {"loss": fmean(losses[-LAST:]), **figures(returns)}


def draw(runs: dict[str, Any]) -> "Figure":
    """Draw each run's mean return over attempts, with a band of two standard errors."""
    from matplotlib.figure import Figure

    from tools.common.report import PALETTE, plain

    names = {str(n): f"{n} in the context" for n in CHAIN_LENGTHS}
    names[CONTROL] = f"{LONGEST}, of shuffled tasks"
    figure = Figure(figsize=(7, 4.4), layout="constrained")
    axes = figure.subplots()
    for colour, (name, label) in zip(PALETTE, names.items(), strict=False):
        mean = np.array(runs[name]["mean"])
        margin = ERRORS * np.array(runs[name]["error"])
        attempt = np.arange(1, len(mean) + 1)
        style = "-"
        if len(attempt) < 5:  # a line with a single point would be invisible
            style = "o-"
        axes.plot(attempt, mean, style, color=colour, label=label, markersize=4)
        axes.fill_between(
            attempt, mean - margin, mean + margin, color=colour, alpha=0.2, linewidth=0
        )

    attempt = np.arange(1, LONGEST + 1)
    for name, label, style in (
        ("players", "the players trained on", "--"),
        ("perfect", "a perfect player", ":"),
    ):
        axes.plot(attempt, runs[name]["mean"], style, color="#4D4D4D", label=label)
    axes.set(
        xlabel="attempt", ylabel=f"return (at most {BEST})", xscale="log", title="Unseen tasks"
    )
    axes.set_xticks(CHAIN_LENGTHS, [str(n) for n in CHAIN_LENGTHS])
    axes.minorticks_off()
    plain(axes)
    axes.legend(frameon=False, fontsize=8)
    return figure


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command, which saves finished runs and resumes; return its exit status."""
    parser = parser_for("python -m papers.trajectories.attempts", __doc__)
    for name, default in asdict(Size()).items():
        parser.add_argument(
            f"--{name}", type=positive, default=default, metavar="N", help="default: %(default)s"
        )
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS.parent,
        metavar="FOLDER",
        help="folder of results (default: %(default)s)",
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=Path("runs/papers/doors"),
        metavar="FOLDER",
        help="folder of training data and models (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the fork server of the ranks

    size = Size(tasks=args.tasks, iterations=args.iterations, unseen=args.unseen)
    path = args.results / RESULTS.name
    runs = finished(size, args.data, path)["runs"]
    draw(runs).savefig(path.with_suffix(".png"), dpi=90)
    lines, wrong = compared(runs)
    print("\n".join(lines))
    if wrong:
        raise UserError(f"the results contradict the paper: {'; '.join(wrong)}")


if __name__ == "__main__":
    run_command(main)
