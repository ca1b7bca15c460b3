"""LoRA: adapters of low rank beside frozen linear layers (Hu et al. 2021, arXiv:2106.09685,
equation 3).

A linear layer W [out, in] adds (alpha / r) B A x to its output. A [r, in] and B [out, r] are linear
layers inside of it, lora_A and lora_B as PEFT names them.
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
"""PEFT's names of a LLaMA's linear layers, and ours."""
ADAPTERS = (".lora_A.weight", ".lora_B.weight")

C = TypeVar("C", bound="LoraConfig")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Adapters of low rank, trained in the place of the weights."""

    lora_rank: int | None = None
    """Train adapters of this rank alone (LoRA), beside the weights of --load, which stay as they
    are; by default the weights are trained."""
    lora_alpha: float | None = None
    """Adapters count lora_alpha / lora_rank times; by default once."""
    lora_target: tuple[str, ...] = ()
    """Linear layers that get an adapter: wq wk wv wo of attention (and wu, a gate of its output; wa
    and wb, a delta rule's gates and betas) and gate up down of the feed-forward, or PEFT's names of
    a LLaMA's, such as q_proj; by default all of them."""

    def adapted(self, linears: Sequence[str], width: int) -> tuple[str, ...]:
        """Return which of a layer's ``linears`` get an adapter, by our names; ``width`` is the
        residual stream's.

        Raises:
            UserError: a target that is none of them, or settings without sense.
        """
        rank, alpha = self.lora_rank, self.lora_alpha
        if rank is None:
            for name, value in (
                ("lora_alpha", alpha),
                ("lora_target", " ".join(self.lora_target) or None),
            ):
                if value is not None:
                    only = f"give --lora-rank, or leave {name} out"
                    raise UserError(f"{name} is {value} and lora_rank is not set; {only}")
            return ()
        require(
            self,
            1 <= rank <= width,
            "lora_rank",
            f"it must be from 1 to hidden_size {width}, such as 16",
        )
        require(
            self,
            alpha is None or 0 < alpha < math.inf,
            "lora_alpha",
            "it must be a number above 0, or left out",
        )
        chosen = {THEIRS.get(name, name): name for name in self.lora_target}
        if strange := [name for ours, name in chosen.items() if ours not in linears]:
            raise UserError(
                f"lora_target has {strange[0]}, and a layer of this model has {' '.join(linears)}"
            )
        return tuple(name for name in linears if name in chosen or not chosen)

    @property
    def lora_scale(self) -> float:
        """Return what B A x is multiplied with."""
        return 1.0 if self.lora_alpha is None else self.lora_alpha / (self.lora_rank or 1)

    def merged(self: C) -> C:
        """Return the configuration of the model whose weights have the adapters in them."""
        return replace(self, lora_rank=None, lora_alpha=None, lora_target=())


class AdapterA(nn.Linear):
    """The adapter's first matrix [r, in], which begins as PEFT draws it."""

    INIT: ClassVar[Inits] = {"weight": input_uniform}


class AdapterB(nn.Linear):
    """The adapter's second matrix [out, r], which begins at 0, so that the model begins as it
    is."""

    INIT: ClassVar[Inits] = {"weight": "zeros"}


def add_adapters(model: nn.Module, targets: Sequence[str], rank: int, scale: float) -> None:
    """Add an adapter to every linear layer with one of these names, and freeze all else, in place."""
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if name.rpartition(".")[2] in targets and isinstance(module, nn.Linear):
            module.lora_A = AdapterA(module.in_features, rank, bias=False)
            module.lora_B = AdapterB(rank, module.out_features, bias=False)
            # A hook, not a forward of its own: tensor parallelism replaces the forwards of all
            # three layers.
            module.register_forward_hook(partial(_adapt, scale))


def _adapt(scale: float, module: Any, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
    """Add the adapter's output [..., out]; in place, since no backward needs the linear layer's."""
    narrow: Tensor = module.lora_A(inputs[0])  # [..., r]
    return out.add_(module.lora_B(scale * narrow))


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name is an adapter's."""
    return name.endswith(ADAPTERS)


def merge(
    weights: Mapping[str, Tensor], read: Callable[[str], Tensor], scale: float
) -> tuple[dict[str, Tensor], Callable[[str], Tensor]]:
    """Return the (meta) weights without adapters, and what reads one of them with its adapter: W +
    (alpha / r) B A.

    A weight with an adapter is read in float32, whatever it is stored in.
    """

    def read_merged(name: str) -> Tensor:
        inside = [name.removesuffix(".weight") + adapter for adapter in ADAPTERS]
        if inside[0] not in weights:
            return read(name)
        a, b = (read(one).float() for one in inside)  # [r, in], [out, r]
        return torch.addmm(read(name).float(), b, a, alpha=scale)

    return {name: weight for name, weight in weights.items() if not is_adapter(name)}, read_merged
