"""Run a sharded model on a few tokens, to find layers that mix tokens with their own code.

A layer that mixes tokens with its own code (a recurrence, a convolution) would silently see only
one rank's tokens. Class names do not reveal such layers, so the model is run:

1. Attention, convolution and delta rule let a token see only itself, and one token is set to NaN.
   A layer whose output is NaN for another token mixed tokens.
2. The tokens come in reverse order, with their positions. If a layer's queries or keys change for
   any token, the layer counts the tokens itself.
3. The layers get their masks, which must mean the same as the layers' arguments.
4. The model is called without position ids, to learn the ones that it computes itself.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from parallel.comparison import evaluating
from parallel.context import ContextError, Plan
from parallel.transformers.batch import Positions
from parallel.transformers.configs import attention_named
from parallel.transformers.layers import CONTEXT, NO_BATCH, PROBED
from runtime.errors import UserError

TOKENS = 11
"""Number of tokens in a forward pass. No other dimension of a layer has this size, so it identifies
the dimension of tokens."""
NAN_TOKEN = 5
"""Index of the token whose embedding is set to NaN, to see which layers spread it."""


class IsolatedTokens:
    """A context in which each token sees only itself; it refuses what the ranks would refuse."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.queries_and_keys: list[Tensor] = []
        """Queries and keys of the layers, ``[1, T, heads, D]``, in the order of the calls."""
        self.expected: list[Tensor] = []
        """Queries and keys of an earlier forward pass over the reversed tokens. Those of this pass
        must equal them in reverse; empty if there was no such pass."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **others: Any) -> Tensor:
        """Return the value of each token, repeated for the query heads."""
        self._plan.geometry.check_heads(q.shape[2], k.shape[2])
        for x in (q, k):
            call = len(self.queries_and_keys)
            if self.expected and not nearly_equal(x.flip(1), self.expected[call]):
                raise UserError(
                    "it counts its tokens itself instead of using position_ids, but a rank has "
                    "only a part of the tokens"
                )
            self.queries_and_keys.append(x)
        return v.repeat_interleave(q.shape[2] // v.shape[2], 2)

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the term of the last tap only, which reads the token itself."""
        self._check_layout()
        return x * weight[:, -1]

    def attend_delta(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """Return the values unchanged, so that no token sees another one."""
        self._check_layout()
        return v

    def _check_layout(self) -> None:
        layout = self._plan.layout
        if layout.stride > 1:
            raise ContextError(
                f"its states pass along consecutive tokens, but layout {layout.name} gives a rank "
                "tokens that are apart; use method zigzag, exchange, ring or ulysses"
            )


def nearly_equal(x: Tensor, y: Tensor) -> bool:
    """Return True if two tensors [1, T, ...] are equal up to rounding, except at the NaN token."""
    nan_token = torch.tensor([NAN_TOKEN], device=x.device)
    max_error = (x - y).float().abs().index_fill(1, nan_token, 0).max()
    scale = y.float().abs().index_fill(1, nan_token, 0).max()
    return bool(max_error <= max(torch.finfo(x.dtype).eps, 1e-7) ** 0.5 * scale)


def probe(model: nn.Module, plan: Plan) -> Positions:
    """Run the forwards of the probe; return the positions that the model computes itself.

    Collective if the model's weights are sharded.

    Raises UserError if a layer mixes tokens, or needs an attention that the plan's ranks cannot
    compute; the message names the layer.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UserError(
            "the model is on the meta device, so it cannot be run on a few tokens; call shard "
            "after its weights are loaded"
        )
    device = next(model.parameters()).device
    positions = torch.arange(TOKENS, device=device)[None]  # [1, T]
    padding = _padding_id(model)
    ids = positions % 3
    if padding is not None:
        # Only the third token is padding.
        ids = (ids + padding + 1) % 4
        ids = ids.index_fill(1, torch.tensor([2], device=device), padding)

    def run(context: IsolatedTokens, **inputs: Tensor) -> list[Tensor]:
        """Return the queries, keys and logits of a forward."""
        with torch.no_grad(), evaluating(model), _watched(model):
            output = model(**inputs, use_cache=False, **{CONTEXT: context})
            return [*context.queries_and_keys, _logits(output)]

    forwards = IsolatedTokens(plan)
    expected = run(forwards, input_ids=ids, position_ids=positions)

    backwards = IsolatedTokens(plan)
    backwards.expected = forwards.queries_and_keys
    run(backwards, input_ids=ids.flip(1), position_ids=positions.flip(1))

    with attention_named(model, PROBED):
        run(IsolatedTokens(plan), input_ids=ids, position_ids=positions)

    if _all_nearly_equal(expected, run(IsolatedTokens(plan), input_ids=ids)):
        return Positions()

    def starts_at(tokens: Tensor, first: int) -> bool:
        """Return True if the model's own positions for these tokens count up from ``first``."""
        explicit = run(IsolatedTokens(plan), input_ids=tokens, position_ids=positions + first)
        return _all_nearly_equal(explicit, run(IsolatedTokens(plan), input_ids=tokens))

    return _model_positions(model, ids, padding, starts_at)


def _all_nearly_equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(nearly_equal, some, others))


