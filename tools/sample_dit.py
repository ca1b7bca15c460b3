"""Draw pictures with a trained diffusion transformer: a PNG grid for each class, and one of all.

    python -m tools.sample_dit --load runs/dit_tiny --classes 3 7
    torchrun --standalone --nproc-per-node 4 -m tools.sample_dit --load runs/dit_tiny \\
        --guidance 2 --steps 100

Processes started by torchrun form the run's mesh if their number allows it, else they are only
data-parallel: every data-parallel rank draws other samples, and context- and tensor-parallel ranks
share each sample. The pictures are the same on any mesh.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from data.latents.dataset import Vae
from model.registry import architecture_of
from parallel.context.config import FullContextConfig
from parallel.mesh import Mesh, MeshConfig, distributed_mesh
from parallel.pipeline.stages import PipelineConfig
from runtime.files import replacing
from runtime.processes import launched_world_size
from runtime.together import is_first, raise_together
from tools.common.arguments import parser_for, positive
from train.checkpoint.api import load_model
from train.checkpoint.manifest import CheckpointError, read_manifest
from train.checkpoint.search import checkpoint_of
from train.config.common import LoopConfig
from train.config.diffusion import diffusion_of, load_config
from train.config.entries import DiTRunConfig
from train.config.flags import ConfigError, config_file
from train.config.sizes import validate_mesh
from train.float8 import Float8Config
from train.resume.settings import AVERAGED
from train.run import check_writable, run_entry
from train.sampling import SamplingConfig, by_class, not_finite, write_grid
from train.tasks.diffusion import DiffusionTask

DEFAULT_CLASSES = 10
"""Number of classes to draw if the command names none."""


def main(argv: list[str]) -> None:
    """Open a run, and draw pictures of the requested classes."""
    args = _parse(argv)
    config = fitted(config_of(args.load), launched_world_size())
    classes = _classes(args, config.model.num_classes)
    requested = {
        "sample_steps": args.steps,
        "sample_method": args.method,
        "guidance": args.guidance,
        "guidance_channels": args.guidance_channels,
    }
    changes = {name: value for name, value in requested.items() if value is not None}
    sampling = replace(config.sampling, **changes)
    sampling.check(diffusion_of(config))
    sampling.check_guidance(config.model.class_dropout_prob)
    with distributed_mesh(config.mesh) as mesh:
        _draw(config, mesh, args, sampling, classes)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = parser_for("python -m tools.sample_dit", __doc__)
    add = parser.add_argument
    add("--load", type=Path, required=True, metavar="DIR", help="folder of the run")
    add(
        "--ckpt-step",
        type=int,
        metavar="N",
        help="iteration to load (default: the newest whole checkpoint)",
    )
    add("--no-ema", action="store_true", help="take the weights as trained, not their averages")
    add(
        "--classes",
        type=int,
        nargs="+",
        metavar="N",
        help="classes to sample (default: the first ten)",
    )
    add(
        "--num-samples",
        type=positive,
        default=8,
        metavar="N",
        help="number of samples per class (default: %(default)s)",
    )
    add(
        "--guidance",
        type=float,
        metavar="X",
        help=(
            "weight of the class in classifier-free guidance; "
            "1 turns guidance off (default: the run's own)"
        ),
    )
    add(
        "--guidance-channels",
        type=positive,
        metavar="N",
        help=(
            "number of channels, from the first, that guidance changes; "
            "3 in the original DiT's script (default: the run's own)"
        ),
    )
    add(
        "--steps",
        type=positive,
        metavar="N",
        help="number of model calls per sample (default: the run's own)",
    )
    add(
        "--method",
        choices=["ddim", "ddpm", "euler"],
        help=(
            "ddim (no noise between steps), ddpm (noise in every step), or euler for "
            "rectified_flow (default: the run's own)"
        ),
    )
    add(
        "--batch-size",
        type=positive,
        default=64,
        metavar="N",
        help="number of samples at once on each data-parallel rank (default: 64)",
    )
    add(
        "--seed",
        type=int,
        default=LoopConfig().seed,
        metavar="N",
        help=(
            "seed of the noise; the seed and a sample's number determine the sample (default: "
            "%(default)s)"
        ),
    )
    add(
        "--vae",
        type=Path,
        metavar="DIR",
        help="folder of a diffusers AutoencoderKL that decodes the samples",
    )
    add(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder to write to (default: one inside --load)",
    )
    return parser.parse_args(argv)


def _classes(args: argparse.Namespace, num_classes: int) -> list[int]:
    """Return the classes to draw.

    Raises ConfigError if the model lacks a requested class, or if a class is given twice.
    """
    if args.classes is None:
        return list(range(min(num_classes, DEFAULT_CLASSES)))

    for index, label in enumerate(args.classes):
        if label in args.classes[:index]:
            raise ConfigError(
                f"--classes has {label} twice, and both pictures would go to the same file; "
                "give each class once"
            )
        if not 0 <= label < num_classes:
            raise ConfigError(
                f"--classes has {label}; it must be one of the model's classes, 0 to "
                f"{num_classes - 1}"
            )

    return args.classes


def _draw(
    config: DiTRunConfig,
    mesh: Mesh,
    args: argparse.Namespace,
    sampling: SamplingConfig,
    classes: Sequence[int],
) -> None:
    """Load the weights, draw samples and write their pictures; collective.

    The weights are the averages, or the trained ones with --no-ema or if the run has no averages.
    Nothing of the model outlives the call.

    Raises CheckpointError if there is no such checkpoint, or if its samples have NaN or infinity.
    """
    checkpoint = checkpoint_of(args.load, args.ckpt_step)
    averaged = bool(config.ema.ema_decay) and not args.no_ema
    with raise_together():
        if averaged and AVERAGED not in read_manifest(checkpoint).extra:
            raise CheckpointError(
                f"{checkpoint} has no averages of the weights; "
                "give --no-ema to take the weights as trained"
            )

    task = DiffusionTask(replace(config, sampling=sampling), mesh)
    parts = task.build_parts()
    section = "ema" if averaged else "model"
    loaded = load_model(checkpoint, parts[0], architecture_of(config.model), section=section)
    sampler = task.sampler(parts, args.seed)

    folder = args.output or args.load / "samples" / f"drawn_{loaded.iteration:07d}"
    with raise_together():
        if is_first():
            check_writable(folder, "output")
        vae = Vae(args.vae, mesh.device) if args.vae and is_first() else None
        if vae is not None:
            vae.check(config.model.latent_shape)

    latents = sampler.draw(by_class(classes, args.num_samples), args.batch_size)
    with raise_together():
        broken = not_finite(latents)
        if broken:
            raise CheckpointError(
                f"{checkpoint} generates values that are not finite in {broken} of {len(latents)} "
                f"samples, so its training diverged or guidance {sampling.guidance} is too large; "
                "take an earlier checkpoint or a smaller --guidance"
            )
        if is_first():
            pictures = latents if vae is None else vae.decode(latents)
            _write(folder, pictures, classes, args.num_samples)


def config_of(run: Path) -> DiTRunConfig:
    """Load a run's configuration, with float8 switched off. Raises ConfigError."""
    return replace(load_config(config_file(run)), float8=Float8Config())


