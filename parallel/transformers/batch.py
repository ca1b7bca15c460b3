"""Batches as transformers has them, made one packed sequence, and one rank's part of it.

Shapes: B sequences of T tokens, which become one of N packed documents; n of its tokens are this
rank's.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.context import ContextParallel
from parallel.transformers.layers import CONTEXT
from runtime.errors import UserError

IGNORED = -100
"""Label of a token without loss, as in transformers."""


class Positions(NamedTuple):
    """Positions that a model takes by itself, called without any."""

    first: int = 0
    """The first token's, such as padding_idx + 1 in RoBERTa."""
    padding: int | None = None
    """A token that has no position of its own, and does not count for the others."""


FROM_ZERO = Positions()


@dataclass(frozen=True)
class Packed:
    """A whole batch as one sequence, without padding."""

    tokens: dict[str, Tensor]
    """``input_ids``, ``position_ids`` in the documents, and ``labels``: each the one of the next
    token; ``[1, N]``.
    """
    bounds: tuple[int, ...]
    """Cumulative lengths of the documents, from 0 to N."""
    kept: Tensor
    """The tokens that are no padding, ``[B, T]``."""
    first: int = 0
    """Position of a document's first token, unless ``position_ids`` were given."""


@dataclass(frozen=True)
class Batch:
    """One rank's part of a batch."""

    inputs: dict[str, Any]
    """Keyword arguments of the model: this rank's ``input_ids`` and ``position_ids``, ``[1, n]``,
    and its context.
    """
    labels: Tensor
    """The token after each of this rank's tokens, or -100: ``[1, n]``."""
    context: ContextParallel
    """The ranks and documents; its ``positions`` say which tokens are this rank's."""
    whole: Packed


def pack(
    input_ids: Tensor,
    labels: Tensor | None,
    position_ids: Tensor | None,
    documents: Sequence[int] | Tensor | None,
    attention_mask: Tensor | None,
    model_positions: Positions = FROM_ZERO,
) -> Packed:
    """Pack a batch; arguments and errors as for ``Sharded.batch``. Labels are shifted here, before
    any cut.

    ``model_positions`` are those that the model takes by itself.
    """
    for name, x in (
        ("labels", labels),
        ("position_ids", position_ids),
        ("attention_mask", attention_mask),
    ):
        if input_ids.ndim != 2 or (x is not None and x.shape != input_ids.shape):
            shape = None if x is None else tuple(x.shape)
            raise UserError(
                f"input_ids is {tuple(input_ids.shape)} and {name} is {shape}; both must be [B, T]"
            )
    kept = (
        torch.ones_like(input_ids, dtype=torch.bool)
        if attention_mask is None
        else _real_tokens(attention_mask)
    )
    places = kept.long().cumsum(1) - 1  # of each token in its row
    if not kept.any():
        raise UserError("attention_mask leaves no token; give a batch with some")
    _check_holes(kept)
    ids, positions = (
        input_ids[kept],
        (places if position_ids is None else position_ids)[kept],
    )  # [N]
    if documents is None:
        begins = (places[kept] == 0) | (positions.diff(prepend=positions[:1]) != 1)
        bounds = (*begins.nonzero().flatten().tolist(), len(ids))
    else:
        documents = [int(x) for x in documents]
        bounds = tuple(accumulate(documents, initial=0))
        if bounds[-1] != len(ids) or min(documents, default=0) < 1:
            raise UserError(
                f"documents are {tuple(documents)}; give the lengths of the documents, 1 or more, {len(ids)} tokens "
                "together"
            )
        _check_rows(bounds, kept)
    starts = torch.tensor(bounds[:-1], device=ids.device)
    if documents is not None and position_ids is None:
        lengths = torch.tensor(documents, device=ids.device)
        positions = torch.arange(len(ids), device=ids.device) - starts.repeat_interleave(lengths)
    if model_positions.padding is not None and (ids == model_positions.padding).any():
        raise UserError(
            f"input_ids have the padding token {model_positions.padding}, which has no position in this model "
            "and does not count for the others; leave it out by attention_mask"
        )
    positions = _from_first(positions, starts, model_positions.first, position_ids is not None)
    following = torch.full_like(ids, IGNORED)
    if labels is not None:
        following = (
            labels[kept].roll(-1).index_fill(0, (starts - 1) % len(ids), IGNORED)
        )  # of a document's last token
    tokens = {"input_ids": ids, "position_ids": positions, "labels": following}
    return Packed(
        {name: x[None] for name, x in tokens.items()}, bounds, kept, model_positions.first
    )


