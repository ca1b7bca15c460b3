"""The configuration sections that both entry scripts share."""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from math import lcm
from typing import Any, Self

import torch

from parallel.context.config import ContextConfig
from parallel.context.methods import METHODS
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
    """The size and number of iterations, and when the run validates or stops."""

    train_iters: int = 1000
    """Iterations (optimizer steps) of the whole run, including those before a resume."""
    micro_batch_size: int = 1
    """Number of sequences (or samples) that go through the model at once, per data-parallel
    rank."""
    global_batch_size: int | None = None
    """Number of sequences (or samples) per iteration over all processes. It must be a multiple of
    micro_batch_size x data-parallel size, which is the default; if it is larger, gradients
    accumulate over several micro-batches."""
    seed: int = 1234
    """Random seed of the initial weights and the order of the data; for a diffusion transformer
    also of its noise, timesteps, label dropout and sampled pictures."""
    bf16: bool = False
    """Compute in bfloat16; master weights, gradient sums and the optimizer stay in float32."""
    compile: bool = False
    """Compile each layer with torch.compile; the first step takes up to a minute longer. On a CPU
    this needs a C++ compiler."""
    eval_interval: int = 100
    """Number of iterations between validations; the run always validates at its end."""
    eval_iters: int = 10
    """Number of global batches per validation; 0 disables validation."""
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
        """Return the number of micro-batches per iteration on each of ``dp`` ranks."""
        return self.batch_size(dp) // (self.micro_batch_size * dp)

    def batch_size(self, dp: int) -> int:
        """Return the number of sequences (or samples) per iteration over ``dp`` ranks."""
        return self.global_batch_size or self.micro_batch_size * dp


@dataclass(frozen=True, kw_only=True)
class DryRunConfig:
    """A dry run checks a run and predicts its memory and time, in one process without its data."""

    dry_run: bool = False
    """Check and predict the run instead of training. Each pipeline stage runs forward and backward
    once at full size without allocating its memory; then memory, bytes sent, the predicted time
    and the command that starts the run are printed. --cluster names the machines that the time is
    predicted for."""
    world_size: int | None = None
    """Number of processes of the run that dry_run checks; by default the product of the mesh's
    sizes."""
    dry_run_html: str | None = None
    """File for a page with pictures of what dry_run predicts: memory of each rehearsed process, and
    a step of every rank over time."""

    def __post_init__(self) -> None:
        at_least(self, 1, "world_size")
        if self.dry_run_html is not None and not self.dry_run:
            raise ConfigError(
                f"dry_run_html is {self.dry_run_html}, but dry_run is not set, and the page shows "
                "its predictions; add --dry-run, or leave out --dry-run-html"
            )
        if self.dry_run_html is not None and os.path.isdir(self.dry_run_html):
            raise ConfigError(
                f"dry_run_html is {self.dry_run_html}, but that is a folder; give a file"
            )
        if self.world_size is not None and not self.dry_run:
            raise ConfigError(
                f"world_size is {self.world_size}, but dry_run is not set, and a run has as many "
                "processes as its launcher starts; add --dry-run, or leave out --world-size"
            )


