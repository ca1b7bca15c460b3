"""The configuration of a run: its sections, where it comes from, and what contradicts itself.

A section is the frozen dataclass that lies beside what it configures; flags.py makes flags and TOML keys of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from data.fingerprint import digest, fingerprint
from data.text.megatron import DataConfig, blend
from model.config import ModelConfig
from parallel.context.config import HybridConfig
from train.config import flags
from train.config.common import CommonConfig, LoopConfig, validate_backend, validate_run
from train.config.flags import ConfigError
from train.config.sizes import validate_sizes

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
class TrainConfig(LoopConfig):
    """What one iteration is, how many there are, and when the run looks at the validation data or stops."""

    seq_length: int = 1024
    """Tokens per sequence, before context parallelism shares them out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(1, "seq_length")


@dataclass(frozen=True, kw_only=True)
class Config(CommonConfig):
    """Everything that decides a run, one field per section; a field's name is unique over all sections."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    hybrid: HybridConfig = field(default_factory=HybridConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    @staticmethod
    def other_entries() -> dict[str, type]:
        from train.config.diffusion import DiTRunConfig  # which imports this one for the same reason

        return {"pretrain_dit.py": DiTRunConfig}

    @property
    def sequence_length(self) -> int:
        return self.train.seq_length

    def sample_order(self) -> dict[str, object]:
        return {
            "seed": self.train.seed,
            "seq_length": self.train.seq_length,
            "data_path": list(self.data.data_path),
            "split": self.data.split,
        }

    def noted(self) -> dict[str, object]:
        return {"eod_mask_loss": self.data.eod_mask_loss}

    def contents(self) -> dict[str, str]:
        tokenizer = self.data.tokenizer_model
        found: dict[str, str] = {} if tokenizer is None else {"tokenizer_model": digest(Path(tokenizer))}
        for prefix in blend(self.data.data_path)[0] if self.data.data_path else ():
            found[f"data_path {prefix}"] = fingerprint(Path(f"{prefix}.idx"), [Path(f"{prefix}.bin")])
        return found


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

    Raises UserError; prints the help and exits with status 0 where it is asked for.
    """
    return flags.parse(Config, argv, INTRODUCTION)


def load_config(path: str | Path) -> Config:
    """The configuration in a TOML file, defaults where it is silent. UserError names the key or field."""
    return flags.build(Config, flags.read_toml(Config, path))


def to_toml(config: Config) -> str:
    """`config` as TOML that `load_config` reads back as an equal Config; what is None is left out."""
    return flags.write_toml(config)


def validate(config: Config, world_size: int) -> None:
    """Check what no section can see alone, for a run of `world_size` processes; needs no process group.

    Raises UserError for the first contradiction, naming the fields, their values and the fix.
    """
    validate_sizes(config, world_size)
    validate_run(config)
    data = config.data
    _validate_backend(config)
    if not data.data_path:
        raise ConfigError(
            "data_path is empty; give --data-path PREFIX, the .bin/.idx pair that tools/prepare_data.py wrote"
        )
    if data.tokenizer_model is None:
        raise ConfigError(
            "tokenizer_model is not set; give --tokenizer-model FILE, the one that the data was written with"
        )


def _validate_backend(config: Config) -> None:
    """Check that the kernel of the attention is one of the model's kind of attention, and has something to do."""
    backend = config.context.attention_backend
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
    if not linear:
        validate_backend(config)
