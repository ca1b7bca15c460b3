"""The sections that every entry's configuration has."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch

from parallel.context.config import ContextConfig
from parallel.data import DataParallelConfig
from parallel.mesh import MeshConfig
from parallel.pipeline.stages import PipelineConfig
from parallel.recompute import RecomputeConfig
from runtime.errors import at_least, require
from train.callbacks.health import HealthConfig
from train.callbacks.metrics import LoggingConfig
from train.callbacks.profile import ProfileConfig
from train.checkpoint.api import CheckpointConfig
from train.config.fields import ConfigError, value_of
from train.float8 import Float8Config
from train.optimizers.config import OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """One iteration, their number, and when the run validates or stops."""

    train_iters: int = 1000
    """Iterations (optimizer steps) of the whole run, including those before a resume."""
    micro_batch_size: int = 1
    """Sequences (or samples) that go through the model at once, per data-parallel rank."""
    global_batch_size: int | None = None
    """Sequences (or samples) per iteration over all processes, a multiple of micro_batch_size x
    data-parallel size; that product by default. If it is larger, gradients accumulate over several
    micro-batches."""
    seed: int = 1234
    """Seed of the initial weights and the order of the data; for a diffusion transformer also of
    its noise, times, label dropout and pictures."""
    bf16: bool = False
    """Compute in bfloat16; master weights, gradient sums and the optimizer stay in float32."""
    compile: bool = False
    """Compile each layer with torch.compile; the first step takes up to a minute longer. On a CPU
    this needs a C++ compiler."""
    eval_interval: int = 100
    """Iterations between validations; the run always validates at its end."""
    eval_iters: int = 10
    """Global batches per validation; 0 disables validation."""
    exit_interval: int | None = None
    """Save and exit at the next iteration that is a multiple of this number; the learning rate's
    schedule still spans train_iters."""
    exit_duration_in_mins: float | None = None
    """Save and exit after the first step that ends more than this many minutes after the process
    began."""

    def __post_init__(self) -> None:
        at_least(
            self,
            1,
            "train_iters",
            "micro_batch_size",
            "global_batch_size",
            "eval_interval",
            "exit_interval",
        )
        at_least(self, 0, "eval_iters", "seed")
        minutes = self.exit_duration_in_mins
        require(self, minutes is None or minutes > 0, "exit_duration_in_mins", "it must be above 0")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that layers compute in."""
        return torch.bfloat16 if self.bf16 else torch.float32

    def micro_batches(self, dp: int) -> int:
        """Return the micro-batches per iteration on each of ``dp`` data-parallel ranks."""
        return self.batch_size(dp) // (self.micro_batch_size * dp)

    def batch_size(self, dp: int) -> int:
        """Return the sequences (or samples) per iteration over ``dp`` data-parallel ranks."""
        return self.global_batch_size or self.micro_batch_size * dp


@dataclass(frozen=True, kw_only=True)
class DryRunConfig:
    """A dry run: checks and predicts a run in one process, without its data or its memory."""

    dry_run: bool = False
    """Take no step: run each pipeline stage forward and backward once at full size without
    allocating its memory, and print memory, bytes sent, the predicted time and the command that
    starts the run; --cluster names the machines that the time is predicted for."""
    world_size: int | None = None
    """Processes of the run to check with dry_run; by default the product of the mesh's sizes."""

    def __post_init__(self) -> None:
        at_least(self, 1, "world_size")
        if self.world_size is not None and not self.dry_run:
            raise ConfigError(
                f"world_size is {self.world_size} without dry_run; a run has as many processes as "
                "its launcher starts: add --dry-run, or leave it out"
            )


