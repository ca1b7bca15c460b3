"""Masks that a model of transformers makes, and what they say besides the arguments of its layers.

A sharded model makes no masks: the attention knows which tokens see which, by the documents of the
batch and the window that a layer names. While the model is probed it makes them, and each has to
say what the layer's arguments say.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runtime.errors import UserError

FAR = 2**20
"""A position behind all windows of published models but those of whole sequences."""
STATEMENT = "context_parallel_statement"
"""Name of the attribute of a mask that says what it is."""


class Statement(NamedTuple):
    """Meaning of a mask."""

    regular: bool
    """It is causal, or causal with a window."""
    window: int | None
    """Keys that a query sees, its own among them."""


def mask(*, use_vmap: bool = False, attention_mask: Tensor | None = None, **others: Any) -> None:
    """Make no mask, since the attention knows which tokens see which; as transformers'
    AttentionMaskInterface asks.

    Raises UserError: a mask that is not causal, one of the model's own, or padding.
    """
    if attention_mask is not None and not attention_mask.all():
        raise UserError(
            "the model was given an attention_mask that is not all 1; leave it out: cp.batch(attention_mask=...) takes "
            "it"
        )
    if use_vmap or "allow_is_bidirectional_skip" in others:
        kind = "a mask of its own over the causal one" if use_vmap else "a mask that is not causal"
        raise UserError(
            f"the model makes {kind}, such as for images; context parallelism has causal masks alone"
        )


def stated_mask(
    *, mask_function: Callable[..., Tensor], q_length: int, kv_length: int, **others: Any
) -> Tensor:
    """Make a mask [1, 1, T, T] that carries its statement, for a probe; refuses as ``mask``."""
    mask(**others)
    batch = torch.tensor(0, device=others["device"])
    queries = torch.arange(q_length, device=batch.device)[:, None]
    keys = torch.arange(kv_length, device=batch.device)[None]

    made = mask_function(batch, batch, queries, keys).expand(q_length, kv_length)[None, None]
    setattr(made, STATEMENT, _statement(mask_function, made[0, 0], others.get("local_size")))
    return made


def _statement(visible: Callable[..., Tensor], near: Tensor, window: int | None) -> Statement:
    """Return what a mask says: by its first tokens [T, T], and by what some late tokens see."""
    batch = torch.tensor(0, device=near.device)
    distances = 2 ** torch.arange(20, device=near.device)
    queries = torch.full_like(distances, FAR)
    if window is not None:
        edges = torch.arange(-2, 3, device=near.device) + window
        distances = torch.cat([distances, edges, edges])
        late = torch.full_like(edges, FAR + window)
        early = torch.full_like(
            edges, window + window // 2 + 2
        )  # within a chunk, where a window is over its border
        queries = torch.cat([queries, late, early])

    distances = distances.minimum(queries)
    try:
        far = visible(batch, batch, queries, queries - distances)
    except IndexError:  # it asks a tensor of the first tokens
        return Statement(False, window)

    expected = (distances >= 0) & in_window(distances, window)
    regular = torch.equal(far.expand_as(expected), expected) and torch.equal(
        near, _causal(near, window)
    )
    return Statement(regular, window)


def _causal(like: Tensor, window: int | None) -> Tensor:
    """Return a causal mask with a window, [T, T]."""
    positions = torch.arange(len(like), device=like.device)
    distances = positions[:, None] - positions[None]
    return (distances >= 0) & in_window(distances, window)


def in_window(distances: Tensor, window: int | None) -> Tensor:
    """Return True for keys that are no farther than a window has keys."""
    return torch.ones_like(distances, dtype=torch.bool) if window is None else distances < window


def disagreement(made: Tensor | None, window: int | None) -> str | None:
    """Return how a layer's mask differs from the window that its attention is told, if it does."""
    if made is None:
        if window is None:
            return None
        return f"it names a window of {window} and has no mask, so that transformers' own attentions disagree"

    statement: Statement | None = getattr(made, STATEMENT, None)
    if statement is None:
        return "it has a mask of its own; leave attention_mask out: cp.batch takes it"
    if not statement.regular:
        return "its mask is neither causal nor a sliding window, such as one of chunks or blocks"
    if statement.window == window:
        return None
    in_mask, in_layer = (
        f"a window of {x}" if x else "no window" for x in (statement.window, window)
    )
    return (
        f"its mask has {in_mask} and its attention is told {in_layer}; the ranks see the latter alone. Set "
        "sliding_window to None in the configuration where no document is longer"
    )
