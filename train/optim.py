"""The optimizer: AdamW, its learning rate, clipped gradients, and averages of the weights."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel.data import Runner, finish_gradients, reshard, to_local, untracked_replicas
from runtime.errors import UserError, at_least, require
from train.adamw import ApexAdamW, Backend, HostAdamW

DecayStyle = Literal["cosine", "linear", "constant", "inverse-square-root", "WSD"]
WsdDecayStyle = Literal["linear", "cosine", "exponential", "minus_sqrt"]
NORM_CHUNK = 1 << 18
"""Elements that the gradient's norm copies to float64 at once on a CPU: 2 MB, which its cache holds."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its schedule."""

    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    lr_decay_style: DecayStyle = "cosine"
    """Shape after the warm-up: cosine or linear to min_lr, constant, inverse-square-root, or WSD, which is
    warm-up-stable-decay."""
    lr_warmup_iters: int = 0
    """Iterations of linear warm-up; a run too short for them takes a tenth of its own."""
    lr_warmup_fraction: float | None = None
    """Share of lr_decay_iters that is warm-up, in [0, 1), in place of lr_warmup_iters."""
    lr_warmup_init: float = 0.0
    """Learning rate from which the warm-up rises."""
    lr_decay_iters: int | None = None
    """Iteration at which the decay ends; by default train_iters, and in a run that goes on what it was there."""
    lr_wsd_decay_iters: int | None = None
    """Length of the final decay of WSD; by default a tenth of lr_decay_iters."""
    lr_wsd_decay_style: WsdDecayStyle = "linear"
    """Shape of that decay."""
    override_opt_param_scheduler: bool = False
    """Going on from a checkpoint, take this configuration's schedule, even where train_iters alone is another."""
    use_checkpoint_opt_param_scheduler: bool = False
    """Going on from a checkpoint, take its schedule, whatever this configuration says."""
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
    optimizer_backend: Backend = "torch"
    """Kernel of a step: torch's fused AdamW, or that of NVIDIA's apex, whose CUDA extensions must be built. Checkpoints
    are the same, and either goes on from the other's."""
    optimizer_cpu_offload: bool = False
    """Keep Adam's moments, 8 bytes per parameter, in host memory. A step brings them to the device and back a piece at
    a time, which takes time and changes no bit (docs/concepts/memory.md)."""

    def __post_init__(self) -> None:
        for name in ("lr", "adam_eps"):
            require(self, getattr(self, name) > 0, name, "it must be above 0")
        at_least(self, 0, "min_lr", "weight_decay", "clip_grad", "lr_warmup_iters", "lr_warmup_init")
        for name in ("min_lr", "lr_warmup_init"):
            require(self, getattr(self, name) <= self.lr, name, f"it must not exceed lr, which is {self.lr}")
        for name in ("adam_beta1", "adam_beta2"):
            require(self, 0 <= getattr(self, name) < 1, name, "it must be in [0, 1)")
        at_least(self, 1, "lr_decay_iters", "lr_wsd_decay_iters")
        for name, styles in (("lr_decay_style", DecayStyle), ("lr_wsd_decay_style", WsdDecayStyle)):
            known = get_args(styles)
            require(self, getattr(self, name) in known, name, f"it must be one of {', '.join(known)}")
        fraction = self.lr_warmup_fraction
        if fraction is not None:
            require(self, 0 <= fraction < 1, "lr_warmup_fraction", "it must be in [0, 1)")
            without = "give --lr-warmup-iters 0 with it, or --lr-warmup-fraction none"
            require(self, not self.lr_warmup_iters, "lr_warmup_iters", f"and lr_warmup_fraction {fraction}; {without}")
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            raise UserError(
                "override_opt_param_scheduler and use_checkpoint_opt_param_scheduler are set; the one takes this "
                "configuration's schedule, the other the checkpoint's: leave one out"
            )


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The settings of a learning-rate schedule without defaults that depend on train_iters; OptimizerConfig's names.

    The formulas are those of ``megatron.core.optimizer_param_scheduler``, which counts completed iterations: its rate
    in iteration n + 1 is the one here in iteration n, so that a warm-up's first iteration learns.
    """

    lr: float
    min_lr: float
    lr_decay_style: str
    lr_warmup_iters: int
    lr_warmup_init: float
    lr_decay_iters: int | None
    """None if the style has no end."""
    lr_wsd_decay_iters: int | None
    """None if the style is not WSD."""
    lr_wsd_decay_style: str

    def rate(self, iteration: int) -> float:
        """Return the learning rate of ``iteration``; the first is 1."""
        warmup, style, end = self.lr_warmup_iters, self.lr_decay_style, self.lr_decay_iters
        if iteration <= warmup:
            return self.lr_warmup_init + (self.lr - self.lr_warmup_init) * iteration / warmup
        if style == "constant":
            return self.lr
        if end is not None and iteration > end:
            return self.min_lr
        if style == "inverse-square-root":
            return max(self.min_lr, self.lr * math.sqrt(max(warmup, 1) / iteration))
        return self.min_lr + (self.lr - self.min_lr) * self._share(iteration)

    def _share(self, iteration: int) -> float:
        """Return the share of the way from min_lr to lr that is left; 1 where the decay begins, 0 where it ends."""
        assert self.lr_decay_iters is not None
        style, begin = self.lr_decay_style, self.lr_warmup_iters
        if style == "WSD":
            assert self.lr_wsd_decay_iters is not None
            style, begin = self.lr_wsd_decay_style, self.lr_decay_iters - self.lr_wsd_decay_iters
        decay = self.lr_decay_iters - begin
        progress = max(0.0, (iteration - begin) / decay)
        if style == "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
        if style == "exponential":
            return 2 * 0.5**progress - 1
        if style == "minus_sqrt":
            return 1 - math.sqrt(progress)
        return min(1.0, (decay - (iteration - begin)) / decay)

    def taken_by(self, config: OptimizerConfig) -> OptimizerConfig:
        """Return ``config`` with this schedule."""
        return replace(config, **asdict(self), lr_warmup_fraction=None)


def schedule_of(config: OptimizerConfig, train_iters: int) -> Schedule:
    """Return the schedule of a run of ``train_iters`` iterations.

    If lr_decay_iters is not set, a run too short for its warm-up takes a tenth of its iterations instead, and caps
    lr_wsd_decay_iters at the rest: a shorter run needs no other configuration. The default of lr_wsd_decay_iters never
    reaches into the warm-up.
    """
    end = config.lr_decay_iters or train_iters
    warmup = config.lr_warmup_iters
    if config.lr_warmup_fraction is not None:
        warmup = min(round(config.lr_warmup_fraction * end), end - 1)
    decay = config.lr_wsd_decay_iters or max(1, end // 10)
    if config.lr_decay_iters is None:
        warmup = warmup if warmup < end else min(max(1, end // 10), end - 1)
    if config.lr_decay_iters is None or config.lr_wsd_decay_iters is None:
        decay = max(1, min(decay, end - warmup))
    wsd = config.lr_decay_style == "WSD"
    endless = config.lr_decay_style == "inverse-square-root" and config.lr_decay_iters is None
    return Schedule(
        lr=config.lr,
        min_lr=config.min_lr,
        lr_decay_style=config.lr_decay_style,
        lr_warmup_iters=warmup,
        lr_warmup_init=config.lr_warmup_init,
        lr_decay_iters=None if endless or config.lr_decay_style == "constant" else end,
        lr_wsd_decay_iters=decay if wsd else None,
        lr_wsd_decay_style=config.lr_wsd_decay_style if wsd else "linear",
    )


def build_optimizer(config: OptimizerConfig, *parts: nn.Module) -> torch.optim.AdamW:
    """Build a fused AdamW; only matrices decay, since shrinking a norm's weight or a bias regularises nothing."""
    parameters = [p for part in parts for p in part.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    kind = HostAdamW if config.optimizer_cpu_offload else torch.optim.AdamW
    if config.optimizer_backend == "apex":
        kind = ApexAdamW
    betas = (config.adam_beta1, config.adam_beta2)
    return kind(groups, lr=config.lr, betas=betas, eps=config.adam_eps, fused=True)


def gradient_norm(
    parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None = None, *, copies: int = 1
) -> Tensor:
    """Return the 2-norm of the whole gradient, sharded over ``group`` (default: all ranks), float64; collective.

    A shard that several ranks hold, because a DTensor is replicated over a mesh dimension, counts once.
    Summed in float64: in float32 a large tensor is off by 1e-5, by an amount that depends on the shards' sizes.

    Args:
        copies: ranks that hold each shard, besides those its mesh shows (``parallel.data.untracked_replicas``).
    """
    from torch.distributed.tensor import DTensor

    alike: dict[Any, list[Tensor]] = defaultdict(list)  # one launch for all of them
    for gradient in (p.grad for p in parameters if p.grad is not None):
        own, held = to_local(gradient), 1
        if isinstance(gradient, DTensor):
            sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
            held = math.prod(size for size, placement in sizes if placement.is_replicate())
        alike[own.device, own.dtype, held].append(own)
    squares = torch.stack([_square(own) / held for (*_, held), own in alike.items()]).sum() / copies
    dist.all_reduce(squares, group=group)
    return squares.sqrt()


def _square(tensors: Sequence[Tensor]) -> Tensor:
    """Return the squared norm, float64 [], of tensors of one device and dtype, without a copy of a tensor's size.

    CUDA's ``_foreach_norm`` adds up squares in the dtype asked for while it reads (aten's ForeachReduceOp.cu), in one
    launch. The CPU's is ``vector_norm`` of each tensor: it copies to float64 first, hence the small parts, and its sums
    in float32 are no way out: one running sum in each lane of a vector, off by 1 % at 1e8 elements.
    """
    if tensors[0].device.type == "cpu":
        tensors = [part for x in tensors for part in x.flatten().split(NORM_CHUNK)]
    filled = [x for x in tensors if x.numel()]
    if not filled:  # this rank's parts of small parameters
        return tensors[0].new_zeros((), dtype=torch.float64)
    return torch.stack(torch._foreach_norm(filled, 2, torch.float64)).square().sum()


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], norm: float, largest: float) -> None:
    """Scale the gradients, of 2-norm ``norm``, to a norm of at most ``largest``; 0 does not clip."""
    if 0 < largest < norm < math.inf:
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], largest / norm)


