"""Sections of every entry's configuration, and checks across them."""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from shutil import which
from typing import Any, Self

import torch

from data.text.config import split_shares
from kernels.backends import BACKENDS, LINEAR, SOFTMAX, listed
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
from train.config.flags import ConfigError, value_of
from train.float8 import Float8Config
from train.optimizers.config import OptimizerConfig
from train.schedule import schedule_of

NEEDS = (
    *((name, "save") for name in ("save_interval", "async_save", "keep_last", "keep_every")),
    ("non_persistent_save_interval", "save"),
    ("non_persistent_save_interval", "non_persistent_local_ckpt_dir"),
    ("non_persistent_local_ckpt_dir", "non_persistent_save_interval"),
    ("wandb_exp_name", "wandb_project"),
)
"""Fields with another that each needs to be set too."""


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """The iteration, the number of iterations, and when the run looks at the validation data or
    stops.
    """

    train_iters: int = 1000
    """Iterations (optimizer steps) of the whole run, those before a resume counted in."""
    micro_batch_size: int = 1
    """Sequences, or samples, that go through the model at once, per data-parallel rank."""
    global_batch_size: int | None = None
    """Sequences, or samples, per iteration over all processes; by default micro_batch_size x
    data-parallel size; more accumulate."""
    seed: int = 1234
    """Seed of the initial weights and of the order of the data; of a diffusion transformer's noise,
    times, label dropout and pictures too."""
    bf16: bool = False
    """Compute in bfloat16; master weights, gradients' sums and the optimizer stay in float32."""
    compile: bool = False
    """Compile each layer with torch.compile; the first step takes up to a minute longer. A CPU
    needs a C++ compiler.
    """
    eval_interval: int = 100
    """Iterations between validations; one is made at the end in any case."""
    eval_iters: int = 10
    """Global batches per validation; 0 makes none."""
    exit_interval: int | None = None
    """Exit after the iteration that this number divides, saving first; the schedule still spans
    train_iters.
    """
    exit_duration_in_mins: float | None = None
    """Exit once this many minutes have passed since the process began and a step is made, saving
    first.
    """

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
        """Dtype that layers compute in."""
        return torch.bfloat16 if self.bf16 else torch.float32

    def micro_batches(self, dp: int) -> int:
        """Return the micro-batches per iteration on each of ``dp`` data-parallel ranks."""
        return self.batch_size(dp) // (self.micro_batch_size * dp)

    def batch_size(self, dp: int) -> int:
        """Return the sequences, or samples, per iteration on ``dp`` data-parallel ranks."""
        return self.global_batch_size or self.micro_batch_size * dp


@dataclass(frozen=True, kw_only=True)
class DryRunConfig:
    """A run that is only checked and predicted, in one process that needs neither its data nor its
    memory.
    """

    dry_run: bool = False
    """Take no step: run each pipeline stage forward and backward once in full size without memory,
    and print memory, bytes sent, the predicted time and the command that starts the run; --cluster
    names what it is predicted for."""
    world_size: int | None = None
    """Processes of the run to check with dry_run; by default the product of the mesh's sizes."""

    def __post_init__(self) -> None:
        at_least(self, 1, "world_size")
        if self.world_size is not None and not self.dry_run:
            raise ConfigError(
                f"world_size is {self.world_size} without dry_run; a run has as many processes as its launcher starts: "
                "add --dry-run, or leave it out"
            )


@dataclass(frozen=True, kw_only=True)
class CommonConfig(ABC):
    """The sections of every entry's configuration; an entry defines its model, data and training."""

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
    """Fields that decide which sample is the n-th; kept in checkpoints, to give consumed samples a
    meaning.
    """
    OBJECTIVE = tuple[str, ...]()
    """Fields of what the weights learn to predict; a resumed run must have the same."""
    NOTED = tuple[str, ...]()
    """Other fields of the entry that change training; a resumed run may change them, with a note.
    """
    DECIDED = tuple[str, ...]()
    """Fields of the entry that each start decides anew, if they are left open."""

    @property
    def causal(self) -> bool:
        """True if attention is causal."""
        return True

    @property
    @abstractmethod
    def sequence_length(self) -> int:
        """Tokens of a sample, before context parallelism shards them."""

    @property
    def packed(self) -> bool:
        """True if documents attend apart; the samples of a micro-batch are then joined into one
        sequence.
        """
        return False

    @property
    def windows(self) -> tuple[tuple[int, int] | None, ...]:
        """The windows of the layers of softmax attention, each once; None is none."""
        return (None,)

    @property
    def joined_length(self) -> int:
        """Tokens of what context parallelism shards as one sequence: a sample, or a micro-batch's
        joined ones.
        """
        return self.sequence_length * (self.train.micro_batch_size if self.packed else 1)

    @property
    def rotates(self) -> bool:
        """True if positions are rotary, and may be scaled."""
        return False

    @property
    def delta(self) -> bool:
        """True if layers have a delta rule, whose states pass along consecutive tokens."""
        return False

    @property
    def hybrid_layouts(self) -> bool:
        """True if layers of softmax attention have a layout of their own beside linear attention."""
        return False

    @property
    def ema_decay(self) -> float | None:
        """The decay of averages of the weights; None if the run keeps none."""
        return None

    @property
    def sample_ends(self) -> tuple[int, ...] | None:
        """Cumulative lengths of a micro-batch's joined samples, if each attends apart; None if the
        data decide.
        """
        return None

    def updated(self, **values: Any) -> Self:
        """Return the configuration with other values of these fields, whatever their sections.

        Raises KeyError: no section has such a field.
        """
        sections = {
            name: section.name
            for section in fields(self)
            for name in values
            if name in getattr(self, section.name).__dataclass_fields__
        }
        changed: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            changed.setdefault(sections[name], {})[name] = value
        new = {
            section: replace(getattr(self, section), **fields_)
            for section, fields_ in changed.items()
        }
        return replace(self, **new)

    @property
    def reads_text(self) -> bool:
        """True if the data are text, of a tokenizer."""
        return False

    def with_file_names(self) -> Self:
        """Return the configuration with a name for each file that a run must have, and that it does
        not name.
        """
        return self.updated(save=self.checkpoint.save or "RUN")

    def files(self) -> list[tuple[str, str]]:
        """Return the files of the data, each after the field that names it."""
        return [("data_path", path) for path in self.data.data_path]

    def contents(self) -> dict[str, str]:
        """Return a digest of each training file by name; fast. Raises OSError if one is gone."""
        return {}

    def recorded(self) -> dict[str, Any]:
        """Return what the records beside the training files say, which checkpoints have too;
        JSON-able.
        """
        return {}

    def named(self, fields: Sequence[str]) -> dict[str, Any]:
        """Return the values of fields by their names, JSON-able."""
        values = {name: value_of(self, name) for name in fields}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
        }


