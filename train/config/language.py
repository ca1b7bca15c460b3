"""Read and validate the configuration of a language model's run."""

from functools import partial

from train.config import flags
from train.config.checks import validate_run
from train.config.derive import with_joined_ranks
from train.config.entries import Config
from train.config.flags import ConfigError
from train.config.sizes import validate_sizes

INTRODUCTION = """\
Pretrain a language model on long sequences, sharded over processes by context parallelism.

The run is set by a model of configs/models or a TOML file, and flags override it; "none" unsets a
flag that has no default. Examples:

  the main job: 4 processes, data parallel 2 x context parallel 2; resumes if its folder has a
  checkpoint
    torchrun --standalone --nproc-per-node 4 %(prog)s --config llama_tiny --load runs/llama_tiny

  the same with another method and longer sequences, saved to another folder
    torchrun --standalone --nproc-per-node 4 %(prog)s --config llama_tiny \\
        --context-parallel-method zigzag --seq-length 4096 --save runs/zigzag

  tensor parallel 2 x context parallel 2: 2 processes share every matrix, and 2 such pairs every
  sequence
    torchrun --standalone --nproc-per-node 4 %(prog)s --config llama_tiny \\
        --tensor-model-parallel-size 2 --context-parallel-size 2 --save runs/tensor

  a pipeline of 2 stages: each pair of processes has half of the layers, and 4 micro-batches follow
  each other through them
    torchrun --standalone --nproc-per-node 4 %(prog)s --config llama_tiny \\
        --pipeline-model-parallel-size 2 --context-parallel-size 2 --micro-batch-size 1 \\
        --save runs/pipeline

  resume from its newest complete checkpoint, in one process
    torchrun --standalone %(prog)s --config runs/zigzag/config.toml --context-parallel-size 1 \\
        --load runs/zigzag --train-iters 240
"""


parse_args = partial(flags.parse, Config, introduction=INTRODUCTION)
"""Parses a command line as ``flags.parse`` does."""
load_config = partial(flags.load, Config)
"""Reads a TOML file as ``flags.load`` does."""


def validate(config: Config, world_size: int) -> None:
    """Check the sections against each other, for a run of `world_size` processes.

    Needs no process group.

    Raises UserError for the first contradiction, naming the fields, their values and the fix.
    """
    config = with_joined_ranks(config, world_size)
    _validate_documents(config)
    validate_sizes(config, world_size)
    validate_run(config)
    config.ruler.lengths(config.train.seq_length)
    _validate_data(config)

    if config.model.lora_rank is not None and config.checkpoint.load is None:
        raise ConfigError(
            f"lora_rank is {config.model.lora_rank} and load is not set, so that the adapters "
            "would be trained over random weights; give --finetune --load RUN"
        )


def _validate_data(config: Config) -> None:
    """Check that the data and the vocabulary are set: files and a tokenizer, or mock data."""
    data = config.data
    if data.mock_data:
        interval = config.ruler.ruler_interval
        if interval:
            raise ConfigError(
                f"ruler_interval is {interval} and mock_data is set, whose random tokens are no "
                "text; leave one out (--ruler-interval none)"
            )
        if config.model.vocab_size is None:
            raise ConfigError(
                "mock_data is set and vocab_size is not; give --vocab-size N, as there is no "
                "tokenizer that has one"
            )
    elif not data.data_path:
        raise ConfigError(
            "data_path is empty; give --data-path PREFIX, the .bin/.idx pair that "
            "tools/prepare_data.py wrote"
        )
    elif data.tokenizer_model is None:
        raise ConfigError(
            "tokenizer_model is not set; give --tokenizer-model FILE, the one that the data was "
            "written with"
        )


def _validate_documents(config: Config) -> None:
    """Check that the settings of documents agree, and that the model can keep documents apart."""
    if config.data.sft and not (config.packed and config.data.reset_position_ids):
        raise ConfigError(
            "sft is set, which needs --reset-attention-mask and --reset-position-ids, so that a "
            "conversation attends to itself alone, and sets them; remove what sets them to false"
        )
    for name in ("pack_documents", "blend_by_length"):
        if config.data.sft and getattr(config.data, name):
            raise ConfigError(
                f"{name} is set with sft, whose data files have the conversations packed already; "
                "leave it out"
            )
    for name in ("sft", "pack_documents"):
        if config.data.eod_mask_loss and getattr(config.data, name):
            raise ConfigError(
                f"eod_mask_loss is set with {name}, whose data have a loss mask; leave it out"
            )
    if not config.packed:
        return
    if config.model.learned_positions and not config.data.reset_position_ids:
        raise ConfigError(
            "reset_attention_mask is set with learned_absolute positions and without "
            "reset_position_ids: a document's positions would depend on where it lies in the "
            "sample; give --reset-position-ids, or --position-embedding-type rope"
        )
    if config.context.context_parallel_method == "none" and not config.model.linear_attention:
        raise ConfigError(
            "reset_attention_mask is set and context_parallel_method is none, which is torch's own "
            "SDPA and supports no documents; choose a method, which one process can run too"
        )
