"""The configuration of a run: its sections, where it comes from, and what contradicts itself.

A section is the frozen dataclass that lies beside what it configures; train/flags.py makes flags and TOML keys of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from data.megatron import DataConfig, split_shares
from model.config import ModelConfig
from parallel.checkpoint import CheckpointConfig
from parallel.context.config import ContextConfig
from parallel.data import DataParallelConfig
from parallel.mesh import MeshConfig
from parallel.recompute import RecomputeConfig
from parallel.stages import PipelineConfig
from train import flags
from train.flags import ConfigError
from train.metrics import LoggingConfig
from train.optim import OptimizerConfig
from train.sizes import validate_sizes

__all__ = [
    "Config",
    "ConfigError",
    "TrainConfig",
    "load_config",
    "parse_args",
    "to_toml",
    "validate",
]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What one iteration is, how many there are, and when the run looks at the validation data or stops."""

    train_iters: int = 1000
    """Iterations (optimizer steps) of the whole run, those before a resume counted in."""
    micro_batch_size: int = 1
    """Sequences that go through the model at once, per data-parallel rank."""
    global_batch_size: int | None = None
    """Sequences per iteration over all processes; by default micro_batch_size x data-parallel size; more accumulate."""
    seq_length: int = 1024
    """Tokens per sequence, before context parallelism shares them out."""
    seed: int = 1234
    """Seed of the initial weights and of the order of the data."""
    bf16: bool = False
    """Compute in bfloat16; master weights, gradients' sums and the optimizer stay in float32."""
    eval_interval: int = 100
    """Iterations between validations; one is made at the end in any case."""
    eval_iters: int = 10
    """Global batches per validation; 0 makes none."""
    exit_interval: int | None = None
    """Exit after the iteration that this number divides, saving first; the schedule still spans train_iters."""
    exit_duration_in_mins: float | None = None
    """Exit once the run has taken this many minutes, saving first."""

    def __post_init__(self) -> None:
        for name in (
            "train_iters",
            "micro_batch_size",
            "global_batch_size",
            "seq_length",
            "eval_interval",
            "exit_interval",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be 1 or more")
        for name in ("eval_iters", "seed"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        if self.exit_duration_in_mins is not None and self.exit_duration_in_mins <= 0:
            raise ConfigError(f"exit_duration_in_mins is {self.exit_duration_in_mins}; it must be above 0")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that decides a run, one field per section; a field's name is unique over all sections."""

    model: ModelConfig = field(default_factory=ModelConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    data_parallel: DataParallelConfig = field(default_factory=DataParallelConfig)
    context: ContextConfig = field(default_factory=ContextConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)


INTRODUCTION = """\
Pretrain a language model on long sequences, shared over processes by context parallelism.

A TOML file under configs/ sets the run and flags override it; "none" unsets a flag that has no default. Examples:

  the main job: 4 processes, data parallel 2 x context parallel 2; goes on where its folder holds a checkpoint
    torchrun --standalone --nproc-per-node 4 %(prog)s --config configs/llama_tiny.toml --load runs/llama_tiny

  the same with another method and longer sequences, kept in a folder of its own
    torchrun --standalone --nproc-per-node 4 %(prog)s --config configs/llama_tiny.toml \\
        --context-parallel-method zigzag --seq-length 4096 --save runs/zigzag

  one data-parallel group of 4: 2 processes share every matrix, and 2 such pairs every sequence
    torchrun --standalone --nproc-per-node 4 %(prog)s --config configs/llama_tiny.toml \\
        --tensor-model-parallel-size 2 --context-parallel-size 2 --save runs/tensor

  a pipeline of 2: each pair holds half of the layers, and 4 micro-batches follow each other through them
    torchrun --standalone --nproc-per-node 4 %(prog)s --config configs/llama_tiny.toml \\
        --pipeline-model-parallel-size 2 --context-parallel-size 2 --micro-batch-size 1 --save runs/pipeline

  go on from its newest whole checkpoint, in one process
    torchrun --standalone %(prog)s --config runs/zigzag/config.toml --context-parallel-size 1 --load runs/zigzag \\
        --train-iters 240
"""


def parse_args(argv: Sequence[str]) -> Config:
    """The configuration of a command line without the program's name: `--config FILE`, other flags over it.

    Raises ConfigError; prints the help and exits with status 0 where it is asked for.
    """
    return flags.parse(Config, argv, INTRODUCTION)


def load_config(path: str | Path) -> Config:
    """The configuration in a TOML file, defaults where it is silent. Raises ConfigError naming file and key."""
    return flags.build(Config, flags.read_toml(Config, path))


def to_toml(config: Config) -> str:
    """`config` as TOML that `load_config` reads back as an equal Config; what is None is left out."""
    return flags.write_toml(config)


def sample_order(config: Config) -> dict[str, object]:
    """What decides which sample is the n-th: kept in checkpoints, since consumed samples mean nothing without it."""
    return {
        "seed": config.train.seed,
        "seq_length": config.train.seq_length,
        "data_path": list(config.data.data_path),
        "split": config.data.split,
    }


def validate(config: Config, world_size: int) -> None:
    """Check what no section can see alone, for a run of `world_size` processes; needs no process group.

    Raises ConfigError for the first contradiction, naming the fields, their values and the fix.
    """
    validate_sizes(config, world_size)
    train, optimizer, data, checkpoint = config.train, config.optimizer, config.data, config.checkpoint
    decay_iters = optimizer.lr_decay_iters or train.train_iters
    if optimizer.lr_warmup_iters >= decay_iters:
        raise ConfigError(
            f"lr_warmup_iters is {optimizer.lr_warmup_iters}, but the schedule ends at iteration {decay_iters}; "
            f"give --lr-warmup-iters {decay_iters // 10}, or raise train_iters"
        )
    wsd = optimizer.lr_wsd_decay_iters
    if wsd is not None and wsd > decay_iters - optimizer.lr_warmup_iters:
        raise ConfigError(
            f"lr_wsd_decay_iters is {wsd}, but only {decay_iters - optimizer.lr_warmup_iters} iterations lie between "
            "the warm-up and the end of the schedule; lower it"
        )
    _validate_backend(config)
    if config.recompute.recompute_offload and config.mesh.device_type == "cpu":
        raise ConfigError(
            "recompute_offload is set and device is cpu, where what is kept lies in host memory already and a copy "
            "would only add to it; leave it out, or use --device cuda"
        )
    if not data.data_path:
        raise ConfigError(
            "data_path is empty; give --data-path PREFIX, the .bin/.idx pair that tools/prepare_data.py wrote"
        )
    if data.tokenizer_model is None:
        raise ConfigError(
            "tokenizer_model is not set; give --tokenizer-model FILE, the one that the data was written with"
        )
    if train.eval_iters and not split_shares(data.split)[1]:
        raise ConfigError(
            f"split is {data.split}, which leaves nothing to validate on, but eval_iters is {train.eval_iters}; "
            "give a split such as 95,5,0, or --eval-iters 0"
        )
    needs = (
        ("save_interval", checkpoint.save_interval, "save", checkpoint.save),
        ("wandb_exp_name", config.logging.wandb_exp_name, "wandb_project", config.logging.wandb_project),
    )
    for name, value, other, wanted in needs:
        if value and not wanted:
            flag = other.replace("_", "-")
            raise ConfigError(f"{name} is {value}, but {other} is not set; give --{flag}, or leave {name} out")


def _validate_backend(config: Config) -> None:
    """Check that the kernel of the attention is one of the model's kind of attention, and has something to do."""
    backend, method = config.context.attention_backend, config.context.context_parallel_method
    linear, kind = config.model.linear_attention, config.model.model_type
    if linear and backend in ("aten", "cudnn", "flash_attn"):
        raise ConfigError(
            f"attention_backend is {backend}, which is softmax attention, and model_type {kind} has linear attention; "
            "use auto, chunked, triton or reference"
        )
    if not linear and backend in ("chunked", "triton"):
        raise ConfigError(
            f"attention_backend is {backend}, which is linear attention, and model_type {kind} has softmax attention; "
            "use auto, aten, cudnn, flash_attn or reference"
        )
    if method == "none" and backend != "auto" and not linear:
        raise ConfigError(
            f"attention_backend is {backend} and context_parallel_method is none, which is torch's own SDPA; "
            "choose a method, or leave the backend out"
        )
    if backend == "flash_attn" and not config.train.bf16:
        raise ConfigError(
            "attention_backend is flash_attn, which has no float32; give --bf16 or --attention-backend auto"
        )
