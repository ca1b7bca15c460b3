"""Atomic, verified, reshardable checkpoints."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where a run is kept and where it starts from."""

    save: str | None = None
    """Folder of the run: config.toml, metrics.jsonl, loss.png and checkpoints."""
    save_interval: int | None = None
    """Iterations between checkpoints; one is written at the end in any case."""
    load: str | None = None
    """Folder to resume from: its newest whole checkpoint."""
    ckpt_step: int | None = None
    """Load exactly this iteration from --load, and fail if it is broken."""
    exit_on_missing_checkpoint: bool = False
    """Fail where --load holds no checkpoint, rather than start afresh."""