def reduce_and_clip(runner: Runner, replicas: DeviceMesh, largest: float, loss: Tensor) -> tuple[float, float]:
    """Reduce the gradients that the micro-batches left and clip them; return the loss, and their norm before.

    Collective. Both numbers come in one read, the step's only wait for the device.

    Raises:
        RuntimeError: part of the model has no gradient.
    """
    parameters, strategy = runner.parameters(), runner.strategy
    missing = [name for name, p in parameters.items() if p.requires_grad and p.grad is None]
    if missing:
        raise RuntimeError(f"no gradient reached {', '.join(missing)}: part of the model is not trained")
    for part in runner.parts:
        finish_gradients(part, replicas, strategy)
    size = gradient_norm(parameters.values(), copies=untracked_replicas(replicas, strategy))
    found, norm = torch.stack((loss.double(), size)).tolist()
    clip_gradients([p for part in runner.parts for p in part.parameters()], norm, largest)
    return found, norm


@dataclass(frozen=True, kw_only=True)
class EmaConfig:
    """Averages of the weights over the iterations."""

    ema_decay: float | None = None
    """Share of the average that an iteration keeps, such as 0.9999; validation and samples take the averages. 0 or
    none keeps none."""

    def __post_init__(self) -> None:
        decay = self.ema_decay
        require(self, decay is None or 0 <= decay < 1, "ema_decay", "it must be 0 or more and below 1, such as 0.9999")