@dataclass(frozen=True, kw_only=True)
class CommonConfig(ABC):
    """The sections that both entry scripts share; each entry adds its model, data and training.

    The trainer, the planner and context parallelism use only the properties below, so that none of
    them has to test which entry script runs.
    """

    model: Any
    """Settings of the model, a ``DecoderConfig`` or ``DiTConfig``."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    data_parallel: DataParallelConfig = field(default_factory=DataParallelConfig)
    context: ContextConfig = field(default_factory=ContextConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    data: Any
    """Settings of the data, a ``DataConfig`` or ``LatentDataConfig``."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: LoopConfig = field(default_factory=LoopConfig)
    float8: Float8Config = field(default_factory=Float8Config)
    health: HealthConfig = field(default_factory=HealthConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    profiling: ProfileConfig = field(default_factory=ProfileConfig)
    dry: DryRunConfig = field(default_factory=DryRunConfig)

    SAMPLE_ORDER = tuple[str, ...]()
    """Fields that determine the order of the samples. Checkpoints record them, because the number
    of consumed samples is a position only in the same order."""
    OBJECTIVE = tuple[str, ...]()
    """Fields that define the training objective; a resumed run must have the same values."""
    NOTED = tuple[str, ...]()
    """Other fields of the entry that affect training; a resumed run that changes one prints a
    note."""
    DECIDED = tuple[str, ...]()
    """Fields of the entry that every start of a run decides again if the user did not set them."""

    @property
    def causal(self) -> bool:
        """True if attention is causal."""
        return True

    @property
    @abstractmethod
    def sequence_length(self) -> int:
        """Number of tokens of a sample, before context parallelism shards them."""

    @property
    def packed(self) -> bool:
        """True if a token attends only within its own document.

        The samples of a micro-batch are then packed into one sequence.
        """
        return False

    @property
    def windows(self) -> tuple[tuple[int, int] | None, ...]:
        """The distinct sliding windows of the softmax attention layers; None is full attention."""
        return (None,)

    @property
    def joined_length(self) -> int:
        """Number of tokens of a sharded sequence: one sample, or a micro-batch packed into one."""
        return self.sequence_length * (self.train.micro_batch_size if self.packed else 1)

    @property
    def slice_len(self) -> int:
        """Number of a rank's tokens of each sequence that go through a layer at once; 0 for all."""
        return self.recompute.layer_chunk_size // self.sharded_sequences

    @property
    def sharded_sequences(self) -> int:
        """Number of sequences of a micro-batch that context-parallel ranks share one by one."""
        return 1 if self.packed else self.train.micro_batch_size

    @property
    def layout_of_slices(self) -> str:
        """Layout in which context-parallel ranks share each slice; ``auto`` is the method's.

        A delta rule takes consecutive tokens.
        """
        layout = self.context.context_parallel_layout
        if layout == "auto" and self.delta and self.mesh.context_parallel_size > 1:
            return "contiguous"
        return layout

    @property
    def slice_unit(self) -> int:
        """Number of which ``layer_chunk_size`` must be a multiple.

        The sequences of a micro-batch and the tensor-parallel ranks share a slice evenly. In the
        zigzag layout so do the two chunks of a head group.
        """
        shares = self.mesh.tensor_model_parallel_size
        is_zigzag = "zigzag" in self.layouts_of_slices and self.layout_of_slices != "contiguous"
        if is_zigzag and self.context.ulysses_degree % 2:
            shares = lcm(shares, 2)
        return self.sharded_sequences * shares

    @property
    def layouts_of_slices(self) -> tuple[str, ...]:
        """Layouts that ``context_parallel_layout`` may name if layers take slices.

        Zigzag needs several groups of ranks, between which queries travel.
        """
        layouts = ("auto", "contiguous")
        method = METHODS.get(self.context.context_parallel_method)
        has_groups = self.mesh.context_parallel_size > self.context.ulysses_degree
        if method is None or not method.in_slices or self.delta or not has_groups:
            return layouts
        default = METHODS[method.in_slices].layout(causal=True)
        return layouts if default in layouts else (*layouts, default)

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
        """True if softmax and linear attention layers may shard tokens by different layouts."""
        return False

    @property
    def ema_decay(self) -> float | None:
        """The decay of the EMA of the weights; None if the run has no EMA."""
        return None

    @property
    def sample_ends(self) -> tuple[int, ...] | None:
        """The cu_seqlens of the samples in a packed micro-batch; None if the data define them."""
        return None

    def updated(self, **values: Any) -> Self:
        """Return a copy of the configuration with these fields replaced, whatever their section.

        Raises KeyError if no section has such a field.
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
        """True if the data are text tokens."""
        return False

    def with_file_names(self) -> Self:
        """Return a copy with placeholders for the required file names that are not set."""
        return self.updated(save=self.checkpoint.save or "RUN")

    def files(self) -> list[tuple[str, str]]:
        """Return (field, path) for each data file, where the field is the one that names it."""
        return [("data_path", path) for path in self.data.data_path]

    def contents(self) -> dict[str, str]:
        """Return a fast digest of each training file, keyed by name.

        Raises OSError if a file is missing.
        """
        return {}

    def recorded(self) -> dict[str, Any]:
        """Return the JSON records next to the training files, which every checkpoint copies."""
        return {}

    def named(self, fields: Sequence[str]) -> dict[str, Any]:
        """Return the values of these fields as JSON types, keyed by field name."""
        values = {}
        for name in fields:
            value = value_of(self, name)
            values[name] = list(value) if isinstance(value, tuple) else value
        return values
