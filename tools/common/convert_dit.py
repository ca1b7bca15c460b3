"""Convert diffusion transformers to runs and back, with all weights in memory at once."""

from dataclasses import asdict
from pathlib import Path

from model.hf.dit import load_dit, save_dit
from model.hf.folder import new_folder
from model.registry import architecture_of
from train.callbacks.health import RunProgress
from train.checkpoint.api import save_checkpoint, stored_weights
from train.checkpoint.manifest import Manifest
from train.config.derive import IMPORTED
from train.config.diffusion import load_config
from train.config.entries import DiTRunConfig
from train.config.flags import write_toml
from train.resume.settings import AVERAGED


def import_dit(source: Path, run: Path) -> str:
    """Create a run from a diffusion transformer's folder; return a description.

    Raises UserError, and writes nothing, if ``run`` exists or the folder is not a whole model.
    """
    config, state = load_dit(source)
    with new_folder(run) as draft:
        (draft / "config.toml").write_text(write_toml(DiTRunConfig(model=config)), encoding="utf-8")
        extra = {"progress": asdict(RunProgress()), IMPORTED: str(source)}
        weights = {name: weight.to("meta") for name, weight in state.items()}
        shape = architecture_of(config)
        read = state.__getitem__
        save_checkpoint(draft, 0, weights, None, architecture=shape, extra=extra, read=read)

    count = sum(weight.numel() for weight in state.values())
    return f"imported {source} into {run}: a diffusion transformer of {count:,} parameters"


def export_dit(run: Path, checkpoint: Path, manifest: Manifest, target: Path) -> str:
    """Write a run's averaged weights, or the trained ones if there are no averages.

    Returns a description.

    Raises UserError if ``target`` exists, or if the checkpoint is not of the model in the run's
    config.toml.
    """
    config = load_config(run / "config.toml").model
    section = "model"
    kind = "weights as trained"
    if AVERAGED in manifest.extra:
        section = "ema"
        kind = "averages of the weights"
    weights, read = stored_weights(checkpoint, architecture_of(config), section)
    save_dit(target, config, {name: read(name) for name in weights})
    return f"exported {checkpoint} to {target}: the {kind} of a diffusion transformer"