def validate_run(config: CommonConfig) -> None:
    """Check the schedule and the attention's kernel, and that each setting has the others that it
    needs.

    Raises ConfigError for the first contradiction, naming the fields, their values and the fix.
    """
    train, optimizer = config.train, config.optimizer
    end = optimizer.lr_decay_iters
    if end is not None and optimizer.lr_warmup_iters >= end:
        raise ConfigError(
            f"lr_warmup_iters is {optimizer.lr_warmup_iters}, but the schedule ends at lr_decay_iters {end}; give "
            f"--lr-warmup-iters {end // 10}, or raise lr_decay_iters"
        )
    wsd, warmup = (
        optimizer.lr_wsd_decay_iters,
        schedule_of(optimizer, train.train_iters).lr_warmup_iters,
    )
    if end is not None and wsd is not None and wsd > end - warmup:
        raise ConfigError(
            f"lr_wsd_decay_iters is {wsd}, but only {end - warmup} iterations lie between the warm-up and "
            f"lr_decay_iters {end}; lower it"
        )
    if config.recompute.recompute_offload and config.mesh.device_type == "cpu":
        raise ConfigError(
            "recompute_offload is set and device is cpu, where what is kept lies in host memory "
            "already and a copy would only add to it; leave it out, or use --device cuda"
        )
    whole = config.data_parallel.strategy in ("ddp", "legacy_ddp")
    sharded = not whole or config.mesh.tensor_model_parallel_size > 1
    optimizer.spec.check(optimizer, config.mesh.device_type, sharded=sharded)
    if train.compile:
        _check_compile(config)
    config.float8.check(config)
    if train.eval_iters and not split_shares(config.data.split)[1]:
        raise ConfigError(
            f"split is {config.data.split}, which leaves nothing to validate on, but eval_iters is "
            f"{train.eval_iters}; give a split such as 95,5,0, or --eval-iters 0"
        )
    needs = [
        *NEEDS,
        *[("bad_step_policy", "save_interval")] * (config.health.bad_step_policy == "rollback"),
    ]
    for name, other in needs:
        if (value := value_of(config, name)) and not value_of(config, other):
            flag = other.replace("_", "-")
            raise ConfigError(
                f"{name} is {value}, but {other} is not set; give --{flag}, or leave {name} out"
            )
    _check_backend(config)


def _check_compile(config: CommonConfig) -> None:
    policy = config.recompute
    if policy.recompute_granularity == "attention_boundary" or policy.recompute_offload:
        named = (
            "recompute_offload"
            if policy.recompute_offload
            else "recompute_granularity attention_boundary"
        )
        raise ConfigError(
            f"compile is set with {named}, which looks at each operator while a layer runs, and compiled ones are not "
            "to be seen; use recompute_granularity full or selective, or leave compile out"
        )
    if config.mesh.device_type == "cpu" and not any(
        map(which, (os.environ.get("CXX", "g++"), "g++", "clang++"))
    ):
        raise ConfigError(
            "compile is set and no C++ compiler is there, which torch.compile needs for a CPU; install one (Debian: "
            "apt-get install g++), name it in CXX, or leave compile out"
        )


def _check_backend(config: CommonConfig) -> None:
    """Check that the attention kernel is used, fits the model's kind of attention and supports the
    run.
    """
    backend, method = config.context.attention_backend, config.context.context_parallel_method
    linear, kind = config.model.linear_attention, getattr(config.model, "model_type", None)
    if linear and backend not in ("auto", *LINEAR):
        raise ConfigError(
            f"attention_backend is {backend}, which is softmax attention, and model_type {kind} has linear attention; "
            f"use {listed(LINEAR)}"
        )
    if kind and not linear and backend not in ("auto", *SOFTMAX):
        raise ConfigError(
            f"attention_backend is {backend}, which is linear attention, and model_type {kind} has softmax attention; "
            f"use {listed(SOFTMAX)}"
        )
    if not linear and method == "none" and backend != "auto":
        raise ConfigError(
            f"attention_backend is {backend} and context_parallel_method is none, which is torch's own SDPA; "
            "choose a method, or leave the backend out"
        )
    if (
        backend != "auto"
        and not config.train.bf16
        and torch.float32 not in BACKENDS[backend].dtypes
    ):
        raise ConfigError(
            f"attention_backend is {backend}, which has no float32; give --bf16 or --attention-backend auto"
        )
