"""Pretrain a diffusion transformer on latents of images or long videos.

Context parallelism shards each sample over processes.

torchrun --standalone --nproc-per-node 4 pretrain_dit.py --config configs/models/dit_tiny.toml
"""

# Called before torch is imported, because that takes seconds, in which the launcher may be killed.
if __name__ == "__main__":
    from runtime.signals import end_with_launcher

    end_with_launcher()

from parallel.mesh import distributed_mesh, joined_processes
from planner.choice import PLANNER
from planner.dry_run import dry_run
from runtime.signals import stop_requests
from train.config.finalize import finalize, validate_launch
from train.run import reserve_run_folder, run_entry
from train.tasks.diffusion import DiffusionTask
from train.trainer import Trainer


def main(arguments: list[str], peak_flops: float | None = None) -> None:
    """Train as the command line says, or only check and plan the run with --dry-run.

    Args:
        peak_flops: FLOP/s per process that count as an MFU of 100 %; by default the device's peak.
    """
    config = DiffusionTask.parse_args(arguments)
    if config.dry.dry_run:
        dry_run(arguments, config)
        return

    validate_launch(config, DiffusionTask.validate)
    with stop_requests() as request, joined_processes(config.mesh), reserve_run_folder(config):
        final = finalize(config, DiffusionTask, PLANNER)
        with distributed_mesh(final.config.mesh) as mesh:
            Trainer(DiffusionTask(final.config, mesh), final, peak_flops=peak_flops).train(request)


if __name__ == "__main__":
    run_entry(main)