def _real_tokens(attention_mask: Tensor) -> Tensor:
    """Return the tokens that are no padding, bool [B, T]. Raises UserError: a mask of numbers
    besides 0 and 1.
    """
    others = attention_mask[(attention_mask != 0) & (attention_mask != 1)]
    if len(others):
        raise UserError(
            f"attention_mask holds {others[0].item():g}; it is 1 for tokens and 0 for padding here. Documents that it "
            "numbers are given by position_ids or documents; of a mask that is added to scores give the tokens alone"
        )
    return attention_mask.bool()


def _check_holes(tokens: Tensor) -> None:
    """Raise UserError if padding lies between tokens of a row [B, T]: transformers counts positions
    over it.
    """
    begins = tokens.int().diff(dim=1, prepend=torch.zeros_like(tokens[:, :1], dtype=torch.int)) == 1
    rows = (begins.sum(1) > 1).nonzero().flatten().tolist()
    if rows:
        raise UserError(
            f"attention_mask has padding between the tokens of row {rows[0]}; padding stands before or after them "
            "here: move it there, or give the parts as rows or documents of their own"
        )


def _check_rows(bounds: Sequence[int], tokens: Tensor) -> None:
    """Raise UserError if a document [begin, end) of the packed tokens goes over the end of a row of
    tokens [B, T].
    """
    lengths = tokens.sum(1)
    ends = lengths.cumsum(0)
    for row, end in enumerate(ends[lengths > 0].tolist()):
        if end not in bounds:
            raise UserError(
                f"documents are lengths whose sums pass over the end of row {row}, after {end} tokens, so that a "
                "document would join two rows; let a document end with each row"
            )


def _from_first(positions: Tensor, starts: Tensor, first: int, given: bool) -> Tensor:
    """Let the positions [N] of documents that begin at 0 begin where the model's own do."""
    begins = positions[starts]
    if first == 0 or (given and bool((begins == first).all())):
        return positions
    if bool((begins != 0).any()):
        raise UserError(
            f"position_ids begin a document at {int(begins[begins != 0][0])}, and the model's own begin at {first}; "
            f"let all documents begin at 0 or all at {first}, or leave position_ids out"
        )
    return positions + first


def part(whole: Packed, context: ContextParallel) -> Batch:
    """Return this rank's part; ``context`` has the batch's length and documents. Padding has no
    label.
    """
    mine = {
        name: context.shard(x, 1, IGNORED if name == "labels" else 0)
        for name, x in whole.tokens.items()
    }
    labels = mine.pop("labels")
    context = copy(context)  # a batch's own, by which its forward knows it
    return Batch({**mine, "use_cache": False, CONTEXT: context}, labels, context, whole)


def check_same(whole: Packed, group: dist.ProcessGroup | None) -> None:
    """Raise UserError on all ranks of the group if their tokens, labels or documents differ. One
    collective.
    """
    if group is None:
        return
    hashed = [x[0] for x in whole.tokens.values()] + [torch.tensor(whole.bounds)]
    numbers = [torch.arange(1, len(x) + 1, device=x.device) for x in hashed]
    device = hashed[0].device
    mine = torch.stack(
        [x.to(device) for a, b in zip(hashed, numbers, strict=True) for x in (b[-1], (a * b).sum())]
    )
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    if others := [rank for rank, x in enumerate(every) if not torch.equal(x, every[0])]:
        raise UserError(
            f"input_ids, labels or documents of the group's ranks {others} are not those of its rank 0; give all "
            "ranks that share a sequence the same samples, such as by a sampler whose rank is the group's number"
        )
