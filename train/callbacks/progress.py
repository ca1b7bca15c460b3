"""Progress lines on the screen, records in the log, and the peak FLOP/s for MFU."""

import math
import time
from collections.abc import Sequence
from typing import Any

import torch

from kernels.operators import linear
from runtime.machine import card_of
from runtime.progress import clock_time
from train.callbacks import Callback, Step, say
from train.callbacks.metrics import RunLog
from train.config.common import LoopConfig
from train.objectives import Objective

COLUMNS = 110
"""Maximum width of a progress line, in characters."""


class ProgressReport(Callback):
    """Writes each step's record to the log, and prints a line every log_interval iterations.

    The first step gets a line too, so that a waiting user sees at once that the run works and how
    long it will take.
    """

    def __init__(
        self,
        log: RunLog | None,
        objective: Objective,
        train_iters: int,
        log_interval: int,
        device_type: str,
    ) -> None:
        """Set up; only the first rank has a ``log``, and the other ranks report nothing."""
        self._log = log
        self._objective = objective
        self._train_iters = train_iters
        self._log_interval = log_interval
        self._processor = "GPU" if device_type == "cuda" else "process"
        self._unprinted: list[dict[str, Any]] = []
        self._first_step: tuple[int, float] | None = None
        """Iteration of the first step of this start, and the time at which that step ended."""
        self._machine_printed = False

    def on_step_end(self, step: Step) -> None:
        """Write a step's record, and print the lines that are due."""
        if self._log is None:
            return
        self._log.write(step.record)
        for line in self.lines(step.record, time.monotonic(), step.last):
            say(line)
        if "validation_loss" in step.record:
            say(self._objective.validation_line(step.record))
            self._log.sync()

    def lines(self, record: dict[str, Any], now: float, last: bool = False) -> list[str]:
        """Return the lines to print after an iteration; ``now`` is a monotonic time in seconds."""
        iteration = record["iteration"]
        is_first_step = self._first_step is None
        if self._first_step is None:
            self._first_step = (iteration, now)
        self._unprinted.append(record)
        if not (is_first_step or last or iteration % self._log_interval == 0):
            return []

        # The mean includes validations and checkpoints since the first step of this start.
        first_iteration, first_time = self._first_step
        num_timed = iteration - first_iteration
        if num_timed:
            seconds = (now - first_time) / num_timed
        else:
            seconds = record["iteration_time_ms"] / 1e3
        seconds_left = seconds * (self._train_iters - iteration)

        lines = [
            progress_line(type(self._objective), self._unprinted, self._train_iters, seconds_left)
        ]
        if last or (not is_first_step and not self._machine_printed):
            lines.append(machine_line(self._unprinted, self._processor))
            self._machine_printed = True
        self._unprinted = []
        return lines


def shortage_note(iteration: int, train: LoopConfig, available: int | None, requested: int) -> str:
    """Return a note if no iterations are left to train, or validation samples are too few.

    Args:
        iteration: the last completed iteration.
        available: number of validation samples; None if the run has no validation data.
        requested: number of samples that a validation uses.
    """
    if iteration >= train.train_iters:
        return (
            f"iteration {iteration} of {train.train_iters}: nothing left to train; "
            "raise --train-iters to continue"
        )
    if available is not None and available < requested:
        return (
            f"note: eval_iters {train.eval_iters} needs {requested} validation samples, but there "
            f"are only {available}; all of them are used"
        )
    return ""


def progress_line(
    objective: type[Objective],
    records: Sequence[dict[str, Any]],
    train_iters: int,
    seconds_left: float,
) -> str:
    """Return one line on the iterations since the last line.

    Losses, times and rates are means; the gradient norm and the learning rate are the last
    iteration's. A line longer than ``COLUMNS`` drops the learning rate, then the rate.
    """
    last = records[-1]
    unit = objective.unit
    loss = _mean(records, objective.loss_name)
    num_skipped = sum(not math.isfinite(record["grad_norm"]) for record in records)
    rate = _mean(records, f"{unit}_per_second", "iteration_time_ms")
    fields = {
        "iteration": f"iteration {last['iteration']}/{train_iters}",
        "loss": f"loss {loss:.4f}" if loss < 100 else f"loss {loss:.4g}",
        "norm": f"grad norm {last['grad_norm']:.3g}",
        "lr": f"lr {last['learning_rate']:.2e}",
        "time": f"{_mean(records, 'iteration_time_ms'):.0f} ms",
        "rate": f"{_with_prefix(rate)} {unit}/s",
    }
    if num_skipped:
        fields["skipped"] = f"{num_skipped} skipped"
    if last["iteration"] < train_iters:
        fields["left"] = f"{clock_time(seconds_left)} left"

    line = " | ".join(fields.values())
    for name in ("lr", "rate"):
        if len(line) > COLUMNS:
            del fields[name]
            line = " | ".join(fields.values())
    return line


def machine_line(records: Sequence[dict[str, Any]], processor: str) -> str:
    """Return one line with the FLOP rate, MFU and memory of the iterations since the last line."""
    tflops = _mean(records, "tflops_per_gpu", "iteration_time_ms")
    mfu = _mean(records, "mfu", "iteration_time_ms")
    return (
        f"per {processor}: {flops_rate(tflops)}, MFU {mfu:.1%}, "
        f"{records[-1]['memory_gb']:.2f} GB of memory at most"
    )


def flops_rate(tflops: float) -> str:
    """Format a FLOP rate with three digits, in TFLOP/s or, below 1 TFLOP/s, in GFLOP/s."""
    return f"{tflops:.3g} TFLOP/s" if tflops >= 1 else f"{1e3 * tflops:.3g} GFLOP/s"


def _mean(records: Sequence[dict[str, Any]], name: str, weight: str | None = None) -> float:
    """Return a field's mean over the records in which it is finite, weighted by ``weight``."""
    values = []
    weights = []
    for record in records:
        if math.isfinite(record[name]):
            values.append(record[name])
            weights.append(record[weight] if weight else 1.0)
    if not values:
        return math.nan
    weighted = (value * factor for value, factor in zip(values, weights, strict=True))
    return sum(weighted) / sum(weights)


def _with_prefix(value: float) -> str:
    """Format a number with four digits, or from 10,000 on with three digits and k, M or G."""
    for prefix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= max(size, 1e4):
            return f"{value / size:.3g}{prefix}"
    return f"{value:.4g}"


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return a process's peak FLOP/s: a GPU's data sheet value for bfloat16, or a measurement.

    The measurement times square matmuls for about 0.3 s after a warm-up. Call it on all ranks at
    once, so that ranks that share a CPU measure their shares of its peak.
    """
    if device.type == "cuda" and dtype is torch.bfloat16:
        card = card_of(torch.cuda.get_device_name(device))
        if card:
            return card.flops

    side = 4096 if device.type == "cuda" else 768
    a = torch.randn(side, side, device=device).to(dtype)
    b = torch.randn(side, side, device=device).to(dtype)

    def seconds_of(num_products: int) -> float:
        start = time.perf_counter()
        for _ in range(num_products):
            linear(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    seconds_of(3)
    num_products = max(1, int(0.1 / max(seconds_of(3) / 3, 1e-6)))
    # Best of three: a shared machine has slow moments, and the peak is the rate it can reach.
    return 2 * side**3 * num_products / min(seconds_of(num_products) for _ in range(3))
