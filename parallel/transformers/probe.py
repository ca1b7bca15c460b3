"""Look for layers that mix tokens in a way of their own, of which the ranks would know nothing.

A forward over a few tokens, in which attention, convolution and delta rule let a token see itself alone, and one token
is not a number. Whatever comes out as not a number for another token has mixed them, whoever wrote the layer. In a
second forward the tokens come in the opposite order, with their positions: a layer whose queries or keys of a token are
other ones has counted its tokens itself.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from parallel.context import ContextError, Plan
from parallel.transformers.layers import CONTEXT, NO_BATCH
from runtime.errors import UserError

TOKENS, ODD = 11, 5
"""Tokens of the forward, a number that no dimension of a layer has, and the one that is not a number."""


class Alone:
    """A context in which a token sees itself alone; it refuses what the ranks of a plan will refuse."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._seen: list[Tensor] = []
        self._before: list[Tensor] = []

    def reverse(self) -> None:
        """Expect the same tokens in the opposite order from here."""
        self._before, self._seen = self._seen, []

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **others: Any) -> Tensor:
        """Return each head's value."""
        self._plan.geometry.check_heads(q.shape[2], k.shape[2])
        for x in (q, k):
            if self._before:
                before, odd = self._before[len(self._seen)], torch.tensor([ODD], device=x.device)
                gap, most = (z.float().abs().index_fill(1, odd, 0).max() for z in (x.flip(1) - before, before))
                if not gap <= max(torch.finfo(x.dtype).eps, 1e-7) ** 0.5 * most:  # but for rounding
                    raise UserError("it counts its tokens itself, not by position_ids, and a rank has a part of them")
            self._seen.append(x)
        return v.repeat_interleave(q.shape[2] // v.shape[2], 2)

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the last tap's share."""
        self._check_layout()
        return x * weight[:, -1]

    def attend_delta(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """Return the values."""
        self._check_layout()
        if self._plan.geometry.options.delta_rule_schedule == "ulysses":
            self._plan.geometry.check_heads(v.shape[2], q.shape[2])
        return v

    def _check_layout(self) -> None:
        if self._plan.layout.stride > 1:
            raise ContextError(
                f"its states pass along consecutive tokens, and layout {self._plan.layout.name} has each token of a "
                "rank apart; use method zigzag, exchange, ring or ulysses"
            )


def probe(model: nn.Module, plan: Plan) -> None:
    """Run the forward. Collective if the model's weights are.

    Raises UserError: a layer mixes tokens, or asks for what the plan's ranks cannot do; the message names it.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UserError("the model is on the meta device, where nothing can be tried; shard it once its weights exist")
    device = next(model.parameters()).device
    positions, alone = torch.arange(TOKENS, device=device)[None], Alone(plan)
    with torch.no_grad(), evaluating(model), _watched(model):
        for x in (positions, positions.flip(1)):
            out = model(input_ids=x % 3, position_ids=x, use_cache=False, **{CONTEXT: alone})
            alone.reverse()
            logits = getattr(out, "logits", None)
            if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[:2] != (1, TOKENS):
                found = "no logits" if logits is None else f"logits of shape {tuple(logits.shape)}"
                raise UserError(
                    f"it returns {found} for {TOKENS} tokens, and the loss here is of logits [1, {TOKENS}, V]; give a "
                    "causal language model, such as AutoModelForCausalLM makes"
                )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Draw nothing at random, and leave each module's mode as it was."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def _watched(model: nn.Module) -> Iterator[None]:
    """Plant the odd token, and raise UserError with the name of the innermost module that spreads it or refuses."""
    running = [""]

    def odd(module: nn.Module, arguments: Any, out: Tensor) -> Tensor:
        return out.index_fill(1, torch.tensor([ODD], device=out.device), torch.nan)

    def entering(name: str) -> Callable[..., None]:
        def enter(module: nn.Module, arguments: Any, named: dict[str, Any]) -> None:
            _check((arguments, named), running[-1])
            running.append(name)

        return enter

    def leave(module: nn.Module, arguments: Any, out: Any) -> None:
        _check(out, running[-1])
        running.pop()

    embeddings: Any = getattr(model, "get_input_embeddings", None)
    if embeddings is None:
        raise UserError(
            f"{type(model).__name__} has no get_input_embeddings; give a causal language model of transformers"
        )
    with ExitStack() as hooks:
        hooks.callback(embeddings().register_forward_hook(odd).remove)
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_pre_hook(entering(name), with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(leave).remove)
        try:
            yield
        except Exception as error:
            reason = str(error)
            if NO_BATCH in reason:
                reason = "the layers around it do not pass keyword arguments on, by which it would get its batch"
            elif not isinstance(error, UserError):
                reason = (
                    f"its forward of {TOKENS} tokens without a mask failed, {type(error).__name__}: {reason}; see that "
                    "the model runs as it is, and needs no mask besides its attention's"
                )
            raise UserError(f"{running[-1] or type(model).__name__} cannot be sharded: {reason}") from error


def _check(values: Any, name: str) -> None:
    """Raise UserError if a token besides the odd one is not a number in tensors [B, T, ...]."""
    for x in torch.utils._pytree.tree_leaves(values):
        if isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 2 and x.shape[1] == TOKENS:
            others = torch.arange(TOKENS, device=x.device) != ODD
            if x[:, others].isnan().any():
                raise UserError(
                    "it mixes tokens otherwise than by attention, a short convolution or the gated delta rule that "
                    "are known here, so that a rank would see its own tokens alone"
                )