@dataclass(frozen=True, kw_only=True)
class CommonConfig(ABC):
    """The sections of every entry's configuration; an entry defines its model, data and training.

    The properties below are all that the trainer, the planner and context parallelism ask of an
    entry, so that none of them tests which entry it runs.
    """

    model: Any
    """A ``DecoderConfig`` or ``DiTConfig``."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    data_parallel: DataParallelConfig = field(default_factory=DataParallelConfig)
    context: ContextConfig = field(default_factory=ContextConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    data: Any
    """A ``DataConfig`` or ``LatentDataConfig``."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: LoopConfig = field(default_factory=LoopConfig)
    float8: Float8Config = field(default_factory=Float8Config)
    health: HealthConfig = field(default_factory=HealthConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    profiling: ProfileConfig = field(default_factory=ProfileConfig)
    dry: DryRunConfig = field(default_factory=DryRunConfig)

    SAMPLE_ORDER = tuple[str, ...]()
    """Fields that decide which sample is the n-th. Checkpoints record them: the number of consumed
    samples has a meaning only under the same order."""
    OBJECTIVE = tuple[str, ...]()
    """Fields that define the training objective; a resumed run must have the same."""
    NOTED = tuple[str, ...]()
    """Other fields of the entry that change training; a resumed run that changes them prints a
    note."""
    DECIDED = tuple[str, ...]()
    """Fields of the entry that every start decides again, if the user left them open."""

    @property
    def causal(self) -> bool:
        """True if attention is causal."""
        return True

    @property
    @abstractmethod
    def sequence_length(self) -> int:
        """The tokens of a sample, before context parallelism shards them."""

    @property
    def packed(self) -> bool:
        """True if a token attends within its document alone.

        The samples of a micro-batch are then joined into one sequence.
        """
        return False

    @property
    def windows(self) -> tuple[tuple[int, int] | None, ...]:
        """The distinct windows of the softmax attention layers; None is full attention."""
        return (None,)

    @property
    def joined_length(self) -> int:
        """The tokens of one sharded sequence: a sample, or the joined samples of a micro-batch."""
        return self.sequence_length * (self.train.micro_batch_size if self.packed else 1)

    @property
    def rotates(self) -> bool:
        """True if the model has rotary positions, which can be scaled."""
        return False

    @property
    def delta(self) -> bool:
        """True if the model has delta-rule layers, which pass a state along consecutive tokens."""
        return False

    @property
    def hybrid_layouts(self) -> bool:
        """True if softmax layers have another layout than the model's linear attention layers."""
        return False

    @property
    def ema_decay(self) -> float | None:
        """The decay of the EMA of the weights; None if the run has no EMA."""
        return None

    @property
    def sample_ends(self) -> tuple[int, ...] | None:
        """The cu_seqlens of a micro-batch's joined samples; None if the data define them."""
        return None

    def updated(self, **values: Any) -> Self:
        """Return the configuration with other values of these fields, of any section.

        Raises KeyError: no section has such a field.
        """
        section_of = {}
        for section in fields(self):
            for name in getattr(self, section.name).__dataclass_fields__:
                section_of[name] = section.name

        changes: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            changes.setdefault(section_of[name], {})[name] = value

        sections = {}
        for section_name, section_values in changes.items():
            sections[section_name] = replace(getattr(self, section_name), **section_values)
        return replace(self, **sections)

    @property
    def reads_text(self) -> bool:
        """True if the data are tokens of a text."""
        return False

    def with_file_names(self) -> Self:
        """Return the configuration with placeholders for required files that it does not name."""
        return self.updated(save=self.checkpoint.save or "RUN")

    def files(self) -> list[tuple[str, str]]:
        """Return pairs of the field that names a data file, and its path."""
        return [("data_path", path) for path in self.data.data_path]

    def contents(self) -> dict[str, str]:
        """Return a fast digest of each training file by name. Raises OSError if one is missing."""
        return {}

    def recorded(self) -> dict[str, Any]:
        """Return the JSON records of the training files that a checkpoint repeats."""
        return {}

    def named(self, fields: Sequence[str]) -> dict[str, Any]:
        """Return the values of fields by their names, as JSON types."""
        values = {}
        for name in fields:
            value = value_of(self, name)
            values[name] = list(value) if isinstance(value, tuple) else value
        return values
