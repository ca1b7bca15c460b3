"""The load-balancing loss of a model's routers, from the tokens of all ranks.

transformers adds this loss to that of a model with experts if ``output_router_logits`` is set
(Fedus et al. 2021, "Switch Transformers", equations 4 to 6):

    E * sum over experts of (choices of the expert / rows) * (sum of its probabilities / rows)

where a row is one token in one layer, and both sums run over all rows of a forward pass. It is a
product of two means, so the mean of the ranks' losses is another number. The choices have no
gradient, however: given those of all ranks, the loss is a sum over tokens, and each rank has its
part of the loss and of the gradients.

Shapes: a load ``[2, E]`` has for each of E experts its choices and the sum of its probabilities; n
tokens are this rank's.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.context import ContextParallel
from parallel.transformers.batch import Batch
from parallel.transformers.configs import configs
from runtime.errors import UserError
from runtime.tensors import accum_dtype

FLAG = "output_router_logits"
ATTRIBUTES = ("router_aux_loss_coef", "num_experts", "num_experts_per_tok")
"""Attributes by which a model of transformers computes its router's loss."""
MAX_DIFFERENCE = 1e-2
"""Relative difference between a model's own loss and ours for the same logits; a larger one is
refused. Both compute the same from the same numbers, and another formula is further off.
"""


class RouterLoss:
    """The router's loss of a sharded model, if it has one."""

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = None
        for module in model.modules():
            if all(name in vars(module) for name in ATTRIBUTES):
                self._model = module
                break
        self._is_verified = False
        if self._model is not None:
            return
        for config in configs(model):
            if getattr(config, FLAG, False):
                raise UserError(
                    f"{type(config).__name__}.{FLAG} is set, but {type(model).__name__} has no "
                    f"{', '.join(ATTRIBUTES)}, so it has no router's loss that the ranks can "
                    "compute; set it to False"
                )

    @property
    def is_enabled(self) -> bool:
        """True if the model's configuration adds the router's loss to every loss."""
        return self._model is not None and bool(getattr(self._model.config, FLAG, False))

    @property
    def coefficient(self) -> float:
        """The model's own weight of the router's loss."""
        return float(self._model.router_aux_loss_coef)

    def empty_load(self, device: torch.device) -> Tensor:
        """Return the load [2, E] of no tokens; [2, 0] without a router's loss."""
        num_experts = self._model.num_experts if self.is_enabled else 0
        return torch.zeros(2, num_experts, dtype=torch.float64, device=device)

    def is_in(self, output: Any) -> bool:
        """Return True if transformers adds a router's loss to this output's loss.

        Raises UserError if the configuration asks for the loss, and the output lacks it.
        """
        if getattr(output, "aux_loss", None) is not None:
            return True
        if self.is_enabled:
            raise UserError(
                f"{FLAG} is set in the model's configuration, but the loss got no router_logits; "
                "give loss the model's whole output instead of its logits"
            )
        return False

    def load(self, output: Any, tokens: int | None = None) -> Tensor:
        """Return the load [2, E] of an output's first tokens, by default of all, in float64.

        Raises UserError if the model computes its router's loss from other numbers.
        """
        router_logits = getattr(output, "router_logits", None) or ()
        if self._model is None or not router_logits:
            raise UserError(
                f"the output has an aux_loss, but the model has no {', '.join(ATTRIBUTES)}, or the "
                f"output no router_logits, so the ranks cannot compute it; set {FLAG} to False"
            )
        for logits in router_logits:
            if logits.ndim != 2 or logits.shape[1] != self._model.num_experts:
                raise UserError(
                    f"router_logits have the shape {tuple(logits.shape)}, but the router's loss "
                    f"needs [tokens, {self._model.num_experts}]; set {FLAG} to False"
                )

        top_k = self._model.num_experts_per_tok
        if not self._is_verified and output.aux_loss is not None:
            self._verify(float(output.aux_loss), load_of(router_logits, top_k))
        return load_of([logits[:tokens] for logits in router_logits], top_k)

    def _check_gradient(self, output: Any) -> None:
        """Raise UserError if checkpointing has cut the router logits off their gradient."""
        logits = getattr(output, "logits", None)
        router_logits = getattr(output, "router_logits", None) or ()
        has_gradient = any(x.requires_grad for x in router_logits)
        if has_gradient or logits is None or not logits.requires_grad:
            return
        if any(getattr(x, "gradient_checkpointing", False) for x in self._model.modules()):
            raise UserError(
                f"{FLAG} is set, but checkpointing with use_reentrant=True leaves router_logits "
                "without a gradient; give gradient_checkpointing_kwargs={'use_reentrant': False}"
            )

    def _verify(self, expected: float, load: Tensor) -> None:
        """Raise UserError if the model's own loss of a load is another one."""
        loss = float(self.share(load.detach(), load.detach()))
        if abs(loss - expected) > MAX_DIFFERENCE * abs(expected):
            raise UserError(
                f"{type(self._model).__name__}'s router has the loss {expected:g}, but Mixtral's "
                f"formula, the only one that the ranks can compute, gives {loss:g} for the same "
                f"router_logits; set {FLAG} to False"
            )
        self._is_verified = True

    def share(self, load: Tensor, total: Tensor) -> Tensor:
        """Return the part of the loss that the tokens of a load have; both loads are [2, E].

        The parts of all loads add up to the loss of their total.
        """
        choices = total[0]  # [E]
        rows = (choices.sum() / self._model.num_experts_per_tok).clamp(min=1)
        return len(choices) * (choices * load[1]).sum() / rows**2

    def evaluated(self, load: Tensor, coefficient: float | None = None) -> float:
        """Return the weighted loss of all processes' loads [2, E]; 0 without one. Collective."""
        if not self.is_enabled:
            return 0.0
        if dist.is_initialized():
            dist.all_reduce(load)
        if coefficient is None:
            coefficient = self.coefficient
        return coefficient * float(self.share(load, load))

    def loss(self, output: Any, batch: Batch, world: dist.ProcessGroup | None) -> Tensor:
        """Return the loss of all ranks' tokens, without its weight; float64. Collective.

        Its gradients are to be averaged over ``world``.
        """
        self._check_gradient(output)
        load = self.load(output, real_tokens(batch.context))
        total = load.detach().clone()
        world_size = 1
        if world is not None:
            dist.all_reduce(total, group=world)
            world_size = dist.get_world_size(world)
        share = world_size * self.share(load, total)
        return share - share.detach() + self.share(total, total)


