"""Metrics of a run: metrics.jsonl, the loss curve, wandb and TensorBoard."""

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
from train.callbacks.profile import PHASES
from train.checkpoint.manifest import STARTS, is_count
from train.config.flags import ConfigError

METRICS = "metrics.jsonl"
LOSSES = {"lm_loss": "nats per token", "diffusion_loss": "per element"}
"""Name of the training loss in records, an objective's ``loss_name``, and its unit."""


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """The places that the numbers of a run go to, besides metrics.jsonl."""

    log_interval: int = 10
    """Iterations between lines on the screen, whose losses are means since the line before; the
    first has its own.
    """
    tensorboard_dir: str | None = None
    """Folder of TensorBoard events."""
    wandb_project: str | None = None
    """Weights & Biases project; WANDB_MODE=offline needs no account, the key comes from
    WANDB_API_KEY alone.
    """
    wandb_exp_name: str | None = None
    """Name of the run in that project."""

    def __post_init__(self) -> None:
        at_least(self, 1, "log_interval")


@dataclass(frozen=True)
class Service:
    """A service that receives the numbers of records."""

    write: Callable[[dict[str, Any]], None]
    """Takes a record, or figures that are added to one, with its ``iteration``."""
    rewind: Callable[[int], None]
    """Takes the iteration from which the run goes on, after a rollback."""


