"""Ring Attention's last table in small: does a longer context of one's own attempts make the next
attempt better?

A small GPT is trained on chains of 1, 4, 16 and 64 attempts at tasks of the world of doors, the
same attempts and as many tokens each time. It then plays unseen tasks, and each finished attempt
joins its context. As a control each attempt is at another task than those of the context. Finished
runs are saved at once, and the same command resumes.

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
from data.text.record import TOKENIZER
from model.generate import Draw, Read
from papers import rows
from papers.runs import flags_of, keep_run, read_runs
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
"""A line for each run."""
CHAIN_LENGTHS = (1, 4, 16, 64)
LONGEST = max(CHAIN_LENGTHS)
CONTROL = "shuffled"
"""The longest chain's model, with attempts of other tasks in its context."""
RANKS, BATCH, SEED = 2, 2, 0
TOKENS = LONGEST * (4 * STEPS + 1)
"""Tokens of a sample, which holds one longest chain, or as many shorter ones as have its tokens."""
FLAGS = f"""
    --model-type gpt --position-embedding-type rope --num-layers 2 --hidden-size 64 --num-attention-heads 4
    --init-method-std 0.06 --seq-length {TOKENS} --global-batch-size {BATCH} --sft --reset-attention-mask
    --reset-position-ids --split 1,0,0 --eval-iters 0 --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine
    --lr-warmup-iters 20 --weight-decay 0.0 --adam-beta2 0.98 --device cpu --context-parallel-method ring
"""
TEMPERATURE = 0.4
"""Doors are drawn at it: the players' slips are learned too, and a lower one leaves most of them
out.
"""
LATER = 16
"""The attempt whose return is compared with the first one's."""
ERRORS = 2.0
"""Standard errors of a difference beyond which it counts."""
LAST = 50
"""Final updates whose mean loss is a run's."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of an experiment; the defaults are the table's."""

    tasks: int = 800
    """Tasks to train on."""
    iterations: int = 400
    unseen: int = 200
    """Tasks to play."""


def command_line(trajectories: int, data: Path, save: Path, iterations: int) -> list[str]:
    """Return the flags of pretrain_gpt.py for a run; the longest chains are shared by its
    processes.
    """
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
    """Train one rank of a run of pretrain_gpt.py, without its lines."""
    with redirect_stdout(StringIO()):
        pretrain_gpt.main(list(flags), PEAK)


def roll_out(
    read: Read, codec: Codec, right: np.ndarray, attempts: int, *, shuffled: bool = False
) -> np.ndarray:
    """Play K tasks in so many attempts each; return the returns, int64 [K, N].

    The context is what training had, but in order of time: what is left of the best possible
    return, the room, the door and the reward of each step, and at an attempt's end whether it
    reached that return.

    Args:
        read: as of ``Writer.begin``; it draws doors.
        right: int64 [K, R].
        shuffled: let each attempt be at the next one of the K tasks, so that none of the context is
            at its task.
    """
    position, totals, end = (
        {"read": 0},
        np.zeros((len(right), attempts), np.int64),
        np.zeros((len(right), 0), np.int64),
    )
    action = int(np.flatnonzero(codec.acts)[0])

    def drawn(tokens: np.ndarray) -> np.ndarray:
        begin, position["read"] = position["read"], position["read"] + tokens.shape[1]
        positions, ends = (
            torch.arange(begin, position["read"])[None],
            torch.full((len(right),), position["read"]),
        )
        return read(torch.from_numpy(tokens), positions, ends).numpy()[:, None]

    for attempt in range(attempts):
        world = Rooms(np.roll(right, attempt, axis=0) if shuffled else right)
        total = np.zeros(len(right), np.int64)
        for _ in range(STEPS):
            step = np.stack(
                (BEST - total, world.room, 0 * total, 0 * total), -1
            )  # door and reward are to come
            ids = drawn(np.concatenate((end, codec.encode(step)[:, :action]), 1))
            reward = world.open(ids[:, 0] - codec.offsets[action])
            total = total + reward
            step[:, -1] = reward
            end = np.concatenate((ids, codec.encode(step)[:, -1:]), 1)
        marks = np.array([[codec.mark(float(one), BEST)] for one in total])
        end, totals[:, attempt] = np.concatenate((end, marks), 1), total
    return totals


