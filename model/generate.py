"""Generate text one token at a time: sample tokens, check lengths, and loop over new tokens.

The loop does not depend on the model: a function ``Read`` takes tokens and returns the next ones,
on one device or on all ranks of a mesh (``train/generation.py``).

Shapes: B prompts, T new tokens, C width of the residual stream, V vocabulary entries.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.errors import UserError, require


class DivergedError(UserError):
    """The model overflowed, so the next token has no distribution."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Samples the next token from softmax(logits / temperature), in float32.

    top_k and top_p restrict sampling to the likeliest tokens.
    """

    temperature: float = 0.0
    """Divisor of the logits; 0 takes the likeliest token."""
    top_k: int | None = None
    """Number of likeliest tokens to sample from; by default all tokens."""
    top_p: float | None = None
    """Sample only from the fewest likeliest tokens, among top_k, whose probabilities sum to at
    least this number (Holtzman et al. 2020)."""
    generator: torch.Generator | None = None
    """Random generator on the logits' device."""

    def __post_init__(self) -> None:
        in_range = 0 <= self.temperature < float("inf")
        require(self, in_range, "temperature", "it must be 0 (the likeliest token) or more")
        in_range = self.top_k is None or self.top_k >= 1
        must = "it must be 1 or more, or left out to sample from all tokens"
        require(self, in_range, "top_k", must)
        in_range = self.top_p is None or 0 < self.top_p <= 1
        require(self, in_range, "top_p", "it must be above 0 and at most 1, or left out")

    def __call__(self, hidden: Tensor, logits: Tensor) -> Tensor:
        """Sample a token [B] for each last hidden state [B, C] and its logits [B, V].

        Raises:
            DivergedError: the logits are not finite, or a norm overflowed.
        """
        logits = logits.float()
        if not logits.isfinite().all():
            raise DivergedError(
                "the logits of the next token are not finite; use an earlier checkpoint"
            )
        # A norm whose squares overflow divides by infinity and returns 0. Without this check all
        # tokens would be equally likely.
        if not hidden.any(-1).all():
            raise DivergedError(
                "the last hidden states are all 0, since a norm overflowed; use an earlier "
                "checkpoint"
            )
        if self.temperature == 0:
            return logits.argmax(-1)

        vocabulary = logits.shape[-1]
        logits, ids = logits.topk(min(self.top_k or vocabulary, vocabulary))  # [B, K], descending
        # After this subtraction a tiny temperature overflows only to -inf, which softmax accepts.
        logits = logits - logits[:, :1]
        temperature = max(self.temperature, torch.finfo(logits.dtype).tiny)
        probabilities = (logits / temperature).softmax(-1)
        if self.top_p is not None:
            likelier = probabilities.cumsum(-1) - probabilities  # sum over likelier tokens
            probabilities = probabilities.where(likelier < self.top_p, 0)
        drawn = torch.multinomial(probabilities, 1, generator=self.generator)  # [B, 1]
        return ids.gather(-1, drawn)[:, 0]


Choose = Callable[[Tensor, Tensor], Tensor]
"""Function (last hidden states [B, C], their logits [B, V]) -> next tokens [B], like a ``Draw``."""
Read = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function (new tokens [B, T], positions [1 or B, T], ``ends`` as for ``States.read``) -> next
tokens [B]."""


def check_lengths(prompts: Sequence[Sequence[int]], max_new_tokens: int, table: int | None) -> None:
    """Check the lengths of prompts, with and without the new tokens.

    Args:
        table: number of entries in the model's table of learned positions, if it has one.

    Raises:
        UserError: max_new_tokens is below 1, a prompt is empty, or the table is too short.
    """
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens is {max_new_tokens}; it must be 1 or more")
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise UserError(f"prompt {number} has no tokens; give at least one")
        # A sequence may exceed the position table by one token: the last one is sampled, but never
        # fed to the model.
        if table is not None and len(prompt) + max_new_tokens > table + 1:
            raise UserError(
                f"prompt {number} has {len(prompt)} tokens and max_new_tokens is {max_new_tokens}, "
                f"but the model's max_position_embeddings {table} allows only {table + 1} in all; "
                "shorten the prompt, or lower max_new_tokens"
            )


def at_ends(hidden: Tensor, positions: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return each sequence's last hidden state, and whether these tokens contain it.

    Args:
        hidden: [B, T, C].
        positions: positions of the tokens, [1 or B, T].
        ends: [B], the position after each sequence's last token.

    Returns:
        Hidden states [B, C], and bool [B], True if the sequence's last token is among these tokens;
        otherwise its hidden state has no meaning.
    """
    is_last = positions == (ends - 1)[:, None]  # [B, T]
    sequences = torch.arange(len(hidden), device=hidden.device)
    return hidden[sequences, is_last.int().argmax(1)], is_last.any(1)


def write(
    begin: Callable[[], Read],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop: Sequence[int],
    device: torch.device,
    *,
    alike: bool,
) -> list[list[int]]:
    """Return the new tokens of each prompt.

    Args:
        begin: function that forgets all earlier tokens and returns a ``Read``, whose first call
            gets the prompts, padded on the right.
        max_new_tokens: maximum number of new tokens per prompt.
        stop: ids of tokens that end a text; they are not returned.
        alike: True to batch only prompts of equal length, as recurrent models need.
    """
    lengths = {len(prompt) for prompt in prompts}
    if alike and len(lengths) > 1:
        texts: list[list[int]] = [[] for _ in prompts]
        for length in sorted(lengths):
            numbers = [number for number, prompt in enumerate(prompts) if len(prompt) == length]
            group = [prompts[number] for number in numbers]
            group_texts = write(begin, group, max_new_tokens, stop, device, alike=True)
            for number, text in zip(numbers, group_texts, strict=True):
                texts[number] = text
        return texts
    return _write_together(begin(), prompts, max_new_tokens, stop, device)


def _write_together(
    read: Read,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop: Sequence[int],
    device: torch.device,
) -> list[list[int]]:
    """Return the new tokens of prompts that form one batch."""
    texts: list[list[int]] = [[] for _ in prompts]
    unfinished = set(range(len(prompts)))
    ends = torch.tensor([len(prompt) for prompt in prompts], device=device)  # [B]
    width = max(map(len, prompts), default=0)
    padded = [[*prompt, *[0] * (width - len(prompt))] for prompt in prompts]
    tokens = torch.tensor(padded, device=device)  # [B, T]
    positions = torch.arange(width, device=device)[None]  # [1, T]

    for _ in range(max_new_tokens):
        if not unfinished:
            break
        drawn = read(tokens, positions, ends)  # [B]
        for number, token in enumerate(drawn.tolist()):
            if token in stop:
                unfinished.discard(number)
            elif number in unfinished:
                texts[number].append(token)
        tokens = drawn[:, None]  # [B, 1]
        positions = ends[:, None]
        ends = ends + 1
    return texts
