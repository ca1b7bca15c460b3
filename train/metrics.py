"""What a run keeps of its numbers: metrics.jsonl, the loss curve, wandb and TensorBoard."""

import json
import math
import os
import resource
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from runtime.errors import UserError
from runtime.files import reason, replacing, write_text
from train.config.flags import ConfigError

METRICS = "metrics.jsonl"
LOSSES = {"lm_loss": "nats per token", "diffusion_loss": "per element"}
"""The names under which records have the training loss, each an objective's ``loss_name``, and its unit."""


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Where the numbers of a run go, besides metrics.jsonl."""

    log_interval: int = 10
    """Iterations between lines on the screen, whose losses are means since the line before; the first has its own."""
    tensorboard_dir: str | None = None
    """Folder of TensorBoard events."""
    wandb_project: str | None = None
    """Weights & Biases project; WANDB_MODE=offline needs no account, the key comes from WANDB_API_KEY alone."""
    wandb_exp_name: str | None = None
    """Name of the run in that project."""

    def __post_init__(self) -> None:
        if self.log_interval < 1:
            raise UserError(f"log_interval is {self.log_interval}; it must be 1 or more")


Writer = Callable[[dict[str, Any]], None]


class RunLog:
    """Writes one object per iteration to ``metrics.jsonl``, the truth of a run, and the same numbers elsewhere.

    For the first rank alone. ``folder`` None keeps nothing on disk.
    """

    def __init__(self, folder: Path | None, config: LoggingConfig, settings: dict[str, Any], iteration: int) -> None:
        """Start after ``iteration``; what metrics.jsonl holds of later ones (a run that was cut off) is cut away.

        ``settings`` is the resolved configuration, for the services that show it.
        """
        self._folder = folder
        self._records: list[dict[str, Any]] = []
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        # The services first: where one refuses, the records stay as they are.
        self._writers = [*_tensorboard(config, iteration), *_wandb(config, folder, settings)]
        if folder is not None:
            with disk_errors(folder):
                self._records = cut_back(folder / METRICS, iteration)
                self._file = (folder / METRICS).open("ab", buffering=0)

    @property
    def records(self) -> list[dict[str, Any]]:
        """Every iteration's record, those before a resume included."""
        return self._records

    def write(self, record: dict[str, Any]) -> None:
        """Add an iteration's record; a number that is not finite, which JSON does not know, becomes null."""
        record = {name: value if math.isfinite(value) else None for name, value in record.items()}
        self._records.append(record)
        if self._folder is not None:
            with disk_errors(self._folder):
                _append(self._file, (json.dumps(record) + "\n").encode())
        for writer in self._writers:
            writer(record)

    def sync(self) -> None:
        """Bring everything to disk, and the curve up to date."""
        if self._folder is None:
            return
        with disk_errors(self._folder):
            os.fsync(self._file.fileno())
            plot_loss(self._records, self._folder / "loss.png")


def _append(file: FileIO, line: bytes) -> None:
    """Write a line whole or, where the disk is full, not at all."""
    end, left = file.tell(), line
    try:
        while left:
            left = left[file.write(left) :]
    except OSError:
        file.truncate(end)
        raise


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Say in one line that ``--save`` cannot be written, and of a full disk how full. Raises ConfigError."""
    try:
        yield
    except OSError as error:
        said = reason(error, folder)
        raise ConfigError(f"save is {folder}, which cannot be written to ({said}); make room there") from error


def cut_back(path: Path, iteration: int) -> list[dict[str, Any]]:
    """Drop the records after ``iteration`` from a metrics.jsonl, and a last line that a crash left half-written.

    Returns:
        The records that stay.
    """
    kept = [record for record in read_metrics(path) if record["iteration"] <= iteration] if path.exists() else []
    write_text(path, "".join(json.dumps(record) + "\n" for record in kept))
    return kept


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; a last line without its end is no record.

    Raises:
        ConfigError: a line before the last is no record of an iteration.
    """
    *lines, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            _check_record(record)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(
                f"{path}, line {number} is no record of an iteration ({type(error).__name__}: {error}); "
                f"remove the line or the file"
            ) from error
        records.append(record)
    return records


def _check_record(record: dict[str, Any]) -> None:
    """Raises KeyError or TypeError for what no iteration has left."""
    if type(record["iteration"]) is not int:
        raise TypeError(f"iteration is {record['iteration']!r}")
    if not any(name in record for name in LOSSES):
        raise KeyError(" or ".join(LOSSES))
    for name, value in record.items():
        if type(value) not in (int, float, type(None)):
            raise TypeError(f"{name} is {value!r:.40}")


def loss_name(record: dict[str, Any]) -> str:
    """The one of ``LOSSES`` that a record has."""
    return next(name for name in LOSSES if name in record)


def memory_gb(device: torch.device) -> float:
    """Most memory that this process has held so far, in GB (10^9 bytes): the GPU's, or the process's on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def plot_loss(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw training and validation loss over the iterations as a PNG, replaced in one step."""
    if not records:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    name = loss_name(records[-1])
    axes.plot([r["iteration"] for r in records], [r[name] for r in records], label="training", linewidth=1)
    validated = [r for r in records if "validation_loss" in r]
    if validated:
        points = [r["iteration"] for r in validated], [r["validation_loss"] for r in validated]
        axes.plot(*points, "o-", markersize=4, label="validation")
    if validated and "unigram_entropy" in validated[-1]:
        axes.axhline(
            validated[-1]["unigram_entropy"],
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
    return {name: value for name, value in record.items() if name != "iteration" and value is not None}


def check_services(config: LoggingConfig) -> None:
    """Import what is asked for besides metrics.jsonl. Raises ConfigError where that is not installed."""
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


def _tensorboard(config: LoggingConfig, iteration: int) -> list[Writer]:
    if config.tensorboard_dir is None:
        return []
    from torch.utils.tensorboard import SummaryWriter

    events = SummaryWriter(config.tensorboard_dir, purge_step=iteration + 1)

    def write(record: dict[str, Any]) -> None:
        for name, value in _numbers(record).items():
            events.add_scalar(name, value, record["iteration"])
        events.flush()

    return [write]


def _wandb_id(folder: Path | None) -> str | None:
    """The identity under which a run that is resumed goes on in wandb, kept in its folder."""
    if folder is None:
        return None
    kept = folder / "wandb_id.txt"
    if not kept.exists():
        kept.write_text(uuid.uuid4().hex[:16])
    return kept.read_text()


def _wandb(config: LoggingConfig, folder: Path | None, settings: dict[str, Any]) -> list[Writer]:
    if config.wandb_project is None:
        return []
    import wandb

    try:
        run = wandb.init(
            project=config.wandb_project,
            name=config.wandb_exp_name,
            dir=folder,
            config=settings,
            id=_wandb_id(folder),
            resume="allow",
        )
    except wandb.Error as error:
        raise ConfigError(
            f"wandb_project is {config.wandb_project} and wandb cannot begin ({error}); set WANDB_API_KEY, or "
            f"WANDB_MODE=offline"
        ) from error
    return [lambda record: run.log(_numbers(record), step=record["iteration"])]
