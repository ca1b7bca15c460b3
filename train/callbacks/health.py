"""Steps that went wrong: found alike on all ranks before the update, answered by a policy, counted
over restarts.
"""

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

MOST_SKIPPED_IN_A_ROW = 10
MOST_FAILURES = 3
"""Failures after one checkpoint, over restarts: a fault of a device is gone by then, a divergence
is not.
"""
WINDOW, LEAST = 100, 20
"""Good steps whose median a spike is measured against, and how many there must be."""
FAILURES = "failures.jsonl"
"""In a run's folder: an object per failure, ``iteration``, ``checkpoint`` (the newest one then) and
``why``.
"""


class TrainingError(UserError):
    """A run that cannot go on; the message says what to do about it."""


def read_failures(path: Path) -> list[dict[str, Any]]:
    """Read a file of failures without a last line that a crash cut. Raises TrainingError if it is
    not a run's.
    """
    *lines, _ = read_regular(path).split("\n") if path.exists() else [""]
    try:
        failures = [json.loads(line) for line in lines]
        for failure in failures:
            if (
                not (is_count(failure["iteration"]) and is_count(failure["checkpoint"]))
                or type(failure["why"]) is not str
            ):
                raise TypeError(f"{failure!r:.80}")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise TrainingError(
            f"{path} is no list of failures ({type(error).__name__}: {error}); remove it"
        ) from error
    return failures


@dataclass
class Progress:
    """The progress of a run, kept in its checkpoints."""

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped_iterations: int = 0
    skipped_in_a_row: int = 0
    """Consecutive ones at the end; kept so that a run that is restarted again and again, and only
    skips, ends too.
    """


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """The answer of a run to a step that goes wrong, and to ranks that no longer make steps."""

    bad_step_policy: Literal["skip", "rollback", "stop"] = "skip"
    """After a step whose loss or gradient norm is not finite, or a spike, and which changes no
    weight: skip goes on, and ends the run at ten in a row; rollback goes on from the last
    checkpoint, with the samples behind the bad ones; stop ends the run. A run that fails three
    times after one checkpoint, restarts counted in, ends."""
    check_for_spiky_loss: bool = False
    """Take a loss above spike_factor times the median of the last 100 good steps for a spike."""
    check_for_large_grads: bool = False
    """Take a gradient norm above spike_factor times the median of the last 100 good steps for a
    spike.
    """
    spike_factor: float = 10.0
    """Multiple of the median from which on it is a spike; and of the loss before an update, from
    which on nothing is saved after it."""

    watchdog_factor: float = 20.0
    """End all ranks, with their stacks written, when no step is made in this many times the median
    of the last 100; 0 never does."""
    watchdog_min_seconds: float = 120.0
    """Seconds without a step that the watchdog waits in any case."""

    def __post_init__(self) -> None:
        require(self, self.spike_factor > 1, "spike_factor", "it must be above 1")
        watches = self.watchdog_factor > 1 or self.watchdog_factor == 0
        require(self, watches, "watchdog_factor", "it must be above 1, or 0 for no watchdog")
        require(self, self.watchdog_min_seconds > 0, "watchdog_min_seconds", "it must be above 0")


