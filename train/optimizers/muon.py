"""Muon: the momentum of each matrix is orthogonalized before it is added (Jordan et al. 2024).

For the matrices of the layers, with gradient G, momentum M, rate lr and decay w:

    M <- M + (1 - momentum) (G - M)
    U <- G + momentum (M - G) with Nesterov's momentum, else M
    W <- W - lr w W - lr scale NewtonSchulz(U)

The other weights take AdamW. Newton-Schulz needs whole matrices: ``parallel.matrices`` gathers each
on one rank. Its five steps of a quintic polynomial map singular values above 0.0015 of the matrix's
norm to between 0.68 and 1.21. Smaller ones grow at most 485 times: 0.001 becomes 0.47.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from model.parts.lora import is_adapter
from parallel.data import to_local
from parallel.matrices import WholeMatrices
from runtime.errors import UserError, require
from train.config.flags import ConfigError
from train.optimizers.adamw import Adam, AdamSettings
from train.optimizers.base import Group, MatrixCost, Weight

ScaleMode = Literal["spectral", "shape_scaling", "unit_rms_norm"]
MatmulPrecision = Literal["high", "low"]
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x^3 and x^5, chosen for a steep slope at 0 (Jordan et al. 2024)."""
MIN_NORM = 1e-7
MAX_STEPS = 99
MATRICES = "matrices"
"""Key of a parameter group that is true if its matrices are orthogonalized."""
MOMENTUM = "momentum_buffer"
FLOAT32_BYTES = 4.0


@dataclass(frozen=True, kw_only=True)
class MuonSettings(AdamSettings):
    """The settings that only Muon has, and AdamW's, for the weights that are not orthogonalized."""

    muon_momentum: float = 0.95
    """Decay of Muon's momentum, the average of gradients."""
    muon_use_nesterov: bool = True
    """Use Nesterov's momentum in Muon: orthogonalize the average that the gradient would have if it
    came once more."""
    muon_num_ns_steps: int = 5
    """Number of Newton-Schulz steps that orthogonalize Muon's momentum."""
    muon_scale_mode: ScaleMode = "spectral"
    """Factor of an orthogonalized matrix: spectral is sqrt(max(rows, columns)), shape_scaling
    sqrt(max(1, rows / columns)), unit_rms_norm sqrt(rows / columns)."""
    muon_extra_scale_factor: float = 0.2
    """Further factor of Muon's updates. With 0.2 and the scale mode spectral, learning rates of
    AdamW carry over (Liu et al. 2025); with shape_scaling, 1 is usual."""
    muon_fp32_matmul_prec: MatmulPrecision = "high"
    """Precision of Newton-Schulz. high is float32; low is bfloat16, as in torch.optim.Muon: much
    faster on a GPU, and half of the bytes to send."""
    muon_lora: bool = False
    """Let Muon train the matrices of LoRA adapters too, instead of AdamW."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, 0 <= self.muon_momentum < 1, "muon_momentum", "it must be in [0, 1)")
        steps = self.muon_num_ns_steps
        must = f"it must be from 1 to {MAX_STEPS}"
        require(self, 1 <= steps <= MAX_STEPS, "muon_num_ns_steps", must)
        for name, choices in (
            ("muon_scale_mode", get_args(ScaleMode)),
            ("muon_fp32_matmul_prec", get_args(MatmulPrecision)),
        ):
            value = getattr(self, name)
            require(self, value in choices, name, f"it must be one of {', '.join(choices)}")
        factor = self.muon_extra_scale_factor
        require(self, factor > 0, "muon_extra_scale_factor", "it must be above 0")


class Muon(torch.optim.Optimizer):
    """Muon for groups of matrices; AdamW, an optimizer given, for all other groups.

    Matrices have one state, the momentum, which is float32; the others have those of AdamW.
    """

    def __init__(
        self,
        groups: list[Group],
        *,
        others: torch.optim.Optimizer,
        settings: MuonSettings,
        lr: float,
        ranks: dist.ProcessGroup | None = None,
    ) -> None:
        """Set up.

        Args:
            groups: those of matrices, whose ``MATRICES`` is true, and those of ``others``.
            others: AdamW of the other groups, whose state becomes a part of this optimizer's.
            ranks: those that hold slices of the same matrices.
        """
        super().__init__(groups, {"lr": lr, MATRICES: False})
        self._others = others
        self._settings = settings
        self._plans: list[WholeMatrices] = []
        for group in self.param_groups:
            if group[MATRICES]:
                dtype = torch.float32
                if group["params"]:
                    dtype = group["params"][0].dtype
                dtype = matmul_dtype(settings, dtype)
                self._plans.append(WholeMatrices(group["params"], ranks, dtype=dtype))

    @property
    def sent_bytes(self) -> int:
        """Number of bytes that this rank sends in a step."""
        return sum(plan.sent_bytes for plan in self._plans)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; collective.

        With a rate of 0 nothing is sent, and only the state changes: a rank can then step alone.

        Raises:
            RuntimeError: some matrices have a gradient, and others have none.
        """
        plans = iter(self._plans)
        others = []
        for group in self.param_groups:
            if group[MATRICES]:
                self._step_matrices(group, next(plans))
            else:
                others.append(group)
        self._others.param_groups = others
        self._others.state = self.state
        self._others.step()

    def _step_matrices(self, group: Group, plan: WholeMatrices) -> None:
        settings = self._settings
        parameters = group["params"]
        missing = [p.grad is None for p in parameters]
        if all(missing):
            return
        if any(missing):
            raise RuntimeError(f"{sum(missing)} of {len(missing)} matrices have no gradient")

        weights = [to_local(p) for p in parameters]
        gradients = [to_local(p.grad) for p in parameters]
        averages = []
        for p, gradient in zip(parameters, gradients, strict=True):
            if not self.state[p]:
                self.state[p] = {MOMENTUM: torch.zeros_like(p)}
            averages.append(to_local(self.state[p][MOMENTUM]))
            averages[-1].lerp_(gradient, 1 - settings.muon_momentum)
        lr = group["lr"]
        if lr == 0:
            return
        for weight in weights:
            weight.mul_(1 - lr * group["weight_decay"])

        def read(number: int, rows: slice) -> Tensor:
            update = averages[number][rows]
            if settings.muon_use_nesterov:
                update = gradients[number][rows].lerp(update, settings.muon_momentum)
            return update.bfloat16() if settings.muon_fp32_matmul_prec == "low" else update

        def write(number: int, rows: slice, update: Tensor) -> None:
            scale = update_scale(settings, parameters[number].shape)
            weights[number][rows].add_(update, alpha=-lr * scale)

        def compute(_: int, matrix: Tensor) -> Tensor:
            return orthogonalize(matrix, settings.muon_num_ns_steps)

        plan.apply(read, compute, write)


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """Return a matrix with the same singular vectors and singular values near 1.

    Newton-Schulz in the matrix's dtype, on the smaller of the two Gram matrices. The operators are
    those of ``torch.optim.Muon``, so results are equal to the bit.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=MIN_NORM)  # singular values of at most 1
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x


def matmul_dtype(settings: MuonSettings, weight_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of Newton-Schulz, and of what ranks send each other."""
    return torch.bfloat16 if settings.muon_fp32_matmul_prec == "low" else weight_dtype


