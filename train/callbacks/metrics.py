"""Metrics of a run: metrics.jsonl, the loss curve, Weights & Biases and TensorBoard."""

import json
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from runtime.errors import at_least
from runtime.files import read_regular, reason, replacing, write_text
from train.callbacks.stragglers import PHASES
from train.checkpoint.manifest import STARTS, is_count
from train.config.flags import ConfigError

METRICS = "metrics.jsonl"
LOSSES = {"lm_loss": "nats per token", "diffusion_loss": "per element"}
"""Unit of the training loss, keyed by its name in records (an objective's ``loss_name``)."""


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Lines on the screen, and services that receive a run's metrics besides metrics.jsonl."""

    log_interval: int = 10
    """Number of iterations between lines on the screen. A line shows the mean loss since the
    previous line; the first iteration always has a line."""
    tensorboard_dir: str | None = None
    """Folder to write TensorBoard events to."""
    wandb_project: str | None = None
    """Weights & Biases project. The key is read only from WANDB_API_KEY; with WANDB_MODE=offline
    no account is needed.
    """
    wandb_exp_name: str | None = None
    """Name of the run in that project."""

    def __post_init__(self) -> None:
        at_least(self, 1, "log_interval")


@dataclass(frozen=True)
class Service:
    """A logging service that receives the numbers of records."""

    write: Callable[[dict[str, Any]], None]
    """Receives a record, or later metrics for it, together with the record's ``iteration``."""
    rewind: Callable[[int], None]
    """Receives the last iteration that remains valid after a rollback."""


class RunLog:
    """Writes one object per iteration to ``metrics.jsonl``, and its numbers to the services.

    Only the first rank has a RunLog. With ``folder`` None nothing is written to disk.
    """

    def __init__(
        self,
        folder: Path | None,
        config: LoggingConfig,
        settings: dict[str, Any],
        iteration: int,
        device: str = "cpu",
    ) -> None:
        """Open the log to continue after ``iteration``, and drop later records of metrics.jsonl.

        Args:
            settings: the resolved configuration, for the services to show.
            device: the name of the GPU, or cpu.
        """
        self._folder = folder
        self.records: list[dict[str, Any]] = []
        """Records of all iterations, including those before a resume."""
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        # Services first: if one cannot be used, metrics.jsonl is not changed.
        self._services = [*_tensorboard(config, iteration), *_wandb(config, folder, settings)]
        if folder is None:
            return
        with disk_errors(folder):
            if (folder / METRICS).exists():
                self.records = read_metrics(folder / METRICS)
            self._truncate(iteration)
            start = {"time": time.time(), "iteration": iteration, "device": device}
            with (folder / STARTS).open("a") as starts:
                starts.write(json.dumps(start) + "\n")

    def rewind(self, iteration: int) -> None:
        """Drop the records after ``iteration``, to which the run has rolled back."""
        self._truncate(iteration)
        for service in self._services:
            service.rewind(iteration)

    def _truncate(self, iteration: int) -> None:
        self.records = [record for record in self.records if record["iteration"] <= iteration]
        self._rewrite()

    def write(self, record: dict[str, Any]) -> None:
        """Add an iteration's record; NaN and infinities, which JSON lacks, become null."""
        record = _finite(record)
        self.records.append(record)
        if self._folder is not None:
            with disk_errors(self._folder):
                self._append(json.dumps(record) + "\n")
        for service in self._services:
            service.write(record)

    def _append(self, line: str) -> None:
        """Append a line to the file: completely or not at all, even if the disk is full."""
        end = self._file.tell()
        remaining = line.encode()
        try:
            while remaining:
                remaining = remaining[self._file.write(remaining) :]
        except OSError:
            self._file.truncate(end)
            raise

    def amend(self, figures: dict[str, Any]) -> dict[str, Any]:
        """Add metrics to the last record, and return the record."""
        figures = _finite(figures)
        self.records[-1] |= figures
        self._rewrite()
        for service in self._services:
            service.write({"iteration": self.records[-1]["iteration"], **figures})
        return self.records[-1]

    def _rewrite(self) -> None:
        """Replace metrics.jsonl by the current records, and open it to append more."""
        if self._folder is None:
            return
        with disk_errors(self._folder):
            lines = [json.dumps(record) + "\n" for record in self.records]
            write_text(self._folder / METRICS, "".join(lines))
            self._file = (self._folder / METRICS).open("ab", buffering=0)

    def sync(self, draw: bool = True) -> None:
        """Flush everything to disk and redraw the curve."""
        if self._folder is None:
            return
        with disk_errors(self._folder):
            os.fsync(self._file.fileno())
            if draw:
                plot_loss(self.records, self._folder / "loss.png")


