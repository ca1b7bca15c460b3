"""Pretrain a diffusion transformer on latents of images or long videos, shared over processes by context parallelism.

torchrun --standalone --nproc-per-node 4 pretrain_dit.py --config configs/dit_tiny.toml
"""

if __name__ == "__main__":  # before torch, whose import takes seconds in which a launcher may be killed
    from runtime.signals import end_with_launcher

    end_with_launcher()

from collections.abc import Callable
from functools import partial

import torch.distributed as dist

from data.latents.dataset import build_latent_datasets
from model.attention import Attend
from model.dit import DiT, dit_flops_per_patch, initial_dit_weight, num_dit_parameters
from model.dit_config import architecture_of
from parallel.context import ContextParallel
from parallel.mesh import Mesh, distributed_mesh
from planner.complete import as_asked, with_method
from planner.dry_run import dry_run
from planner.resize import sized
from runtime.signals import listening
from runtime.together import from_first, is_first, raise_together
from train.assemble import build_parts, build_runner, summary
from train.attention import diffusion_context
from train.config.common import with_joined_ranks
from train.config.diffusion import DiTRunConfig, diffusion_of, parse_args, validate
from train.ema import Ema
from train.loop import Trainer
from train.objectives.diffusion import Denoising
from train.optim import build_optimizer
from train.resume import resume
from train.run import open_log, owning, run_entry
from train.sampling import Sampler, picture_writer
from train.watching.replay import replay, replaying


def main(arguments: list[str], peak_flops: float | None = None) -> None:
    """Train from the command line to the last checkpoint: configuration, processes, data, model, training.

    Args:
        peak_flops: FLOP/s that MFU is measured against; by default what a process can reach.
    """
    config = replaying(parse_args(arguments))
    if config.dry.dry_run:
        dry_run(arguments, config, "pretrain_dit.py", validate, computing)
        return
    with (
        listening() as notice,
        sized(config, validate) as (config, asked),
        distributed_mesh(config.mesh) as mesh,
        owning(config),
    ):
        trainer = build_trainer(config, mesh, peak_flops, asked)
        if config.health.replay_step is None:
            trainer.run(notice)
        else:
            replay(trainer)


def build_trainer(
    config: DiTRunConfig, mesh: Mesh, peak_flops: float | None = None, asked: DiTRunConfig | None = None
) -> Trainer:
    """Build and load everything for training; collective. ``asked``: as ``planner.resize.sized`` yields it."""
    processes = dist.get_world_size()
    asked, config = asked or config, with_method(with_joined_ranks(config, processes), processes)
    with raise_together():
        cp, attend = diffusion_context(config, mesh.cp.get_group())
    model, seed = config.model, config.train.seed
    train_data, valid_data = build_latent_datasets(config.data, model.latent_shape, model.num_classes, seed)

    parts = model_parts(config, mesh, attend)
    optimizer = build_optimizer(config.optimizer, *parts)
    ema = Ema(config.ema.ema_decay, parts) if config.ema.ema_decay else None
    architecture = architecture_of(model)
    contents = from_first(config.contents)
    scheduled, progress = resume(config, parts, optimizer, architecture, contents, ema)
    flops = dit_flops_per_patch(model)
    objective = Denoising(cp, mesh.device, model, diffusion_of(config), seed, joined=config.packed)
    if is_first():
        print(described(config, mesh), flush=True)
    return Trainer(
        config=scheduled,
        mesh=mesh,
        runner=build_runner(config, mesh, parts, objective),
        optimizer=optimizer,
        objective=objective,
        train_data=train_data,
        valid_data=valid_data if config.train.eval_iters else None,
        architecture=architecture,
        flops_per_token=lambda length: flops,
        log=open_log(as_asked(config, asked), progress),
        ema=ema,
        after_validation=pictures(config, mesh, cp, parts),
        progress=progress,
        contents=contents,
        peak_flops=peak_flops,
    )


def computing(config: DiTRunConfig, mesh: Mesh) -> tuple[Denoising, Callable[[], list[DiT]]]:
    """Return the objective, and what builds this rank's parts of the model; collective."""
    cp, attend = diffusion_context(config, mesh.cp.get_group())
    seed, joined = config.train.seed, config.packed
    objective = Denoising(cp, mesh.device, config.model, diffusion_of(config), seed, joined=joined)
    return objective, partial(model_parts, config, mesh, attend)


def model_parts(config: DiTRunConfig, mesh: Mesh, attend: Attend) -> list[DiT]:
    """Build this rank's part of the model, with weights, for each of its pipeline stages."""
    from parallel.tensor.split import split_dit  # DTensor, which a refused command line need not wait for

    model = config.model
    return build_parts(
        config,
        mesh,
        build=lambda: DiT(model, attend),
        split=lambda part: split_dit(part, mesh.tp),
        weight_of=lambda name, shape, part: initial_dit_weight(model, name, shape, config.train.seed, part),
    )


def pictures(config: DiTRunConfig, mesh: Mesh, cp: ContextParallel, parts: list[DiT]) -> Callable[[int], None] | None:
    """Return a function that draws samples after a validation; None if the run has no folder for them."""
    seed, model, sampling = config.train.seed, config.model, config.sampling
    joined = config.train.micro_batch_size if config.packed else None
    sampler = Sampler(parts, mesh, cp, model, diffusion_of(config), sampling, seed, joined)
    return picture_writer(sampler, sampling, model.num_classes, config.checkpoint.save, config.train.micro_batch_size)


def described(config: DiTRunConfig, mesh: Mesh) -> str:
    """Describe the run in one line: the model, the mesh and the data."""
    model = config.model
    latents = f"latents of {' x '.join(map(str, model.latent_shape))} in {model.num_patches} patches"
    title = f"DiT of {num_dit_parameters(model):,} parameters"
    return summary(config, mesh, title, config.context.title, latents)


if __name__ == "__main__":
    run_entry(main)