def _logits(output: Any) -> Tensor:
    """Return the logits [1, T, V] of a model's output."""
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[:2] != (1, TOKENS):
        returned = "no logits" if logits is None else f"logits of shape {tuple(logits.shape)}"
        raise UserError(
            f"it returns {returned} for {TOKENS} tokens, but the loss needs logits "
            f"[1, {TOKENS}, V]; give a causal language model, for example from AutoModelForCausalLM"
        )
    return logits


def _padding_id(model: nn.Module) -> int | None:
    """Return the id of the model's padding token, from its configuration or embeddings.

    None if the token has no embedding, such as a [PAD] that was added only to the tokenizer.
    """
    embeddings: Any = getattr(model, "get_input_embeddings", lambda: None)()
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    if padding is None:
        padding = getattr(embeddings, "padding_idx", None)
    weight = getattr(embeddings, "weight", None)
    if not isinstance(padding, int) or weight is None or not 0 <= padding < len(weight):
        return None
    return padding


def _model_positions(
    model: nn.Module, ids: Tensor, padding: int | None, starts_at: Callable[[Tensor, int], bool]
) -> Positions:
    """Return the first position that a model computes itself, and the token that it skips.

    Raises UserError if the model's positions are not consecutive.
    """
    candidates = {1, 2}
    for module in model.modules():
        padding_idx = module.padding_idx if isinstance(module, nn.Embedding) else None
        if padding_idx is not None and padding_idx > 0:
            candidates.add(padding_idx + 1)
    table_size = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    firsts = [0]
    for first in sorted(candidates):
        if table_size is None or first + TOKENS <= table_size:
            firsts.append(first)

    without_padding = ids
    if padding is not None:
        without_padding = ids.masked_fill(ids == padding, (padding + 1) % 4)
    for first in firsts:
        if starts_at(without_padding, first):
            skips_padding = not starts_at(ids, first)
            return Positions(first, padding if skips_padding else None)

    raise UserError(
        f"{type(model).__name__} cannot be sharded: without position_ids its positions are not "
        f"consecutive numbers that begin with one of {firsts}, so the ranks cannot compute them"
    )


@contextmanager
def _watched(model: nn.Module) -> Iterator[None]:
    """Set one token to NaN; raise UserError with the innermost module that spreads the NaN."""
    running = [""]

    def plant_nan(module: nn.Module, arguments: Any, out: Tensor) -> Tensor:
        return out.index_fill(1, torch.tensor([NAN_TOKEN], device=out.device), torch.nan)

    def entering(name: str) -> Callable[..., None]:
        def enter(module: nn.Module, arguments: Any, kwargs: dict[str, Any]) -> None:
            _check_nan((arguments, kwargs))
            running.append(name)

        return enter

    def leave(module: nn.Module, arguments: Any, out: Any) -> None:
        _check_nan(out)
        running.pop()

    embeddings: Any = getattr(model, "get_input_embeddings", None)
    if embeddings is None:
        raise UserError(
            f"{type(model).__name__} has no get_input_embeddings; give a causal language model of "
            "transformers"
        )
    with ExitStack() as hooks:
        hooks.callback(embeddings().register_forward_hook(plant_nan).remove)
        for name, module in model.named_modules():
            pre_hook = module.register_forward_pre_hook(entering(name), with_kwargs=True)
            hooks.callback(pre_hook.remove)
            hooks.callback(module.register_forward_hook(leave).remove)
        try:
            yield
        except Exception as error:
            title = running[-1] or type(model).__name__
            raise UserError(f"{title} cannot be sharded: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Return the reason why a forward of the probe failed."""
    reason = str(error)
    if NO_BATCH in reason:
        return "the layers around it do not pass on keyword arguments, so it does not get its batch"
    if isinstance(error, UserError):
        return reason
    return (
        f"its forward pass of {TOKENS} tokens without a mask failed ({type(error).__name__}: "
        f"{reason}); check that the unsharded model runs, and needs a mask only in its attention"
    )


def _check_nan(values: Any) -> None:
    """Raise UserError if tensors [B, T, ...] are NaN at any token other than the planted one."""
    for x in torch.utils._pytree.tree_leaves(values):
        if isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 2 and x.shape[1] == TOKENS:
            others = torch.arange(TOKENS, device=x.device) != NAN_TOKEN
            if x[:, others].isnan().any():
                raise UserError(
                    "it mixes tokens, but not through the attention, short convolution or gated "
                    "delta rule that shard replaces, so a rank would see only its own tokens"
                )
