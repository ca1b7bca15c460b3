"""What a run reports: metrics.jsonl, progress lines, the loss curve, wandb and TensorBoard."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Where the numbers of a run go, besides metrics.jsonl."""

    log_interval: int = 10
    """Iterations between progress lines."""
    tensorboard_dir: str | None = None
    """Folder of TensorBoard events."""
    wandb_project: str | None = None
    """Weights & Biases project; WANDB_MODE=offline needs no account, the key comes from WANDB_API_KEY alone."""
    wandb_exp_name: str | None = None
    """Name of the run in that project."""
