"""AdamW: Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from runtime.errors import UserError, require
from train.checkpoint.api import Conversion
from train.config.flags import ConfigError
from train.optimizers import apex
from train.optimizers.base import Group, OptimizerSpec, OwnSettings, StepPiece, Weight
from train.optimizers.bf16_moments import BFloat16
from train.optimizers.host import HostAdamW, offload_piece
from train.optimizers.moment_conversion import MomentConversion
from train.optimizers.moment_formats import MOMENTS, Float32, MomentDtype, MomentFormat
from train.optimizers.pieces import PiecewiseAdamW, rounding_piece
from train.optimizers.quantized_moments import Float8, Int8

Backend = Literal["torch", "apex"]
FORMATS: dict[str, type[MomentFormat]] = {
    "fp32": Float32,
    "bf16": BFloat16,
    "fp8": Float8,
    "int8": Int8,
}
"""Maps a value of --exp-avg-dtype to the moments' format."""


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
    exp_avg_dtype: MomentDtype = "fp32"
    """Dtype in which the first moment is stored between steps; weights and arithmetic are float32.
    bf16 rounds stochastically. fp8 and int8 have a scale for each block of up to 256 elements, and
    both moments have the same one of them. Muon's momentum is always float32."""
    exp_avg_sq_dtype: MomentDtype = "fp32"
    """Dtype in which the second moment is stored between steps, like --exp-avg-dtype."""

    def __post_init__(self) -> None:
        require(self, self.adam_eps > 0, "adam_eps", "it must be above 0")
        for name in ("adam_beta1", "adam_beta2"):
            require(self, 0 <= getattr(self, name) < 1, name, "it must be in [0, 1)")
        first, second = self.exp_avg_dtype, self.exp_avg_sq_dtype
        for name, dtype in (("exp_avg_dtype", first), ("exp_avg_sq_dtype", second)):
            require(self, dtype in FORMATS, name, f"it must be one of {', '.join(FORMATS)}")
        if first != second and (FORMATS[first].blocks or FORMATS[second].blocks):
            raise UserError(
                f"exp_avg_dtype is {first} and exp_avg_sq_dtype is {second}, but 8-bit moments are "
                f"both fp8 or both int8; give --exp-avg-dtype and --exp-avg-sq-dtype the same "
                "value, or fp32 and bf16 in any combination"
            )

    @property
    def moment_formats(self) -> tuple[MomentFormat, MomentFormat]:
        """New formats of both moments."""
        return FORMATS[self.exp_avg_dtype](), FORMATS[self.exp_avg_sq_dtype]()


class Adam(OptimizerSpec):
    """AdamW with torch's fused kernel, in pieces if moments need it, or with apex's kernel."""

    settings = AdamSettings
    free_settings = ("optimizer_backend", "exp_avg_dtype", "exp_avg_sq_dtype")
    leaner_fields = ("exp_avg_dtype", "exp_avg_sq_dtype")
    states = MOMENTS
    offloads = True

    def state_bytes(self, config: Any, weight: Weight | None = None) -> float:
        return sum(moment_format.bytes for moment_format in config.moment_formats)

    def step_piece(self, config: Any) -> StepPiece:
        if config.optimizer_cpu_offload:
            return offload_piece(config.moment_formats)
        return rounding_piece(config.moment_formats)

    def leaner_settings(self, config: Any) -> list[dict[str, Any]]:
        dtypes = {config.exp_avg_dtype, config.exp_avg_sq_dtype}
        if config.optimizer_backend == "apex" or dtypes != {"fp32"}:
            return []
        return [dict.fromkeys(self.leaner_fields, dtype) for dtype in ("bf16", "int8")]

    def states_title(self, config: Any) -> str:
        dtypes = list(dict.fromkeys((config.exp_avg_dtype, config.exp_avg_sq_dtype)))
        if dtypes == ["fp32"]:
            return ""
        return f"moments in {' and '.join(dtypes)}"

    def build(
        self,
        config: Any,
        groups: list[Group],
        *,
        portable: bool,
        ranks: dist.ProcessGroup | None = None,
    ) -> torch.optim.Optimizer:
        betas = (config.adam_beta1, config.adam_beta2)
        settings = {"lr": config.lr, "betas": betas, "eps": config.adam_eps, "fused": True}
        if config.optimizer_cpu_offload:
            return HostAdamW(groups, config.moment_formats, **settings)
        if (config.exp_avg_dtype, config.exp_avg_sq_dtype) != ("fp32", "fp32"):
            return PiecewiseAdamW(groups, config.moment_formats, **settings)
        step: type[torch.optim.AdamW] = torch.optim.AdamW
        if config.optimizer_backend == "apex" and not portable:
            step = apex.ApexAdamW
        return step(groups, **settings)

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
        for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
            dtype = getattr(config, name)
            if dtype != "fp32":
                raise ConfigError(
                    f"optimizer_backend is apex, but {name} is {dtype}, and only torch's kernel "
                    "supports moments in another dtype than fp32; leave out --optimizer-backend or "
                    f"--{name.replace('_', '-')}"
                )
        if device_type == "cpu" and not apex.EMULATED:
            raise ConfigError(
                "optimizer_backend is apex, but device is cpu, and apex's kernel needs a GPU; "
                "leave out --optimizer-backend, or use --device cuda"
            )

    def conversion(self, config: Any) -> Conversion | None:
        formats = [moment_format() for moment_format in FORMATS.values()]
        run = {name: getattr(config, f"{name}_dtype") for name in MOMENTS}
        return MomentConversion(formats, run)

    def require_available(self, config: Any) -> None:
        if config.optimizer_backend == "apex":
            apex.apex_kernel()
