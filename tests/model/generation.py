"""Text of a model on one device, for the tests of its caches and states, and of what the mesh generates."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cache import States
from model.generate import Draw, Read, at_ends, check_lengths, write
from model.language import LanguageModel


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Sequence[int] = (),
    generator: torch.Generator | None = None,
) -> list[list[int]]:
    """Continue prompts of any lengths; return the new tokens of each, up to the first of ``stop``, at most so many.

    Each token is read once: layers keep their states, those of softmax attention a KV cache.

    Raises:
        UserError: an empty prompt, a number out of range, or more tokens than a table of learned positions has.
        DivergedError: the model overflows.
    """
    draw = Draw(temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
    check_lengths(prompts, max_new_tokens, model.config.position_table)

    def begin() -> Read:
        states = States(model.config.num_layers)

        def read(tokens: Tensor, positions: Tensor, ends: Tensor) -> Tensor:
            states.read(positions, ends)
            hidden, _ = at_ends(model.hidden(tokens, positions, states=states), positions, ends)
            return draw(hidden, model.project(hidden))

        return read

    device = next(model.parameters()).device
    return write(begin, prompts, max_new_tokens, stop, device, alike=model.config.recurrent)