class Heartbeat(Callback):
    """Tells a rank's watchdog of every step: if no other comes for long, it ends all ranks."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog

    def on_step_end(self, step: Step) -> None:
        """Tell that a step is made, and its seconds, by which the next is waited for."""
        self._watchdog.beat(step.record["iteration_time_ms"] / 1e3)


class Health:
    """Judges the steps of a run. All methods are collective, and alike on all ranks."""

    rolls_back = False
    """True if the run is to go on from its newest checkpoint instead of the next step."""

    def __init__(
        self,
        config: HealthConfig,
        save: str | None,
        records: list[tuple[Any, Any]],
        progress: Progress,
    ) -> None:
        """Begin a start of a run.

        Args:
            records: loss and gradient norm of the good steps so far; the first rank's count.
            progress: counts the skipped steps.

        Raises TrainingError: the run has failed too often after its newest checkpoint, not counting
        local ones.
        """
        self._config, self._progress = config, progress
        self._folder = Path(save) if save else None
        past, newest, failures = from_first(
            lambda: (records[-WINDOW:], self._newest(), self._failures())
        )
        self._good = deque[tuple[float, float]](past, WINDOW)
        before = [failure for failure in failures if failure["checkpoint"] == newest]
        if len(before) >= MOST_FAILURES:
            raise TrainingError(self._too_often(len(before), newest, before[-1]["why"]))

    def judge(self, loss: float, norm: float) -> str:
        """Say why a step is bad, and count it; empty if it is good. Raises TrainingError: the
        policy ends the run.
        """
        config, words = self._config, []
        limits = [math.inf, math.inf]
        if len(self._good) >= LEAST:
            limits = [
                config.spike_factor * statistics.median(values)
                for values in zip(*self._good, strict=True)
            ]
        checked = (config.check_for_spiky_loss, config.check_for_large_grads)
        for name, value, limit, spikes in zip(
            ("loss", "gradient norm"), (loss, norm), limits, checked, strict=True
        ):
            words += [(not math.isfinite(value), f"the {name} was not finite")]
            words += [
                (
                    spikes and value > limit,
                    f"the {name} was {value:.4g}, above {limit:.4g}, a spike",
                )
            ]
        why = self._agreed(words)
        progress, skips = self._progress, config.bad_step_policy == "skip"
        progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if why else 0
        if not why:
            self._good.append((loss, norm))
            return ""
        progress.skipped_iterations += 1
        if not skips or progress.skipped_in_a_row >= MOST_SKIPPED_IN_A_ROW:
            times = (
                f"{progress.skipped_in_a_row} steps in a row were bad, the last one"
                if skips
                else "a step was bad,"
            )
            good = progress.iteration - progress.skipped_in_a_row
            self._fail(progress.iteration, good, f"{times} iteration {progress.iteration}: {why}")
        return why

    def update_went_wrong(self, step: Step, loss_of: Callable[[Step], float]) -> bool:
        """Return whether the last update made weights that are not to be saved: then the run is to
        roll back.

        ``loss_of`` computes the loss of a step's samples again, with the weights of now;
        collective. Raises TrainingError: the policy ends the run.
        """
        if self._progress.skipped_in_a_row or not step.micro_batches:
            return False  # the weights are those before it
        before, after, factor = step.loss, loss_of(step), self._config.spike_factor
        grown = after > factor * before and after > before + 1
        words = [
            (
                not math.isfinite(after),
                "after its update the loss of its own samples was not finite",
            )
        ]
        why = self._agreed(
            [*words, (grown, f"its update took their loss from {before:.4g} to {after:.4g}")]
        )
        at = step.iteration
        if why:
            self._fail(at, at - 1, f"iteration {at} is not saved: {why}")
        return bool(why)

    def _agreed(self, words: list[tuple[bool, str]]) -> str:
        """Return the first text that is true on any rank, and on how many; one small sum over all
        ranks.
        """
        found = torch.tensor(
            [float(true) for true, _ in words]
        )  # the hosts', whom no device makes wait
        dist.all_reduce(found)
        size = dist.get_world_size()
        for count, (_, text) in zip(found.tolist(), words, strict=True):
            if count:
                return text if count == size else f"{text} on {count:.0f} of {size} ranks"
        return ""

    def _fail(self, iteration: int, good: int, why: str) -> None:
        """Note a failure in the run's folder, from which the run is to roll back; ``good`` was the
        last good iteration.

        Raises TrainingError: it is not to, cannot, or has done so too often.
        """
        from_first(lambda: self._note(iteration, good, why))
        self.rolls_back = True

    def _note(self, iteration: int, good: int, why: str) -> None:
        newest, times, again = self._newest(), 1, ""
        if self._folder is not None:
            failures = [
                *self._failures(),
                {"iteration": iteration, "checkpoint": newest, "why": why},
            ]
            write_text(
                self._folder / FAILURES, "".join(json.dumps(failure) + "\n" for failure in failures)
            )
            times = sum(failure["checkpoint"] == newest for failure in failures)
            if (
                old := next(
                    (saved for saved in saved_iterations(self._folder) if saved <= good), None
                )
            ) is not None:
                again = f"; go on from before with --load {self._folder} --ckpt-step {old} and another --save"
        if self._config.bad_step_policy != "rollback" or not newest:
            raise TrainingError(
                f"{why}; the last good one was {good}; lower lr, lengthen lr_warmup_iters, or look at the data{again}"
            )
        if times >= MOST_FAILURES:
            raise TrainingError(self._too_often(times, newest, why))

    def _newest(self) -> int:
        return next(iter(saved_iterations(self._folder)), 0) if self._folder else 0

    def _failures(self) -> list[dict[str, Any]]:
        return read_failures(self._folder / FAILURES) if self._folder else []

    def _too_often(self, times: int, checkpoint: int, why: str) -> str:
        return (
            f"the run failed {times} times after iteration {checkpoint}, the last time as {why}; lower lr, lengthen "
            f"lr_warmup_iters, or look at the data, and remove {self._folder}/{FAILURES} to go on from iteration "
            f"{checkpoint}"
        )
