"""Progress of a run: its records, its lines on the screen, and the peak that its rate is measured
against.
"""

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
"""Maximum width of a training line."""


class Report(Callback):
    """Writes each step's record to the log; prints a line after the first, every log_interval, and
    at the end.

    The first line is for a person who waits: it shows that the run is alive and how long it will
    take.
    """

    def __init__(
        self,
        log: RunLog | None,
        objective: Objective,
        train_iters: int,
        log_interval: int,
        device_type: str,
    ) -> None:
        """``log`` is there on the first rank."""
        self._log, self._objective = log, objective
        self._train_iters, self._log_interval = train_iters, log_interval
        self._processor = "GPU" if device_type == "cuda" else "process"
        self._unprinted: list[dict[str, Any]] = []
        self._started: tuple[int, float] | None = None
        self._machine_told = False

    def on_step_end(self, step: Step) -> None:
        """Write a step's record, and print its lines where they are due."""
        if self._log is None:
            return
        self._log.write(step.record)
        for line in self.lines(step.record, time.monotonic(), step.last):
            say(line)
        if "validation_loss" in step.record:
            say(self._objective.validation_line(step.record))
            self._log.sync()

    def lines(self, record: dict[str, Any], now: float, last: bool = False) -> list[str]:
        """Return the lines to print after an iteration, if any. ``now`` is a clock's time in
        seconds.
        """
        first = self._started is None
        iteration, started = self._started = self._started or (record["iteration"], now)
        self._unprinted.append(record)
        if not (first or last or record["iteration"] % self._log_interval == 0):
            return []
        # From all iterations after this start's first one, including validations and checkpoints.
        done = record["iteration"] - iteration
        each = (now - started) / done if done else record["iteration_time_ms"] / 1e3
        left = each * (self._train_iters - record["iteration"])
        lines = [progress_line(type(self._objective), self._unprinted, self._train_iters, left)]
        if last or (not first and not self._machine_told):
            lines.append(machine_line(self._unprinted, self._processor))
            self._machine_told = True
        self._unprinted = []
        return lines


def few_samples(at: int, train: LoopConfig, there: int | None, wanted: int) -> str:
    """Say where there is less to do than asked for: training from iteration ``at``, or validation
    samples.
    """
    if at >= train.train_iters:
        return (
            f"iteration {at} of {train.train_iters}: nothing left to train; --train-iters N goes on"
        )
    if there is not None and there < wanted:
        asked = f"note: eval_iters {train.eval_iters} asks for {wanted} validation samples"
        return f"{asked}; there are {there}, and all are used"
    return ""


def progress_line(
    objective: type[Objective],
    records: Sequence[dict[str, Any]],
    train_iters: int,
    seconds_left: float,
) -> str:
    """Return one line on the iterations since the last line: means of losses and rates, the latest
    of the rest.

    To fit ``COLUMNS`` it drops the learning rate, then the rate; metrics.jsonl has all.
    """
    last, unit = records[-1], objective.unit
    value = _mean(records, objective.loss_name)
    skipped = sum(not math.isfinite(record["grad_norm"]) for record in records)
    fields = {
        "iteration": f"iteration {last['iteration']}/{train_iters}",
        "loss": f"loss {value:.4f}" if value < 100 else f"loss {value:.4g}",
        "norm": f"grad norm {last['grad_norm']:.3g}",
        "lr": f"lr {last['learning_rate']:.2e}",
        "time": f"{_mean(records, 'iteration_time_ms'):.0f} ms",
        "rate": f"{_short(_mean(records, f'{unit}_per_second', 'iteration_time_ms'))} {unit}/s",
        "skipped": f"{skipped} skipped" if skipped else "",
        "left": f"{clock_time(seconds_left)} left" if last["iteration"] < train_iters else "",
    }
    for name in ("", "lr", "rate"):
        fields.pop(name, None)
        line = " | ".join(filter(None, fields.values()))
        if len(line) <= COLUMNS:
            break
    return line


def machine_line(records: Sequence[dict[str, Any]], processor: str) -> str:
    """Return one line on the rate, MFU and memory of the iterations since the last line."""
    tflops, mfu = (_mean(records, name, "iteration_time_ms") for name in ("tflops_per_gpu", "mfu"))
    return f"per {processor}: {flops_rate(tflops)}, MFU {mfu:.1%}, {records[-1]['memory_gb']:.2f} GB of memory at most"


def flops_rate(tflops: float) -> str:
    """Format a rate with three digits in TFLOP/s or, where it is less than one, in GFLOP/s."""
    return f"{tflops:.3g} TFLOP/s" if tflops >= 1 else f"{1e3 * tflops:.3g} GFLOP/s"


def _mean(records: Sequence[dict[str, Any]], name: str, weight: str | None = None) -> float:
    """Average over the iterations: rates weighted by time, losses without skipped iterations."""
    pairs = [
        (record[name], record[weight] if weight else 1.0)
        for record in records
        if math.isfinite(record[name])
    ]
    return (
        sum(value * share for value, share in pairs) / sum(share for _, share in pairs)
        if pairs
        else math.nan
    )


def _short(value: float) -> str:
    """Format with four digits; above 9,999 with three and k, M or G."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= max(size, 1e4):
            return f"{value / size:.3g}{unit}"
    return f"{value:.4g}"


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s that one process can reach: a GPU's bfloat16 data sheet figure, else
    measured now.

    Square matrix products are measured for about 0.3 s after a warm-up. Call it on all ranks at
    once: on a shared CPU each then measures its share.
    """
    if (
        device.type == "cuda"
        and dtype is torch.bfloat16
        and (card := card_of(torch.cuda.get_device_name(device)))
    ):
        return card.flops
    side = 4096 if device.type == "cuda" else 768
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))

    def products(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            linear(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    products(3)
    count = max(1, int(0.1 / max(products(3) / 3, 1e-6)))
    # best of three: a shared machine has slow moments, and the peak is what it can do
    return 2 * side**3 * count / min(products(count) for _ in range(3))
