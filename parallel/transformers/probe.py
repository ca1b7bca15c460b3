"""Look for layers that mix tokens in a way of their own, of which the ranks would know nothing.

A forward over a few tokens, in which attention, convolution and delta rule let a token see itself
alone, and one token is not a number. Whatever comes out as not a number for another token has mixed
them, whoever wrote the layer. There the layers have their masks, which must say what the layers
say. In a second forward the tokens come in the opposite order, with their positions: a layer whose
queries or keys of a token are other ones has counted its tokens itself. In a third the model is
called without positions, which tells those that it takes by itself.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from parallel.context import ContextError, Plan
from parallel.transformers.batch import Positions
from parallel.transformers.configs import attention_named
from parallel.transformers.layers import CONTEXT, NO_BATCH, PROBED
from runtime.errors import UserError

TOKENS, ODD = 11, 5
"""Tokens of the forward, a number that no dimension of a layer has, and the one that is not a
number.
"""


class Alone:
    """A context in which a token sees itself alone; it refuses what the ranks of a plan will
    refuse.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.seen: list[Tensor] = []
        """Queries and keys of the layers, ``[1, T, heads, D]``, in the order of their calls."""
        self.reversed: list[Tensor] = []
        """Queries and keys of a forward over the same tokens in the opposite order, which are to be
        the same.
        """

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **others: Any) -> Tensor:
        """Return each head's value."""
        self._plan.geometry.check_heads(q.shape[2], k.shape[2])
        for x in (q, k):
            if self.reversed and not alike(x.flip(1), self.reversed[len(self.seen)]):
                raise UserError(
                    "it counts its tokens itself, not by position_ids, and a rank has a part of them"
                )
            self.seen.append(x)
        return v.repeat_interleave(q.shape[2] // v.shape[2], 2)

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the last tap's share."""
        self._check_layout()
        return x * weight[:, -1]

    def attend_delta(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """Return the values."""
        self._check_layout()
        return v

    def _check_layout(self) -> None:
        if self._plan.layout.stride > 1:
            raise ContextError(
                f"its states pass along consecutive tokens, and layout {self._plan.layout.name} has each token of a "
                "rank apart; use method zigzag, exchange, ring or ulysses"
            )


def alike(x: Tensor, y: Tensor) -> bool:
    """Return True if two tensors [1, T, ...] are equal but for rounding, and for the odd token."""
    odd = torch.tensor([ODD], device=x.device)
    gap, scale = (z.float().abs().index_fill(1, odd, 0).max() for z in (x - y, y))
    return bool(gap <= max(torch.finfo(x.dtype).eps, 1e-7) ** 0.5 * scale)


def probe(model: nn.Module, plan: Plan) -> Positions:
    """Run the forwards; return the positions that the model takes by itself. Collective if the
    model's weights are.

    Raises UserError: a layer mixes tokens, or asks for what the plan's ranks cannot do; the message
    names it.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UserError(
            "the model is on the meta device, where nothing can be tried; shard it once its weights exist"
        )
    device = next(model.parameters()).device
    positions = torch.arange(TOKENS, device=device)[None]
    padding = _padding_id(model)
    ids = positions % 3
    if padding is not None:
        ids = (ids + padding + 1) % 4  # none of it is padding, but for the third
        ids = ids.index_fill(1, torch.tensor([2], device=device), padding)

    def run(alone: Alone, **inputs: Tensor) -> list[Tensor]:
        """Return the queries, keys and logits of a forward."""
        with torch.no_grad(), evaluating(model), _watched(model):
            output = model(**inputs, use_cache=False, **{CONTEXT: alone})
            return [*alone.seen, _logits(output)]

    forwards = Alone(plan)
    expected = run(forwards, input_ids=ids, position_ids=positions)

    backwards = Alone(plan)
    backwards.reversed = forwards.seen
    run(backwards, input_ids=ids.flip(1), position_ids=positions.flip(1))

    with attention_named(model, PROBED):
        run(Alone(plan), input_ids=ids, position_ids=positions)

    if _all_alike(expected, run(Alone(plan), input_ids=ids)):
        return Positions()

    def begin(tokens: Tensor, first: int) -> bool:
        """Return True if the model's own positions of tokens go on from ``first``."""
        given = run(Alone(plan), input_ids=tokens, position_ids=positions + first)
        return _all_alike(given, run(Alone(plan), input_ids=tokens))

    return _own_positions(model, ids, padding, begin)


def _all_alike(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(alike, some, others))


def _logits(output: Any) -> Tensor:
    """Return the logits [1, T, V] of what a model returned."""
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[:2] != (1, TOKENS):
        found = "no logits" if logits is None else f"logits of shape {tuple(logits.shape)}"
        raise UserError(
            f"it returns {found} for {TOKENS} tokens, and the loss here is of logits [1, {TOKENS}, V]; give a "
            "causal language model, such as AutoModelForCausalLM makes"
        )
    return logits


def _padding_id(model: nn.Module) -> int | None:
    """Return the token that the model takes for padding, by its configuration or embeddings.

    None for one without an embedding, such as a [PAD] that was added to the tokenizer alone.
    """
    embeddings: Any = getattr(model, "get_input_embeddings", lambda: None)()
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    if padding is None:
        padding = getattr(embeddings, "padding_idx", None)
    weight = getattr(embeddings, "weight", None)
    if not isinstance(padding, int) or weight is None or not 0 <= padding < len(weight):
        return None
    return padding


def _own_positions(
    model: nn.Module, ids: Tensor, padding: int | None, begin: Callable[[Tensor, int], bool]
) -> Positions:
    """Return where the positions begin that a model takes by itself, and the token that it does not
    count.

    Raises UserError: they are not consecutive.
    """
    tables = [
        x.padding_idx
        for x in model.modules()
        if isinstance(x, nn.Embedding) and x.padding_idx is not None
    ]
    rows = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    firsts = [0]
    for first in sorted({1, 2, *(x + 1 for x in tables if x > 0)}):
        if rows is None or first + TOKENS <= rows:
            firsts.append(first)

    counted = ids if padding is None else ids.masked_fill(ids == padding, (padding + 1) % 4)
    for first in firsts:
        if begin(counted, first):
            return Positions(first, None if begin(ids, first) else padding)

    raise UserError(
        f"{type(model).__name__} cannot be sharded: called without position_ids it takes positions that are not "
        f"consecutive from one of {firsts} on, and the ranks do not know them"
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
    """Plant the odd token, and raise UserError with the name of the innermost module that spreads
    it or refuses.
    """
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
            hooks.callback(
                module.register_forward_pre_hook(entering(name), with_kwargs=True).remove
            )
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
            raise UserError(
                f"{running[-1] or type(model).__name__} cannot be sharded: {reason}"
            ) from error


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
