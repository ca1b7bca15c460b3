"""LoRA: trained adapters of low rank on frozen linear layers (Hu et al. 2021, arXiv:2106.09685).

A linear layer W [out, in] adds (alpha / r) B A x to its output (equation 3). A [r, in] and
B [out, r] are linear layers inside it, named lora_A and lora_B as in PEFT.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from model.parts.weights import Inits, input_uniform
from runtime.errors import UserError, require

THEIRS = {
    "q_proj": "wq",
    "k_proj": "wk",
    "v_proj": "wv",
    "o_proj": "wo",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}
"""Longmesh's names of a LLaMA's linear layers, keyed by PEFT's names."""
ADAPTERS = (".lora_A.weight", ".lora_B.weight")

C = TypeVar("C", bound="LoraConfig")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Adapters of low rank, trained instead of the weights."""

    lora_rank: int | None = None
    """Train only adapters of this rank (LoRA); the weights of --load are frozen. By default the
    weights are trained."""
    lora_alpha: float | None = None
    """Multiply the adapters' output by lora_alpha / lora_rank; by default by 1."""
    lora_target: tuple[str, ...] = ()
    """Linear layers that get an adapter, by default all: wq wk wv wo of attention (also wu, its
    output gate; wa and wb, a delta rule's gates and betas), and gate up down of the feed-forward;
    or PEFT's names of a LLaMA's linear layers, such as q_proj."""

    def adapted(self, linears: Sequence[str], width: int) -> tuple[str, ...]:
        """Return Longmesh's names of a layer's linear modules that get an adapter.

        Args:
            linears: Longmesh's names of all linear modules that may get an adapter.
            width: width of the residual stream, the largest useful rank.

        Raises:
            UserError: a target is not among ``linears``, or settings contradict each other.
        """
        rank = self.lora_rank
        alpha = self.lora_alpha
        if rank is None:
            targets = " ".join(self.lora_target) or None
            for name, value in (("lora_alpha", alpha), ("lora_target", targets)):
                if value is not None:
                    raise UserError(
                        f"{name} is {value}, but lora_rank is not set; "
                        f"give --lora-rank, or leave {name} out"
                    )
            return ()

        rank_fits = 1 <= rank <= width
        require(
            self, rank_fits, "lora_rank", f"it must be from 1 to hidden_size {width}, such as 16"
        )
        alpha_fits = alpha is None or 0 < alpha < math.inf
        require(self, alpha_fits, "lora_alpha", "it must be a number above 0, or left out")

        chosen = [THEIRS.get(target, target) for target in self.lora_target]
        for name, target in zip(chosen, self.lora_target, strict=True):
            if name not in linears:
                raise UserError(
                    f"lora_target has {target}, but this model's layers have no such linear layer; "
                    f"choose from {' '.join(linears)}"
                )
        return tuple(name for name in linears if name in chosen or not chosen)

    @property
    def lora_scale(self) -> float:
        """Factor alpha / r by which B A x is multiplied."""
        return 1.0 if self.lora_alpha is None else self.lora_alpha / (self.lora_rank or 1)

    def merged(self: C) -> C:
        """Return the configuration of the model after its adapters are merged into the weights."""
        return replace(self, lora_rank=None, lora_alpha=None, lora_target=())


class AdapterA(nn.Linear):
    """The adapter's first matrix [r, in], initialized as in PEFT."""

    INIT: ClassVar[Inits] = {"weight": input_uniform}


class AdapterB(nn.Linear):
    """The adapter's second matrix [out, r], initially 0, so training starts at the base model."""

    INIT: ClassVar[Inits] = {"weight": "zeros"}


def add_adapters(model: nn.Module, targets: Sequence[str], rank: int, scale: float) -> None:
    """Freeze the model and add an adapter to every linear layer in ``targets``, in place."""
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if name.rpartition(".")[2] in targets and isinstance(module, nn.Linear):
            module.lora_A = AdapterA(module.in_features, rank, bias=False)
            module.lora_B = AdapterB(rank, module.out_features, bias=False)
            # A hook instead of another forward method: tensor parallelism replaces the forwards of
            # all three layers.
            module.register_forward_hook(partial(_adapt, scale))


def _adapt(scale: float, module: Any, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
    """Add the adapter's output to ``out`` [..., out], in place.

    In place, since a copy would double the memory, and no backward pass needs the linear layer's
    output.
    """
    hidden: Tensor = module.lora_A(inputs[0])  # [..., r]
    return out.add_(module.lora_B(scale * hidden))


def is_adapter(name: str) -> bool:
    """Return True if the parameter with this name belongs to an adapter."""
    return name.endswith(ADAPTERS)


def merge(
    weights: Mapping[str, Tensor], read: Callable[[str], Tensor], scale: float
) -> tuple[dict[str, Tensor], Callable[[str], Tensor]]:
    """Return the base weights, and a function that reads a weight with its adapter merged in.

    A weight with an adapter is read as W + (alpha / r) B A, in float32, whatever its stored dtype.

    Args:
        weights: tensors keyed by name; meta tensors suffice.
        read: function that returns a tensor by name.
        scale: alpha / r.
    """

    def read_merged(name: str) -> Tensor:
        linear = name.removesuffix(".weight")
        name_a, name_b = (linear + suffix for suffix in ADAPTERS)
        if name_a not in weights:
            return read(name)
        a = read(name_a).float()  # [r, in]
        b = read(name_b).float()  # [out, r]
        return torch.addmm(read(name).float(), b, a, alpha=scale)

    base = {name: weight for name, weight in weights.items() if not is_adapter(name)}
    return base, read_merged
