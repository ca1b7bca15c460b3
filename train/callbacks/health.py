"""Detect bad steps on all ranks before the update, then skip them, roll back or stop the run."""

import json
import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from runtime.errors import UserError, require
from runtime.files import read_regular, write_text
from runtime.together import from_first
from runtime.watchdog import Watchdog
from train.callbacks import Callback, Step
from train.checkpoint.manifest import is_count
from train.checkpoint.search import saved_iterations

MAX_SKIPPED_IN_A_ROW = 10
MAX_FAILURES = 3
"""Number of failures after the same checkpoint that end a run, counted over restarts.

A hardware fault rarely comes three times at the same iteration; a divergence always does.
"""
WINDOW = 100
"""Number of recent good steps; their median loss and gradient norm define what a spike is."""
MIN_GOOD_STEPS = 20
"""Minimum number of good steps before a step can count as a spike."""
FAILURES = "failures.jsonl"
"""File in a run's folder with a JSON object per failure.

An object has ``iteration``, ``checkpoint`` (the iteration of the newest checkpoint at that time)
and ``why``.
"""


class TrainingError(UserError):
    """A run that cannot continue; the message says what to do about it."""


def read_failures(path: Path) -> list[dict[str, Any]]:
    """Read a file of failures; an incomplete last line, cut by a crash, is ignored.

    Raises TrainingError if a line is not a failure that a run has written.
    """
    if not path.exists():
        return []
    lines = read_regular(path).split("\n")[:-1]  # its errors already name the path and the fix
    failures = []
    try:
        for line in lines:
            failure = json.loads(line)
            has_counts = is_count(failure["iteration"]) and is_count(failure["checkpoint"])
            if not has_counts or type(failure["why"]) is not str:
                raise TypeError(f"{failure!r:.80}")
            failures.append(failure)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise TrainingError(
            f"{path} is not a list of failures ({type(error).__name__}: {error}); remove the file"
        ) from error
    return failures


@dataclass
class RunProgress:
    """A run's position in its iterations and data, saved in its checkpoints."""

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped_iterations: int = 0
    skipped_in_a_row: int = 0
    """Number of iterations skipped since the last good one.

    Checkpoints contain it, so that a run that skips every step ends even if it is restarted.
    """


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """Settings for a run's reaction to bad steps, and to ranks that make no progress."""

    bad_step_policy: Literal["skip", "rollback", "stop"] = "skip"
    """Reaction to a bad step, which is a step whose loss or gradient norm is not finite or is a
    spike. A bad step changes no weight. skip continues, and ends the run at ten bad steps in a
    row; rollback resumes from the last checkpoint, with the samples after the bad ones; stop ends
    the run. A run that fails three times after the same checkpoint, counted over restarts,
    ends."""
    check_for_spiky_loss: bool = False
    """Treat a loss above spike_factor times the median of the last 100 good steps as a spike."""
    check_for_large_grads: bool = False
    """Treat a gradient norm above spike_factor times the median of the last 100 good steps as a
    spike."""
    spike_factor: float = 10.0
    """Multiple of the median above which a step is a spike. No checkpoint is saved if an update
    raises the loss of its own samples by more than this factor (and by more than 1)."""

    watchdog_factor: float = 20.0
    """End all ranks, after writing their stack traces, if no step ends within this many times the
    median duration of the last 100 steps; 0 disables the watchdog."""
    watchdog_min_seconds: float = 120.0
    """The watchdog waits at least this many seconds for a step before it ends all ranks."""

    def __post_init__(self) -> None:
        require(self, self.spike_factor > 1, "spike_factor", "it must be above 1")
        watches = self.watchdog_factor > 1 or self.watchdog_factor == 0
        require(self, watches, "watchdog_factor", "it must be above 1, or 0 for no watchdog")
        require(self, self.watchdog_min_seconds > 0, "watchdog_min_seconds", "it must be above 0")


