"""Generate text with a trained model, one token at a time."""

from typing import Protocol

import torch
from torch import Tensor

from model.attention import States
from model.base import RecurrentModel
from runtime.errors import UserError


class DivergedError(UserError):
    """The model overflows, so that the next token has no distribution."""


class NextTokenModel(Protocol):
    """What `generate` needs of a model; every LanguageModel has it."""

    def hidden(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor: ...

    def project(self, hidden: Tensor) -> Tensor: ...


@torch.no_grad()
def generate(
    model: NextTokenModel,
    tokens: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue tokens [B, T] by max_new_tokens; return int64 [B, T + max_new_tokens], the prompt included.

    Samples from softmax(logits / temperature) over the top_k likeliest tokens (all by default), in float32 and with
    `generator` (on the tokens' device); temperature 0 takes the likeliest. A RecurrentModel reads each token once and
    keeps its states, including the KV cache of a hybrid's softmax layers. Other models have no KV cache: each new token
    costs a forward over all tokens so far, which suits a few lines.

    Raises:
        ValueError: an empty prompt, a negative temperature or a top_k below 1.
        DivergedError: the model overflows.
    """
    if tokens.shape[1] == 0:
        raise ValueError("the prompt has no tokens; give at least one")
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}; it must be 0 (the likeliest token) or more")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}; it must be 1 or more, or left out to draw from all tokens")
    states: States = [None] * model.config.num_layers if isinstance(model, RecurrentModel) else None
    seen = 0
    for _ in range(max_new_tokens):
        if isinstance(model, RecurrentModel):
            positions = torch.arange(seen, tokens.shape[1], device=tokens.device)
            hidden = model.hidden(tokens[:, seen:], positions, states=states)
            seen = tokens.shape[1]
        else:
            hidden = model.hidden(tokens)
        logits = model.project(hidden[:, -1]).float()  # [B, V]
        _check(hidden[:, -1], logits)
        tokens = torch.cat([tokens, _draw(logits, temperature, top_k, generator)], dim=1)
    return tokens


def _check(hidden: Tensor, logits: Tensor) -> None:
    """Raise DivergedError if hidden states [B, C] or logits [B, V] overflowed."""
    if not logits.isfinite().all():
        raise DivergedError("the logits of the next token are not finite")
    # A norm whose squares overflow divides by infinity: without this check, all tokens would be equally likely.
    if not hidden.any(-1).all():
        raise DivergedError("the last hidden states are all 0, since a norm overflowed")


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Draw one token [B, 1] from logits [B, V]."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    kept, ids = logits.topk(min(top_k or logits.shape[-1], logits.shape[-1]))  # [B, K], also with ties
    kept = kept - kept[:, :1]  # a tiny temperature overflows only to -inf, which softmax takes
    choice = torch.multinomial((kept / temperature).softmax(-1), 1, generator=generator)
    return ids.gather(-1, choice)
