"""Optimizer, learning-rate schedule and gradient clipping."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its schedule."""

    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    lr_decay_style: Literal["cosine", "WSD", "constant"] = "cosine"
    """Shape after the warm-up: cosine to min_lr, warm-up-stable-decay, or constant."""
    lr_warmup_iters: int = 0
    """Iterations of linear warm-up."""
    lr_decay_iters: int | None = None
    """Iteration at which the decay ends; by default train_iters."""
    lr_wsd_decay_iters: int | None = None
    """Length of the final decay of WSD; by default a tenth of lr_decay_iters."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; norms and biases get none."""
    adam_beta1: float = 0.9
    """First moment's decay."""
    adam_beta2: float = 0.95
    """Second moment's decay."""
    adam_eps: float = 1e-8
    """Epsilon of Adam."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 does not clip."""