def play(
    run: Path, codec: Codec, right: np.ndarray, attempts: int, *, shuffled: bool = False
) -> np.ndarray:
    """Roll out a run's model, which draws doors; as ``roll_out``."""
    first = int(codec.offsets[codec.acts][0])
    draw = Draw(temperature=TEMPERATURE, generator=torch.Generator().manual_seed(SEED))

    def door(hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return first + draw(hidden, logits[:, first : first + doors.DOORS])

    with torch.no_grad(), opened(run) as writer:
        return roll_out(writer.begin(2, door), codec, right, attempts, shuffled=shuffled)


def figures(returns: np.ndarray) -> dict[str, list[float]]:
    """Return the mean return [N] of each attempt over K tasks, of [K, N], and its standard error,
    to 3 decimals.
    """
    error = returns.std(0, ddof=1) / len(returns) ** 0.5
    return {"mean": returns.mean(0).round(3).tolist(), "error": error.round(3).tolist()}


def gain(
    later: dict[str, Any], attempt: int, first: dict[str, Any], at: int = 1
) -> tuple[float, float]:
    """Return how much larger the mean return of an attempt is than of another one, and the
    difference's error.

    Attempts count from 1. Both are taken as independent samples of tasks.
    """
    error = (later["error"][attempt - 1] ** 2 + first["error"][at - 1] ** 2) ** 0.5
    return later["mean"][attempt - 1] - first["mean"][at - 1], error


def compared(runs: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return a line for each comparison whose runs are there, and those of them that do not hold."""
    longest, short, control = (runs.get(name) for name in (str(LONGEST), "4", CONTROL))
    lines, wrong = list[str](), list[str]()

    def compare(name: str, difference: tuple[float, float], wanted: bool = True) -> None:
        more, error = difference
        lines.append(f"{name:62}{more:+.3f}, {more / (error or np.inf):+.1f} standard errors")
        if (more > ERRORS * error) != wanted:
            wrong.append(name)

    if longest:
        compare(
            f"attempt {LATER} above the first, {LONGEST} in the context",
            gain(longest, LATER, longest),
        )
    if longest and short:
        compare(
            f"the last of {LONGEST} in the context above the last of 4",
            gain(longest, LONGEST, short, 4),
        )
    if control:
        name = f"attempt {LATER} above the first, of shuffled tasks (control)"
        compare(name, gain(control, LATER, control), wanted=False)
    return lines, wrong


def finished(size: Size, data: Path, path: Path) -> dict[str, Any]:
    """Train and play what ``path`` lacks, saving each run; return all that ``path`` then holds.

    Raises UserError: ``path`` holds runs of another size, or another format; RuntimeError: a rank
    failed.
    """
    result = read_runs(path, asdict(size))
    missing = [str(n) for n in CHAIN_LENGTHS if str(n) not in result["runs"]]
    if not missing and CONTROL in result["runs"]:
        print(f"all runs are in {path} already, nothing trained; --results FOLDER starts afresh")
        return result

    def note(name: str, measured: Callable[[], dict[str, Any]]) -> None:
        figures_of_run = keep_run(result, path, name, measured)
        message = f"return {figures_of_run['mean'][0]:.2f} at the first attempt, {figures_of_run['mean'][-1]:.2f} at the last"
        print(f"{name:10}{message}, {figures_of_run['seconds']:.0f} s", flush=True)

    right = doors.tasks(SEED, 0, size.tasks + size.unseen)
    seen, unseen = right[: size.tasks], right[size.tasks :]
    history = episodes(seen, LONGEST, SEED) if missing else []
    for name in missing:
        note(name, partial(_trained, int(name), history, unseen, size.iterations, data))
    for name, perfect in (("players", False), ("perfect", True)):
        result["runs"][name] = figures(
            histories(unseen, LONGEST, SEED + 1, perfect=perfect)[2].sum(-1)
        )
    prefix = data / f"{LONGEST}"
    shuffled = partial(play, _run_of(prefix), Codec.load(prefix), unseen, LATER, shuffled=True)
    note(CONTROL, lambda: figures(shuffled()))
    return result


def _run_of(prefix: Path) -> Path:
    return prefix.with_name(f"run-{prefix.name}")


def _trained(
    trajectories: int, history: list[Any], unseen: np.ndarray, iterations: int, data: Path
) -> dict[str, Any]:
    """Write the data of a run, train it and play; return its loss and returns."""
    prefix = data / str(trajectories)
    write_chains(history, prefix, Chains(trajectories=trajectories, seq_length=TOKENS, seed=SEED))
    if (run := _run_of(prefix)).exists():
        shutil.rmtree(run)  # of a start that was interrupted
    run_ranks(train, RANKS, command_line(trajectories, prefix, run, iterations), timeout=3600)
    losses = [record["lm_loss"] for record in read_metrics(run / METRICS)]
    return {
        "loss": fmean(losses[-LAST:]),
        **figures(play(run, Codec.load(prefix), unseen, trajectories)),
    }


def draw(runs: dict[str, Any]) -> "Figure":
    """Draw the mean return by attempt with its interval of two standard errors, a curve for each
    run.
    """
    from matplotlib.figure import Figure

    from tools.common.report import PALETTE, plain

    names = {str(n): f"{n} in the context" for n in CHAIN_LENGTHS} | {
        CONTROL: f"{LONGEST}, of shuffled tasks"
    }
    figure = Figure(figsize=(7, 4.4), layout="constrained")
    axes = figure.subplots()
    for colour, (name, label) in zip(PALETTE, names.items(), strict=False):
        mean, error = (np.array(runs[name][part]) for part in ("mean", "error"))
        attempt = np.arange(1, len(mean) + 1)
        axes.plot(
            attempt,
            mean,
            "o-" if len(attempt) < 5 else "-",
            color=colour,
            label=label,
            markersize=4,
        )
        axes.fill_between(
            attempt,
            mean - ERRORS * error,
            mean + ERRORS * error,
            color=colour,
            alpha=0.2,
            linewidth=0,
        )
    for name, label, style in (
        ("players", "the players trained on", "--"),
        ("perfect", "a perfect player", ":"),
    ):
        axes.plot(
            np.arange(1, LONGEST + 1), runs[name]["mean"], style, color="#4D4D4D", label=label
        )
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
    """Run the command; finished runs stay, and the same command goes on. Return its exit status."""
    parser, size = parser_for("python -m papers.trajectories.attempts", __doc__), Size()
    for name, default in asdict(size).items():
        parser.add_argument(
            f"--{name}", type=positive, default=default, metavar="N", help="default: %(default)s"
        )
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS.parent,
        metavar="FOLDER",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--data", type=Path, default=Path("runs/papers/doors"), metavar="FOLDER", help="%(default)s"
    )
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the ranks' server
    size = Size(**{name: getattr(args, name) for name in asdict(size)})
    path = args.results / RESULTS.name
    runs = finished(size, args.data, path)["runs"]
    draw(runs).savefig(path.with_suffix(".png"), dpi=90)
    lines, wrong = compared(runs)
    print("\n".join(lines))
    if wrong:
        raise UserError(f"it is not as the paper says: {'; '.join(wrong)}")


if __name__ == "__main__":
    run_command(main)
