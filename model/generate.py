"""Generate text one token at a time, whatever reads the tokens: draws, lengths, and the loop over
all prompts.

Shapes: B prompts, T new tokens, C width of the residual stream, V vocabulary entries.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.errors import UserError, require


class DivergedError(UserError):
    """The model overflows, so that the next token has no distribution."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Draws the next token from softmax(logits / temperature) over the likeliest tokens, in
    float32.
    """

    temperature: float = 0.0
    """0 takes the likeliest."""
    top_k: int | None = None
    """Draw from so many of the likeliest tokens; by default from all."""
    top_p: float | None = None
    """Draw from the fewest likeliest of these that have this probability together (Holtzman et al.
    2020).
    """
    generator: torch.Generator | None = None
    """On the logits' device."""

    def __post_init__(self) -> None:
        heat, k, p = self.temperature, self.top_k, self.top_p
        require(
            self,
            0 <= heat < float("inf"),
            "temperature",
            "it must be 0 (the likeliest token) or more",
        )
        require(
            self,
            k is None or k >= 1,
            "top_k",
            "it must be 1 or more, or left out to draw from all tokens",
        )
        require(
            self, p is None or 0 < p <= 1, "top_p", "it must be above 0 and at most 1, or left out"
        )

    def __call__(self, hidden: Tensor, logits: Tensor) -> Tensor:
        """Draw a token [B] for each last hidden state [B, C] and its logits [B, V]. Raises
        DivergedError.
        """
        logits = logits.float()
        if not logits.isfinite().all():
            raise DivergedError("the logits of the next token are not finite")
        # A norm whose squares overflow divides by infinity: without this check, all tokens would be
        # equally likely.
        if not hidden.any(-1).all():
            raise DivergedError("the last hidden states are all 0, since a norm overflowed")
        if self.temperature == 0:
            return logits.argmax(-1)
        kept, ids = logits.topk(
            min(self.top_k or logits.shape[-1], logits.shape[-1])
        )  # [B, K], also with ties
        kept = kept - kept[:, :1]  # a tiny temperature overflows only to -inf, which softmax takes
        share = (kept / max(self.temperature, torch.finfo(kept.dtype).tiny)).softmax(-1)
        if self.top_p is not None:
            likelier = share.cumsum(-1) - share
            share = share.where(likelier < self.top_p, 0)
        return ids.gather(-1, torch.multinomial(share, 1, generator=self.generator))[:, 0]


Choose = Callable[[Tensor, Tensor], Tensor]
"""Last hidden states [B, C] and their logits [B, V] -> the next tokens [B], as a ``Draw`` does."""
Read = Callable[[Tensor, Tensor, Tensor], Tensor]
"""New tokens [B, T], their positions [1 or B, T] and ``ends`` as for ``States.read`` -> the next
tokens [B].
"""


def check_lengths(prompts: Sequence[Sequence[int]], max_new_tokens: int, table: int | None) -> None:
    """Raise UserError for no new tokens, an empty prompt, or one that a table of learned positions
    is too small for.
    """
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens is {max_new_tokens}; it must be 1 or more")
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise UserError(f"prompt {number} has no tokens; give at least one")
        if (
            table is not None and len(prompt) + max_new_tokens > table + 1
        ):  # the last token drawn is not read again
            raise UserError(
                f"prompt {number} has {len(prompt)} tokens and {max_new_tokens} are to follow, and the model's "
                f"max_position_embeddings {table} allows {table + 1} together; shorten it, or ask for fewer"
            )


def at_ends(hidden: Tensor, positions: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return each sequence's hidden state [B, C] before its end, of [B, T, C], and bool [B],
    whether it is there.
    """
    last = positions == (ends - 1)[:, None]  # [B, T]
    return hidden[torch.arange(len(hidden), device=hidden.device), last.int().argmax(1)], last.any(
        1
    )


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
        begin: forgets all tokens and returns what reads some; the prompts come padded to the right.
        alike: read only prompts of one length together.
    """
    written = [list[int]() for _ in prompts]
    if alike and len(lengths := {len(prompt) for prompt in prompts}) > 1:
        for length in sorted(lengths):
            group = [number for number, prompt in enumerate(prompts) if len(prompt) == length]
            texts = write(
                begin,
                [prompts[number] for number in group],
                max_new_tokens,
                stop,
                device,
                alike=True,
            )
            for number, text in zip(group, texts, strict=True):
                written[number] = text
        return written
    read = begin()
    ends = torch.tensor([len(prompt) for prompt in prompts], device=device)
    width = max(map(len, prompts), default=0)
    tokens = torch.tensor(
        [[*prompt, *[0] * (width - len(prompt))] for prompt in prompts], device=device
    )
    positions, open_ends = torch.arange(width, device=device)[None], set(range(len(prompts)))
    for _ in range(max_new_tokens):
        if not open_ends:
            break
        drawn = read(tokens, positions, ends)
        for number, token in enumerate(drawn.tolist()):
            if token in stop:
                open_ends.discard(number)
            elif number in open_ends:
                written[number].append(token)
        tokens, positions, ends = drawn[:, None], ends[:, None], ends + 1
    return written
