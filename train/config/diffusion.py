"""Read and validate the configuration of a run of pretrain_dit.py."""

from functools import partial

from model.diffusion import Diffusion
from runtime.progress import counted
from train.config import flags
from train.config.checks import validate_run
from train.config.derive import with_joined_ranks
from train.config.entries import DiTRunConfig
from train.config.flags import ConfigError
from train.config.sizes import validate_magnitude, validate_mesh

INTRODUCTION = """\
Pretrain a diffusion transformer on latents of images or of long videos, sharded over processes by
context parallelism.

The settings come from a model of configs/models or a TOML file, and flags override them; "none"
unsets a flag that has no default. Examples:

  handwritten digits on 4 processes, data parallel 2 x context parallel 2; resumes if its folder has
  a checkpoint
    torchrun --standalone --nproc-per-node 4 %(prog)s --config dit_tiny --load runs/dit_tiny

  the same on 3 processes that exchange heads (Ulysses) instead of keys and values, saved to another
  folder
    torchrun --standalone --nproc-per-node 3 %(prog)s --config dit_tiny --context-parallel-size 3 \\
        --context-parallel-method ulysses --save runs/ulysses

  a pipeline of 2 stages: each pair of processes has half of the layers, and 4 micro-batches follow
  each other through them
    torchrun --standalone --nproc-per-node 4 %(prog)s --config dit_tiny \\
        --pipeline-model-parallel-size 2 --context-parallel-size 2 --micro-batch-size 8 \\
        --global-batch-size 32 --save runs/pipeline
"""


parse_args = partial(flags.parse, DiTRunConfig, introduction=INTRODUCTION)
"""Parses a command line as ``flags.parse`` does."""
load_config = partial(flags.load, DiTRunConfig)
"""Reads a TOML file as ``flags.load`` does."""


def validate(config: DiTRunConfig, world_size: int) -> None:
    """Check the sections against each other, for a run of `world_size` processes.

    Needs no process group.

    Raises UserError for the first contradiction, naming the fields, their values and the fix.
    """
    config = with_joined_ranks(config, world_size)
    if config.packed and config.context.context_parallel_method == "none":
        raise ConfigError(
            "pack_samples is set, but context_parallel_method none uses torch's own SDPA, which "
            "does not support packed samples; choose a method (any runs on one process too)"
        )
    validate_magnitude(config, world_size)
    config.sampling.check(diffusion_of(config))
    if config.sampling.samples_per_class:
        config.sampling.check_guidance(config.model.class_dropout_prob)

    # Before validate_mesh, which would suggest a data-parallel strategy for this schedule.
    schedule = config.pipeline.pipeline_schedule
    if schedule == "InterleavedZeroBubble":
        raise ConfigError(
            f"pipeline_schedule is {schedule}, which computes weight gradients separately and does "
            "not work for a diffusion transformer: the backward pass of its time and label "
            "embeddings frees tensors that the layers' weight gradients need; use Interleaved1F1B"
        )
    validate_mesh(config, world_size)

    patches = config.joined_length
    cp = config.mesh.context_parallel_size
    tp = config.mesh.tensor_model_parallel_size
    if patches < cp * tp:
        raise ConfigError(
            f"context_parallel_size {cp} x tensor_model_parallel_size {tp} is more processes than "
            f"the {counted(patches, 'patch')} of a sequence; lower the sizes or patch_size, or "
            "pack several samples into a sequence with --pack-samples"
        )
    validate_run(config)
    if config.recompute.loss_chunk_size:
        raise ConfigError(
            f"loss_chunk_size is {config.recompute.loss_chunk_size}, but it splits the logits of a "
            "language model, which a diffusion transformer does not have; leave out "
            "--loss-chunk-size"
        )


def diffusion_of(config: DiTRunConfig) -> Diffusion:
    """Build the diffusion objective. Raises UserError if the model does not support it."""
    return Diffusion(config.diffusion, config.model.learn_sigma, config.model.latent_shape[0])
