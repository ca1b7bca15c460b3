"""Read and validate the configuration of a run of pretrain_gpt.py."""

from functools import partial

from train.config import flags
from train.config.checks import validate_run
from train.config.derive import with_joined_ranks
from train.config.entries import Config
from train.config.flags import ConfigError
from train.config.sizes import validate_sizes

INTRODUCTION = """\
Pretrain a language model on long sequences, sharded over processes by context parallelism.

The settings come from a model of configs/models or a TOML file, and flags override them; "none"
unsets a flag that has no default. Examples:

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
            f"lora_rank is {config.model.lora_rank}, but load is not set: the adapters would be "
            "trained on top of random weights; give --finetune --load RUN"
        )


def _validate_data(config: Config) -> None:
    """Check that the data and the vocabulary are set: files and a tokenizer, or mock data."""
    data = config.data
    if data.mock_data:
        interval = config.ruler.ruler_interval
        if interval:
            raise ConfigError(
                f"ruler_interval is {interval}, but mock_data is set and RULER needs text, not "
                "random tokens; give --ruler-interval none, or leave out --mock-data"
            )
        if config.model.vocab_size is None:
            raise ConfigError(
                "mock_data is set, but vocab_size is not, and there is no tokenizer to take it "
                "from; give --vocab-size N"
            )
    elif not data.data_path:
        raise ConfigError(
            "data_path is empty; give --data-path PREFIX, the .bin/.idx pair that "
            "tools/prepare_data.py wrote"
        )
    elif data.tokenizer_model is None:
        raise ConfigError(
            "tokenizer_model is not set; give --tokenizer-model FILE, the tokenizer that the data "
            "was prepared with"
        )


def _validate_documents(config: Config) -> None:
    """Check that the document settings agree, and that the model can keep documents apart."""
    if config.data.sft and not (config.packed and config.data.reset_position_ids):
        raise ConfigError(
            "sft is set, but reset_attention_mask or reset_position_ids is false, and a "
            "conversation must attend only to itself; leave out both, which sft then turns on"
        )
    for name in ("pack_documents", "blend_by_length"):
        if config.data.sft and getattr(config.data, name):
            raise ConfigError(
                f"{name} does not apply to sft, since its data files have the conversations packed "
                f"already; leave out --{name.replace('_', '-')}"
            )
    for name in ("sft", "pack_documents"):
        if config.data.eod_mask_loss and getattr(config.data, name):
            raise ConfigError(
                f"eod_mask_loss does not apply to {name}, since its data already have a loss mask; "
                "leave out --eod-mask-loss"
            )
    if not config.packed:
        return
    if config.model.learned_positions and not config.data.reset_position_ids:
        raise ConfigError(
            "reset_attention_mask is set with learned_absolute positions but without "
            "reset_position_ids, so a document's positions would depend on its offset in the "
            "sample; give --reset-position-ids, or --position-embedding-type rope"
        )
    if config.context.context_parallel_method == "none" and not config.model.linear_attention:
        raise ConfigError(
            "reset_attention_mask is set, but context_parallel_method none uses torch's own SDPA, "
            "which cannot mask documents; choose a method (any runs on one process too)"
        )