class Heartbeat(Callback):
    """Reports every step to this rank's watchdog, which ends all ranks if the steps stop."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog

    def on_step_end(self, step: Step) -> None:
        """Report a step and its duration, from which the watchdog computes its time limit."""
        self._watchdog.beat(step.record["iteration_time_ms"] / 1e3)


class Health:
    """Detects bad steps and decides what follows. Methods are collective and agree on all ranks.

    Two checks protect a run. `judge` looks at loss and gradient norm before the update, so that a
    bad step changes no weight. `update_went_wrong` runs before a save and computes the loss again
    with the updated weights: a checkpoint of broken weights would make every rollback useless.
    Failures are written to the run's folder, so that restarts are counted together.
    """

    rolls_back = False
    """True if the run has to resume from its newest checkpoint instead of taking the next step."""

    def __init__(
        self,
        config: HealthConfig,
        save: str | None,
        records: list[tuple[Any, Any]],
        progress: RunProgress,
    ) -> None:
        """Set up for one start of a run.

        Args:
            records: loss and gradient norm of the good steps so far; the first rank's are used.
            progress: the run's progress, whose counts of skipped steps are updated.

        Raises TrainingError if the run has failed too often after its newest shared checkpoint.
        """
        self._config = config
        self._progress = progress
        self._folder = Path(save) if save else None
        good_steps, newest, failures = from_first(
            lambda: (records[-WINDOW:], self._newest_checkpoint(), self._read_failures())
        )
        self._good_steps = deque[tuple[float, float]](good_steps, WINDOW)
        since_newest = [failure for failure in failures if failure["checkpoint"] == newest]
        if len(since_newest) >= MAX_FAILURES:
            why = since_newest[-1]["why"]
            raise TrainingError(self._too_often(len(since_newest), newest, why))

    def judge(self, loss: float, norm: float) -> str:
        """Count a step, and return the reason that it is bad; empty if it is good.

        Raises TrainingError if the policy ends the run.
        """
        config = self._config
        progress = self._progress
        why = self._first_agreed(self._problems(loss, norm))
        if not why:
            progress.skipped_in_a_row = 0
            self._good_steps.append((loss, norm))
            return ""

        progress.skipped_in_a_row += 1
        progress.skipped_iterations += 1
        skips = config.bad_step_policy == "skip"
        if not skips or progress.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            subject = "a step was bad in"
            if skips:
                subject = f"{progress.skipped_in_a_row} steps in a row were bad, the last one in"
            last_good = progress.iteration - progress.skipped_in_a_row
            self._fail(
                progress.iteration, last_good, f"{subject} iteration {progress.iteration}: {why}"
            )
        return why

    def _problems(self, loss: float, norm: float) -> list[tuple[bool, str]]:
        """Return all possible problems of a step's loss and norm, as pairs of (occurs, text)."""
        config = self._config
        loss_limit = math.inf
        norm_limit = math.inf
        if len(self._good_steps) >= MIN_GOOD_STEPS:
            good_losses, good_norms = zip(*self._good_steps, strict=True)
            loss_limit = config.spike_factor * statistics.median(good_losses)
            norm_limit = config.spike_factor * statistics.median(good_norms)

        # All ranks must list the same problems in the same order, because the flags are summed.
        problems = []
        for name, value, limit, is_checked in (
            ("loss", loss, loss_limit, config.check_for_spiky_loss),
            ("gradient norm", norm, norm_limit, config.check_for_large_grads),
        ):
            spike = f"the {name} was {value:.4g}, a spike above the limit {limit:.4g}"
            problems.append((not math.isfinite(value), f"the {name} was not finite"))
            problems.append((is_checked and value > limit, spike))
        return problems

    def update_went_wrong(self, step: Step, loss_of: Callable[[Step], float]) -> bool:
        """Return True if the last update broke the weights, so that the run has to roll back.

        ``loss_of`` computes the loss of a step's samples again, with the updated weights;
        collective. Raises TrainingError if the policy ends the run.
        """
        if self._progress.skipped_in_a_row or not step.micro_batches:
            return False  # the weights have not changed

        before = step.loss
        after = loss_of(step)
        has_grown = after > self._config.spike_factor * before and after > before + 1
        why = self._first_agreed(
            [
                (
                    not math.isfinite(after),
                    "the loss of its own samples was not finite after its update",
                ),
                (
                    has_grown,
                    f"its update raised its samples' loss from {before:.4g} to {after:.4g}",
                ),
            ]
        )
        if why:
            iteration = step.iteration
            self._fail(iteration, iteration - 1, f"iteration {iteration} is not saved: {why}")
        return bool(why)

    def _first_agreed(self, problems: list[tuple[bool, str]]) -> str:
        """Return the first problem that any rank has, with the number of ranks; empty if none.

        This is one small all-reduce of CPU tensors over all ranks, so that no device has to wait.
        """
        flags = torch.tensor([float(is_present) for is_present, _ in problems])
        dist.all_reduce(flags)
        world_size = dist.get_world_size()
        for count, (_, text) in zip(flags.tolist(), problems, strict=True):
            if count == world_size:
                return text
            if count:
                return f"{text} on {count:.0f} of {world_size} ranks"
        return ""

    def _fail(self, iteration: int, last_good: int, why: str) -> None:
        """Record a failure in the run's folder, and request a rollback.

        Raises TrainingError if the policy is not "rollback", there is no checkpoint to return to,
        or the run has failed too often.
        """
        from_first(lambda: self._record_failure(iteration, last_good, why))
        self.rolls_back = True

    def _record_failure(self, iteration: int, last_good: int, why: str) -> None:
        newest = self._newest_checkpoint()
        times = 1
        remedy = ""
        if self._folder is not None:
            failures = self._read_failures()
            failures.append({"iteration": iteration, "checkpoint": newest, "why": why})
            lines = [json.dumps(failure) + "\n" for failure in failures]
            write_text(self._folder / FAILURES, "".join(lines))
            times = sum(failure["checkpoint"] == newest for failure in failures)

            earlier = [saved for saved in saved_iterations(self._folder) if saved <= last_good]
            if earlier:
                remedy = (
                    f"; continue from an earlier checkpoint with --load {self._folder} "
                    f"--ckpt-step {earlier[0]} and another --save"
                )
        if self._config.bad_step_policy != "rollback" or not newest:
            raise TrainingError(
                f"{why}; the last good iteration was {last_good}; lower lr, raise "
                f"lr_warmup_iters, or look at the data{remedy}"
            )
        if times >= MAX_FAILURES:
            raise TrainingError(self._too_often(times, newest, why))

    def _newest_checkpoint(self) -> int:
        """Return the newest checkpoint's iteration; 0 if there is none."""
        if self._folder is None:
            return 0
        iterations = saved_iterations(self._folder)
        return iterations[0] if iterations else 0

    def _read_failures(self) -> list[dict[str, Any]]:
        return read_failures(self._folder / FAILURES) if self._folder else []

    def _too_often(self, times: int, checkpoint: int, why: str) -> str:
        return (
            f"the run failed {times} times after iteration {checkpoint}, the last time because "
            f"{why}; lower lr, raise lr_warmup_iters, or look at the data, and remove "
            f"{self._folder}/{FAILURES} to continue from iteration {checkpoint}"
        )