class Ema:
    """Averages of this rank's shards in float32; ranks do not communicate."""

    def __init__(self, decay: float, parts: Sequence[nn.Module]) -> None:
        """Start from the weights of ``parts``, this rank's initialised parts of the model."""
        self.decay, self._parts = decay, parts
        self._copies: dict[str, list[nn.Parameter]] = {}
        for part in parts:
            for name, parameter in part.named_parameters():
                self._copies.setdefault(name, []).append(parameter)
        self.weights: dict[str, Tensor] = {name: copies[0].detach().clone() for name, copies in self._copies.items()}
        """The averages by parameter name, sharded like the weights."""

    @torch.no_grad()
    def restart(self) -> None:
        """Reset the averages to the current weights."""
        for name, copies in self._copies.items():
            to_local(self.weights[name]).copy_(to_local(copies[0]))

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages by ``1 - decay`` of the way to the weights."""
        weights = [to_local(copies[0]) for copies in self._copies.values()]
        torch._foreach_lerp_([to_local(average) for average in self.weights.values()], weights, 1 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap the averages in for the weights inside the block; restore the exact weights after it."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for part in self._parts:
            reshard(part)  # weights still gathered after a forward would not be gathered again
        for name, copies in self._copies.items():
            average, kept = to_local(self.weights[name]), to_local(copies[0]).clone()
            for parameter in copies:
                to_local(parameter).copy_(average)
            average.copy_(kept)
