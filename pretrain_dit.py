"""Pretrain a diffusion transformer on latents of images or long videos, shared over processes by context parallelism.

torchrun --standalone --nproc-per-node 4 pretrain_dit.py --config configs/models/dit_tiny.toml
"""

if __name__ == "__main__":  # before torch, whose import takes seconds in which a launcher may be killed
    from runtime.signals import end_with_launcher

    end_with_launcher()

import torch.distributed as dist

from data.latents.dataset import build_latent_datasets
from model.dit import DiT, dit_flops_per_patch, num_dit_parameters
from model.registry import architecture_of, initial_weight
from parallel.mesh import Mesh, distributed_mesh
from planner.choice import fastest_method, fitted_to_world
from planner.dry_run import dry_run
from runtime.signals import stop_requests
from runtime.together import from_first, is_first, raise_together
from train.assemble import Run
from train.attention import diffusion_context, kernel_lines
from train.config.derive import config_to_save, with_joined_ranks, with_method
from train.config.diffusion import diffusion_of, parse_args, validate
from train.config.entries import DiTRunConfig
from train.loop import Trainer
from train.objectives.diffusion import Denoising
from train.resume import find_start
from train.run import open_log, reserve_run_folder, run_entry
from train.sampling import Sampler, picture_writer


def main(arguments: list[str], peak_flops: float | None = None) -> None:
    """Train from the command line to the last checkpoint: configuration, processes, data, model, training.

    Args:
        peak_flops: FLOP/s that MFU is measured against; by default what a process can reach.
    """
    config = parse_args(arguments)
    if config.dry.dry_run:
        dry_run(arguments, config, "pretrain_dit.py", validate, resolve)
        return
    with (
        stop_requests() as request,
        fitted_to_world(config, validate) as (config, asked),
        distributed_mesh(config.mesh) as mesh,
        reserve_run_folder(config),
    ):
        build_trainer(config, mesh, peak_flops, asked).train(request)


def build_trainer(
    config: DiTRunConfig, mesh: Mesh, peak_flops: float | None = None, asked: DiTRunConfig | None = None
) -> Trainer:
    """Build and load everything for training; collective. ``asked`` is as ``fitted_to_world`` yields it."""
    asked, processes = asked or config, dist.get_world_size()
    config = with_method(with_joined_ranks(config, processes), processes, fastest_method)
    start = find_start(config, architecture_of(config.model), from_first(config.contents))
    run = resolve(start.config, mesh)
    model, train = run.config.model, run.config.train
    train_data, valid_data = build_latent_datasets(run.config.data, model.latent_shape, model.num_classes, train.seed)

    start.load(run.parts, run.optimizer, run.ema)
    flops = dit_flops_per_patch(model)
    sampler = Sampler(run, diffusion_of(run.config), run.config.sampling, train.seed)
    if is_first():
        print(described(run), *kernel_lines(run.config), sep="\n", flush=True)
    return Trainer(
        run=run,
        start=start,
        train_data=train_data,
        valid_data=valid_data if train.eval_iters else None,
        flops_per_token=lambda length: flops,
        log=open_log(config_to_save(config, asked), start.progress),
        after_validation=picture_writer(sampler.draw, run.config),
        peak_flops=peak_flops or 0.0,
    )


def resolve(config: DiTRunConfig, mesh: Mesh) -> Run[DiTRunConfig]:
    """Resolve what a complete configuration computes, and how; collective."""
    from parallel.tensor.split import split_model  # DTensor, which a refused command line need not wait for

    model, seed = config.model, config.train.seed
    with raise_together():
        cp, attend = diffusion_context(config, mesh.cp.get_group())
    return Run(
        config=config,
        mesh=mesh,
        cp=cp,
        objective=Denoising(cp, mesh.device, model, diffusion_of(config), seed, joined=config.packed),
        build=lambda: DiT(model, attend),
        split=lambda part: split_model(part, mesh.tp),
        weight_of=lambda name, shape, part: initial_weight(model, name, shape, seed, part),
        ema_decay=config.ema.ema_decay,
    )


def described(run: Run[DiTRunConfig]) -> str:
    """Describe the run in one line: the model, the mesh and the data."""
    model = run.config.model
    latents = f"latents of {' x '.join(map(str, model.latent_shape))} in {model.num_patches} patches"
    title = f"DiT of {num_dit_parameters(model):,} parameters"
    return run.summary(title, run.config.context.title, latents)


if __name__ == "__main__":
    run_entry(main)