class RouterTerm:
    """The router's loss as a sum of one term per forward pass."""

    def __init__(
        self,
        router: RouterLoss,
        forwards: Sequence[dict[str, Any]],
        tokens: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """``forwards`` are the inputs of all passes; each has ``tokens`` tokens, or any number."""
        self._router = router
        self._forwards = forwards
        self._tokens = tokens
        self._group = group
        self._total: Tensor | None = None

    def __call__(self, model: nn.Module, output: Any) -> Tensor | float:
        """Return the weighted term of one pass. The first call is collective."""
        if not self._router.is_enabled:
            return 0.0
        if self._total is None:
            self._total = self._measure(model)
        share = self._router.share(self._router.load(output, self._tokens), self._total)
        return self._router.coefficient * share

    def _measure(self, model: nn.Module) -> Tensor:
        """Return the load [2, E] of all passes on all ranks, which every term needs."""
        total: Any = 0
        with torch.no_grad():
            for inputs in self._forwards:
                total = total + self._router.load(model(**inputs), self._tokens)
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
        return torch.as_tensor(total)


def load_of(router_logits: Sequence[Tensor], top_k: int) -> Tensor:
    """Return the load [2, E] of all layers' logits [n, E], in float64.

    As in transformers, probabilities and choices are computed in the logits' dtype.
    """
    num_experts = router_logits[0].shape[1]
    choices = torch.zeros(num_experts, dtype=torch.float64, device=router_logits[0].device)
    probability_sums = torch.zeros_like(choices)
    for logits in router_logits:
        probabilities = logits.to(choices.device).softmax(-1)  # [n, E]
        chosen = probabilities.topk(top_k, -1).indices.flatten()  # [n top_k]
        choices = choices.index_add(0, chosen, torch.ones_like(chosen, dtype=choices.dtype))
        layer_sums = probabilities.to(accum_dtype(probabilities.dtype)).sum(0)
        probability_sums = probability_sums + layer_sums.to(probability_sums)
    return torch.stack([choices, probability_sums])


def real_tokens(context: ContextParallel) -> int:
    """Return the number of this rank's tokens, without the padding that its layout adds last."""
    return int((context.positions < context.plan.seq_len).sum())


def trainer_coefficient(trainer: Any, num_items: Tensor | int | None = None) -> float | None:
    """Return the weight of the router's loss in a trainer's loss of a batch.

    None stands for the model's own weight, which transformers' trainer adds for every accumulated
    batch. TRL's trainer has a weight itself, and takes the mean over the accumulated batches.
    """
    weight: float | None = getattr(trainer, "router_aux_loss_coef", None)
    if weight is None or num_items is None:
        return weight
    return weight / int(trainer.current_gradient_accumulation_steps)
