"""Diffusion transformers with the names of the original's release to runs and back; part of tools.convert_hf."""

from dataclasses import asdict
from pathlib import Path

from checkpoint.api import Manifest, save_checkpoint, stored_weights
from model.dit_config import architecture_of
from model.hf.dit import load_dit, save_dit
from model.hf.folder import CONFIG, read_json
from model.hf.shards import inside, new_folder
from train.config.diffusion import load_config
from train.config.entries import DiTRunConfig
from train.config.flags import write_toml
from train.resume import AVERAGED, IMPORTED, Progress


def is_dit(source: Path) -> bool:
    """Whether a folder's config.json describes a diffusion transformer. Raises UserError if it cannot be read."""
    return read_json(inside(source, CONFIG)).get("model_type") == "dit"


def import_dit(source: Path, run: Path) -> str:
    """Make a run of iteration 0 of a diffusion transformer, and say what it is; its weights are in memory at once.

    Raises UserError: ``run`` exists, or the folder is not a whole model; nothing is written then.
    """
    config, state = load_dit(source)
    with new_folder(run) as draft:
        (draft / "config.toml").write_text(write_toml(DiTRunConfig(model=config)), encoding="utf-8")
        extra = {"progress": asdict(Progress()), IMPORTED: str(source)}
        weights = {name: weight.to("meta") for name, weight in state.items()}
        save_checkpoint(
            draft, 0, weights, None, architecture=architecture_of(config), extra=extra, read=state.__getitem__
        )
    count = sum(weight.numel() for weight in state.values())
    return f"imported {source} into {run}: a diffusion transformer of {count:,} parameters"


def export_dit(run: Path, checkpoint: Path, manifest: Manifest, target: Path) -> str:
    """Write a run's averaged weights, or those as trained where there are no averages, and say what they are.

    Raises UserError: ``target`` exists, or the checkpoint is not of the model in the run's config.toml.
    """
    config = load_config(run / "config.toml").model
    section = "ema" if AVERAGED in manifest.extra else "model"
    weights, read = stored_weights(checkpoint, architecture_of(config), section)
    save_dit(target, config, {name: read(name) for name in weights})
    which = "averages of the weights" if section == "ema" else "weights as trained"
    return f"exported {checkpoint} to {target}: the {which} of a diffusion transformer"