def lacks_validation(records: Sequence[dict[str, Any]], iteration: int) -> bool:
    """Return True if the last record is this iteration's and has no validation loss."""
    last = records[-1] if records else {}
    return last.get("iteration") == iteration and "validation_loss" not in last


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    """Replace numbers that are not finite by None."""
    values = {}
    for name, value in record.items():
        is_finite = isinstance(value, list) or math.isfinite(value)
        values[name] = value if is_finite else None
    return values


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn disk errors under ``--save`` into a one-line ConfigError with the free space."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"save is {folder}, but writing there failed ({reason(error, folder)}); "
            "free disk space, or give another --save"
        ) from error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the records of a metrics.jsonl; an incomplete last line is ignored.

    Raises ConfigError if a complete line is not a record of an iteration.
    """
    lines = read_regular(path, 1 << 34).split("\n")[:-1]
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            _check_record(record)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(
                f"{path}, line {number} is not the record of an iteration "
                f"({type(error).__name__}: {error}); remove the line or the file"
            ) from error
        records.append(record)
    return records


def _check_record(record: Any) -> None:
    """Raise TypeError or KeyError if an object is not a record of an iteration."""
    if not is_count(record["iteration"]):
        raise TypeError(f"iteration is {record['iteration']!r:.40}")
    if not any(name in record for name in LOSSES):
        raise KeyError(" or ".join(LOSSES))
    for name, value in record.items():
        is_list_by_rank = isinstance(value, list) and name in PHASES
        numbers = value if is_list_by_rank else [value]
        if not all(map(_is_number_or_null, numbers)):
            raise TypeError(f"{name} is {value!r:.40}")


def _is_number_or_null(value: Any) -> bool:
    if value is None or is_count(value):
        return True
    return type(value) is float and abs(value) < 1e40


def loss_name(record: dict[str, Any]) -> str:
    """Return the name of a record's training loss, one of ``LOSSES``."""
    return next(name for name in LOSSES if name in record)


def plot_loss(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot training and validation loss over the iterations; the PNG is replaced atomically."""
    if not records:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    name = loss_name(records[-1])
    iterations = [record["iteration"] for record in records]
    losses = [record[name] for record in records]
    axes.plot(iterations, losses, label="training", linewidth=1)

    validated = [record for record in records if "validation_loss" in record]
    if validated:
        iterations = [record["iteration"] for record in validated]
        losses = [record["validation_loss"] for record in validated]
        axes.plot(iterations, losses, "o-", markersize=4, label="validation")
        entropy = validated[-1].get("unigram_entropy")
        if entropy is not None:
            axes.axhline(
                entropy,
                color="grey",
                linestyle="--",
                linewidth=1,
                label="unigram entropy of the corpus",
            )

    axes.set(xlabel="iteration", ylabel=f"loss ({LOSSES[name]})", title=path.parent.name)
    axes.grid(alpha=0.3)
    axes.legend()
    with replacing(path) as (draft,):
        figure.savefig(draft, dpi=120)
    plt.close(figure)


def _numbers(record: dict[str, Any]) -> dict[str, float]:
    """Return the plain numbers of a record, without its iteration and its per-rank lists."""
    numbers = {}
    for name, value in record.items():
        if name != "iteration" and isinstance(value, int | float):
            numbers[name] = value
    return numbers


def check_services(config: LoggingConfig) -> None:
    """Import the packages of the requested services. Raises ConfigError if one is not installed."""
    modules = {"tensorboard_dir": "torch.utils.tensorboard", "wandb_project": "wandb"}
    for field, module in modules.items():
        if getattr(config, field) is None:
            continue
        try:
            import_module(module)
        except ImportError as error:
            package = module.rpartition(".")[2]
            raise ConfigError(
                f"{field} is set, but {package} cannot be imported ({error}); install it with "
                f"`pip install {package}` (or `make venv EXTRAS=logging`), or leave {field} out"
            ) from error


def _tensorboard(config: LoggingConfig, iteration: int) -> list[Service]:
    if config.tensorboard_dir is None:
        return []
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from torch.utils.tensorboard import SummaryWriter

    events = SummaryWriter(config.tensorboard_dir, purge_step=iteration + 1)

    def write(record: dict[str, Any]) -> None:
        for name, value in _numbers(record).items():
            events.add_scalar(name, value, record["iteration"])
        events.flush()

    def rewind(iteration: int) -> None:
        # Write the event that purge_step of a new writer would write, but into this file, because
        # TensorBoard orders files by whole seconds: two from the same second have no order.
        start = Event(step=iteration + 1, session_log=SessionLog(status=SessionLog.START))
        assert events.file_writer is not None
        events.file_writer.add_event(start, iteration + 1)

    return [Service(write, rewind)]


def _wandb(config: LoggingConfig, folder: Path | None, settings: dict[str, Any]) -> list[Service]:
    if config.wandb_project is None:
        return []
    import wandb

    # wandb records Slurm's variables with the run, but this one is a secret token.
    os.environ.pop("SLURM_JWT", None)
    run_id = None
    if folder is not None:
        id_file = folder / "wandb_id.txt"  # lets a resumed run continue under the same id
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:16])
        run_id = id_file.read_text()
    try:
        run = wandb.init(
            project=config.wandb_project,
            name=config.wandb_exp_name,
            config=settings,
            dir=folder,
            id=run_id,
            resume="allow",
        )
    except wandb.Error as error:
        raise ConfigError(
            f"wandb_project is {config.wandb_project}, but wandb cannot start ({error}); "
            "set WANDB_API_KEY, or WANDB_MODE=offline"
        ) from error
    # After a rollback or a resume from an earlier checkpoint the run repeats iterations, but wandb
    # ignores rows of a step that it already has, and it cannot remove rows. So wandb's steps count
    # rows, and the iteration is a metric that serves as the axis.
    run.define_metric("iteration")
    run.define_metric("*", step_metric="iteration")

    def write(record: dict[str, Any]) -> None:
        run.log({"iteration": record["iteration"], **_numbers(record)})

    return [Service(write, lambda iteration: None)]