class RunLog:
    """Write one object per iteration to ``metrics.jsonl``, and the same numbers to the other
    services.

    Only the first rank has one. With ``folder`` None nothing is kept on disk.
    """

    def __init__(
        self,
        folder: Path | None,
        config: LoggingConfig,
        settings: dict[str, Any],
        iteration: int,
        device: str = "cpu",
    ) -> None:
        """Start after ``iteration``; drop later records of metrics.jsonl, and a last line that a
        crash cut.

        ``settings`` is the resolved configuration, for the services to show; ``device`` the name of
        the GPU.
        """
        self._folder = folder
        self.records: list[dict[str, Any]] = []
        """Every iteration's, including those before a resume."""
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        # Services first: if one refuses, the records stay untouched.
        self._services = [*_tensorboard(config, iteration), *_wandb(config, folder, settings)]
        if folder is not None:
            with disk_errors(folder):
                self.records = read_metrics(folder / METRICS) if (folder / METRICS).exists() else []
                self._cut_back(iteration)
                with (folder / STARTS).open("a") as starts:
                    starts.write(
                        json.dumps({"time": time.time(), "iteration": iteration, "device": device})
                        + "\n"
                    )

    def rewind(self, iteration: int) -> None:
        """Drop the records after an iteration, from which the run goes on."""
        self._cut_back(iteration)
        for service in self._services:
            service.rewind(iteration)

    def _cut_back(self, iteration: int) -> None:
        self.records = [record for record in self.records if record["iteration"] <= iteration]
        self._write_again()

    def write(self, record: dict[str, Any]) -> None:
        """Add an iteration's record; numbers that are not finite become null, as JSON has none."""
        record = _finite(record)
        self.records.append(record)
        if self._folder is not None:
            with disk_errors(self._folder):
                end, left = self._file.tell(), (json.dumps(record) + "\n").encode()
                try:
                    while left:
                        left = left[self._file.write(left) :]
                except OSError:
                    self._file.truncate(end)  # on a full disk a line is written whole or not at all
                    raise
        for service in self._services:
            service.write(record)

    def amend(self, more: dict[str, Any]) -> dict[str, Any]:
        """Add figures to the last record, and return it."""
        more = _finite(more)
        self.records[-1] |= more
        self._write_again()
        for service in self._services:
            service.write({"iteration": self.records[-1]["iteration"], **more})
        return self.records[-1]

    def _write_again(self) -> None:
        if self._folder is not None:
            with disk_errors(self._folder):
                write_text(
                    self._folder / METRICS,
                    "".join(json.dumps(record) + "\n" for record in self.records),
                )
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
    """Return whether the last record is this iteration's and has no validation loss."""
    last = records[-1] if records else {}
    return last.get("iteration") == iteration and "validation_loss" not in last


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    return {n: v if isinstance(v, list) or math.isfinite(v) else None for n, v in record.items()}


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn errors of ``--save``'s disk into a ConfigError of one line; for a full disk it says how
    full.
    """
    try:
        yield
    except OSError as error:
        said = reason(error, folder)
        raise ConfigError(
            f"save is {folder}, which cannot be written to ({said}); make room there"
        ) from error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the records of a metrics.jsonl; an incomplete last line is ignored.

    Raises ConfigError: a line before the last is not a record of an iteration.
    """
    *lines, _ = read_regular(path, 1 << 34).split("\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if not is_count(record["iteration"]):
                raise TypeError(f"iteration is {record['iteration']!r:.40}")
            if not any(name in record for name in LOSSES):
                raise KeyError(" or ".join(LOSSES))
            for name, value in record.items():
                numbers = value if isinstance(value, list) and name in PHASES else [value]
                if not all(
                    n is None or is_count(n) or (type(n) is float and abs(n) < 1e40)
                    for n in numbers
                ):
                    raise TypeError(f"{name} is {value!r:.40}")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(
                f"{path}, line {number} is no record of an iteration ({type(error).__name__}: {error}); "
                f"remove the line or the file"
            ) from error
        records.append(record)
    return records


def loss_name(record: dict[str, Any]) -> str:
    """Return the one of ``LOSSES`` that a record has."""
    return next(name for name in LOSSES if name in record)


def plot_loss(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw training and validation loss over the iterations as a PNG, replaced atomically."""
    if not records:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    name = loss_name(records[-1])
    axes.plot(
        [r["iteration"] for r in records], [r[name] for r in records], label="training", linewidth=1
    )
    validated = [r for r in records if "validation_loss" in r]
    if validated:
        points = [r["iteration"] for r in validated], [r["validation_loss"] for r in validated]
        axes.plot(*points, "o-", markersize=4, label="validation")
    if validated and (entropy := validated[-1].get("unigram_entropy")) is not None:
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
    return {
        name: value
        for name, value in record.items()
        if name != "iteration" and isinstance(value, int | float)
    }


def check_services(config: LoggingConfig) -> None:
    """Import the packages of the requested services. Raises ConfigError if one is not installed."""
    wanted = {"tensorboard_dir": "torch.utils.tensorboard", "wandb_project": "wandb"}
    for field, module in wanted.items():
        if getattr(config, field) is None:
            continue
        try:
            import_module(module)
        except ImportError as error:
            package = module.rpartition(".")[2]
            raise ConfigError(
                f"{field} is set and {package} cannot be imported ({error}): pip install {package} "
                f"(make venv EXTRAS=logging), or leave {field} out"
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
        # As a start with purge_step does, but in the same file: two files of one second have no
        # sure order.
        start = Event(step=iteration + 1, session_log=SessionLog(status=SessionLog.START))
        assert events.file_writer is not None
        events.file_writer.add_event(start, iteration + 1)

    return [Service(write, rewind)]


def _wandb(config: LoggingConfig, folder: Path | None, settings: dict[str, Any]) -> list[Service]:
    if config.wandb_project is None:
        return []
    import wandb

    os.environ.pop(
        "SLURM_JWT", None
    )  # wandb keeps Slurm's variables with the run, and this one is a token
    name = (
        None if folder is None else folder / "wandb_id.txt"
    )  # has the id under which it continues a resumed run
    if name is not None and not name.exists():
        name.write_text(uuid.uuid4().hex[:16])
    kept: dict[str, Any] = {"dir": folder, "id": name and name.read_text(), "resume": "allow"}
    try:
        run = wandb.init(
            project=config.wandb_project, name=config.wandb_exp_name, config=settings, **kept
        )
    except wandb.Error as error:
        raise ConfigError(
            f"wandb_project is {config.wandb_project} and wandb cannot begin ({error}); set WANDB_API_KEY, or "
            f"WANDB_MODE=offline"
        ) from error
    # wandb drops what is logged at one of its own steps that it has already, as after a rollback or
    # a resume from an earlier checkpoint. So its steps count rows, and iterations are an axis; it
    # cannot take rows back.
    run.define_metric("iteration")
    run.define_metric("*", step_metric="iteration")

    def write(record: dict[str, Any]) -> None:
        run.log({"iteration": record["iteration"], **_numbers(record)})

    return [Service(write, lambda iteration: None)]
