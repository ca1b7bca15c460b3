"""AdamW: Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from runtime.errors import require
from train.config.flags import ConfigError
from train.optimizers import apex
from train.optimizers.base import Group, OptimizerSpec, OwnSettings
from train.optimizers.host import MOMENTS, HostAdamW

Backend = Literal["torch", "apex"]


@dataclass(frozen=True, kw_only=True)
class AdamSettings(OwnSettings):
    """The settings that only AdamW has."""

    adam_beta1: float = 0.9
    """Decay of the first moment, the average of gradients."""
    adam_beta2: float = 0.95
    """Decay of the second moment, the average of squared gradients."""
    adam_eps: float = 1e-8
    """Adam's epsilon, added to the square root of the second moment."""
    optimizer_backend: Backend = "torch"
    """Kernel that computes a step: torch's fused AdamW, or that of NVIDIA's apex, which must be
    built with its CUDA extensions. Both write the same checkpoints, so a run can resume with
    either."""

    def __post_init__(self) -> None:
        require(self, self.adam_eps > 0, "adam_eps", "it must be above 0")
        for name in ("adam_beta1", "adam_beta2"):
            require(self, 0 <= getattr(self, name) < 1, name, "it must be in [0, 1)")


class Adam(OptimizerSpec):
    """AdamW with torch's fused kernel, for moments in host memory too, or with apex's kernel."""

    settings = AdamSettings
    free_settings = ("optimizer_backend",)
    states = MOMENTS
    offloads = True

    def build(
        self,
        config: Any,
        groups: list[Group],
        *,
        portable: bool,
        ranks: dist.ProcessGroup | None = None,
    ) -> torch.optim.Optimizer:
        step: type[torch.optim.AdamW] = torch.optim.AdamW
        if config.optimizer_cpu_offload:
            step = HostAdamW
        if config.optimizer_backend == "apex" and not portable:
            step = apex.ApexAdamW
        betas = (config.adam_beta1, config.adam_beta2)
        return step(groups, lr=config.lr, betas=betas, eps=config.adam_eps, fused=True)

    def check(self, config: Any, device_type: str) -> None:
        super().check(config, device_type)
        if config.optimizer_backend != "apex":
            return
        if config.optimizer_cpu_offload:
            raise ConfigError(
                "optimizer_backend is apex, but optimizer_cpu_offload is set, and only torch's "
                "kernel supports moments in host memory; leave out --optimizer-backend or "
                "--optimizer-cpu-offload"
            )
        if device_type == "cpu" and not apex.EMULATED:
            raise ConfigError(
                "optimizer_backend is apex, but device is cpu, and apex's kernel needs a GPU; "
                "leave out --optimizer-backend, or use --device cuda"
            )

    def require_available(self, config: Any) -> None:
        if config.optimizer_backend == "apex":
            apex.apex_kernel()