def fitted(config: DiTRunConfig, processes: int) -> DiTRunConfig:
    """Fit the run's configuration to a number of processes.

    Pipeline stages would wait for each other, so there are none. Copies of shards and the global
    batch size are dropped too: sampling does not need them, and they might not fit the processes.
    """
    mesh = config.mesh
    if processes % (mesh.tensor_model_parallel_size * mesh.context_parallel_size):
        mesh = MeshConfig()
    context = config.context
    if context.context_parallel_method == "auto":  # auto chooses a method for training steps
        context = FullContextConfig()
    if mesh.context_parallel_size == 1:
        context = FullContextConfig(context_parallel_method="none")

    device = config.mesh.device
    if device == "cuda" and not torch.cuda.is_available():
        device = "auto"
    fitting = replace(config, context=context, pipeline=PipelineConfig()).updated(
        tensor_model_parallel_size=mesh.tensor_model_parallel_size,
        context_parallel_size=mesh.context_parallel_size,
        pipeline_model_parallel_size=1,
        balance_over="cp",
        device=device,
        num_distributed_optimizer_instances=1,
        pack_samples=False,
        global_batch_size=None,
    )
    validate_mesh(fitting, processes)
    return fitting


def _write(folder: Path, pictures: Tensor, classes: Sequence[int], samples: int) -> None:
    """Write a nearly square grid of every class, and one with a row per class.

    Grids of an earlier drawing are removed only after all new ones are written.
    """
    paths = [*(folder / f"class_{label:04d}.png" for label in classes), folder / "all.png"]
    older = [path for path in (*folder.glob("class_*.png"), folder / "all.png") if path.exists()]
    with replacing(*paths) as (*class_drafts, all_draft):
        for draft, grid in zip(class_drafts, pictures.split(samples), strict=True):
            write_grid(draft, grid, math.ceil(math.sqrt(samples)))
        write_grid(all_draft, pictures, samples)

    for path in set(older) - set(paths):
        path.unlink()

    if older:
        print(f"replaced {len(older)} earlier pictures in {folder}")
    print(f"{len(pictures)} samples of {len(classes)} classes in {folder}")


if __name__ == "__main__":
    run_entry(main)