def update_scale(settings: MuonSettings, shape: torch.Size) -> float:
    """Return the factor of an orthogonalized matrix of this (whole) shape."""
    rows, columns = shape
    scale = {
        "spectral": math.sqrt(max(rows, columns)),
        "shape_scaling": math.sqrt(max(1, rows / columns)),
        "unit_rms_norm": math.sqrt(rows / columns),
    }
    return settings.muon_extra_scale_factor * scale[settings.muon_scale_mode]


class MuonSpec(Adam):
    """Muon for the matrices of the layers, AdamW for all other weights."""

    settings = MuonSettings
    matrix_states = (MOMENTUM,)
    whole_matrices = True
    offloads = False

    def takes_whole(self, config: Any, weight: Weight) -> bool:
        if weight.parameter.ndim != 2:
            return False
        return weight.is_hidden_matrix or (config.muon_lora and is_adapter(weight.name))

    def state_bytes(self, config: Any, weight: Weight | None = None) -> float:
        num_bytes = super().state_bytes(config)
        if weight is None:
            return max(FLOAT32_BYTES, num_bytes)
        return FLOAT32_BYTES if self.takes_whole(config, weight) else num_bytes

    def matrix_cost(self, config: Any, shape: tuple[int, int]) -> MatrixCost:
        """Return the cost of ``orthogonalize``."""
        short, long = sorted(shape)
        dtype = matmul_dtype(config, torch.float32)
        # A step has two products of [short, long] with [short, short], and one of [short, short].
        flops = config.muon_num_ns_steps * (4 * short**2 * long + 2 * short**3)
        # The iterate before and after a step, the Gram matrix and its polynomial.
        elements = 2 * short * long + 2 * short**2
        return MatrixCost(shape, flops, dtype, elements * dtype.itemsize)

    def groups(self, config: Any, weights: list[Weight]) -> list[Group]:  # type: ignore[override]
        """Return the groups of the matrices, and of the other weights as with AdamW."""
        matrices = [weight for weight in weights if self.takes_whole(config, weight)]
        others = [weight for weight in weights if not self.takes_whole(config, weight)]
        if not matrices and any(is_adapter(weight.name) for weight in weights):
            raise UserError(
                "optimizer is muon, but only adapters are trained, and AdamW would train all of "
                "them; give --muon-lora, or --optimizer adam"
            )
        group = {
            "params": [weight.parameter for weight in matrices],
            "weight_decay": config.weight_decay,
            MATRICES: True,
        }
        return [group, *super().groups(config, others)]

    def build(
        self,
        config: Any,
        groups: list[Group],
        *,
        portable: bool,
        ranks: dist.ProcessGroup | None = None,
    ) -> torch.optim.Optimizer:
        others = [group for group in groups if MATRICES not in group]
        adamw = super().build(config, others, portable=True)
        return Muon(groups, others=adamw, settings=config, lr=config.lr, ranks=ranks)

    def check(self, config: Any, device_type: str) -> None:
        if config.optimizer_backend != "torch":
            raise ConfigError(
                f"optimizer_backend is {config.optimizer_backend}, but optimizer is muon, which "
                "steps by torch's kernels; leave out --optimizer-backend"
            )
        super().check(config, device_type)
