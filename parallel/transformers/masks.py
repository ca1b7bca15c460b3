"""Check that a model's attention masks agree with the arguments of its layers.

A sharded model makes no masks: its attention derives them from the batch's documents and from the
window that a layer passes. A model may state a window only in its mask, and that window would be
lost silently. So during the probe (``probe.py``) the model makes its masks, and each is compared
with the layer's arguments.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runtime.errors import UserError

FAR = 2**20
"""Position at which masks are read to find their windows: beyond the windows of published models,
except windows that span whole sequences."""
STATEMENT = "context_parallel_statement"
"""Attribute of a mask that stores its `Statement`."""


class Statement(NamedTuple):
    """Meaning of a mask, in terms of a layer's arguments."""

    regular: bool
    """True if the mask is causal, or causal with a window."""
    window: int | None
    """Number of keys that a query sees, including its own."""


def mask(*, use_vmap: bool = False, attention_mask: Tensor | None = None, **others: Any) -> None:
    """Make no mask, since the ranks need none; the signature is AttentionMaskInterface's.

    Raises UserError if the mask is not causal, is made by the model itself, or has padding.
    """
    if attention_mask is not None and not attention_mask.all():
        raise UserError(
            "the model was given an attention_mask that is not all 1; give attention_mask to "
            "cp.batch instead of the model"
        )
    if use_vmap or "allow_is_bidirectional_skip" in others:
        kind = "a mask of its own over the causal one" if use_vmap else "a mask that is not causal"
        raise UserError(
            f"the model makes {kind}, for example for images, but context parallelism supports "
            "only causal masks"
        )


def stated_mask(
    *, mask_function: Callable[..., Tensor], q_length: int, kv_length: int, **others: Any
) -> Tensor:
    """Make a mask [1, 1, T, T] with its `Statement`, for a probe; raises the errors of ``mask``."""
    mask(**others)
    batch = torch.tensor(0, device=others["device"])
    queries = torch.arange(q_length, device=batch.device)[:, None]
    keys = torch.arange(kv_length, device=batch.device)[None]

    visible = mask_function(batch, batch, queries, keys).expand(q_length, kv_length)[None, None]
    statement = _statement(mask_function, visible[0, 0], others.get("local_size"))
    setattr(visible, STATEMENT, statement)
    return visible


def _statement(
    mask_function: Callable[..., Tensor], first_tokens: Tensor, window: int | None
) -> Statement:
    """Return the meaning of a mask.

    The mask of the first tokens [T, T] is not enough: the probe has fewer tokens than a usual
    window, or than a chunk of chunked attention. So the mask is also read for a few queries much
    later in the sequence, with keys at distances of powers of two and around the window's edge.
    """
    batch = torch.tensor(0, device=first_tokens.device)
    distances = 2 ** torch.arange(20, device=first_tokens.device)
    queries = torch.full_like(distances, FAR)
    if window is not None:
        edges = torch.arange(-2, 3, device=first_tokens.device) + window
        distances = torch.cat([distances, edges, edges])
        far_queries = torch.full_like(edges, FAR + window)
        # Also read the middle of a chunk, in case ``window`` is really the size of chunks.
        near_queries = torch.full_like(edges, window + window // 2 + 2)
        queries = torch.cat([queries, far_queries, near_queries])

    distances = distances.minimum(queries)
    try:
        visible = mask_function(batch, batch, queries, queries - distances)
    except IndexError:  # the function may index a tensor that has only the first tokens
        return Statement(False, window)

    expected = (distances >= 0) & in_window(distances, window)
    regular_far = torch.equal(visible.expand_as(expected), expected)
    regular = regular_far and torch.equal(first_tokens, _causal(first_tokens, window))
    return Statement(regular, window)


def _causal(like: Tensor, window: int | None) -> Tensor:
    """Return a causal mask with a window, [T, T]."""
    positions = torch.arange(len(like), device=like.device)
    distances = positions[:, None] - positions[None]
    return (distances >= 0) & in_window(distances, window)


def in_window(distances: Tensor, window: int | None) -> Tensor:
    """Return True for keys inside the window; for all keys if there is no window."""
    if window is None:
        return torch.ones_like(distances, dtype=torch.bool)
    return distances < window


def disagreement(layer_mask: Tensor | None, window: int | None) -> str | None:
    """Return how a layer's mask differs from its window argument; None if they agree."""
    if layer_mask is None:
        if window is None:
            return None
        return (
            f"it passes a window of {window} but no mask, so even transformers' own attention "
            "functions compute different results"
        )

    statement: Statement | None = getattr(layer_mask, STATEMENT, None)
    if statement is None:
        return "it has a mask of its own; give attention_mask to cp.batch instead"
    if not statement.regular:
        return "its mask is neither causal nor a sliding window, for example one of chunks"
    if statement.window == window:
        return None
    in_mask = f"a window of {statement.window}" if statement.window else "no window"
    in_layer = f"a window of {window}" if window else "no window"
    return (
        f"its mask has {in_mask}, but its attention is passed {in_layer}, and the ranks use only "
        "that argument; if no document is longer than the window, set sliding_window to None in "
        "the configuration"
    )
