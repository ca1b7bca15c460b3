"""Pack a transformers batch into one sequence without padding, and cut out one rank's tokens.

Packing comes before cutting for two reasons. Padding would cost attention time, and would unbalance
the ranks, since their layout counts it as tokens. And a label is the *next* token: if the labels
were shifted after the cut, the last token of every rank's chunk would lose its label or get a wrong
one.

Shapes: B rows of T tokens, packed into one sequence of N tokens; n of them are this rank's.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.collectives import find_difference
from parallel.context import ContextParallel
from parallel.transformers.layers import CONTEXT
from runtime.errors import UserError

IGNORED = -100
"""Label of a token that has no loss, as in transformers."""


class Positions(NamedTuple):
    """Rule by which a model computes position ids itself if the caller gives none."""

    first: int = 0
    """Position of the first token, for example padding_idx + 1 in RoBERTa."""
    padding: int | None = None
    """Id of the token that gets no position and is not counted in later positions."""


FROM_ZERO = Positions()


@dataclass(frozen=True)
class PackedBatch:
    """A whole batch packed into one sequence, without padding."""

    tokens: dict[str, Tensor]
    """``input_ids``, ``position_ids`` (counted within each document) and ``labels`` (shifted: the
    next token's), each ``[1, N]``.
    """
    cu_seqlens: tuple[int, ...]
    """Cumulative lengths of the documents, from 0 to N."""
    is_token: Tensor
    """True for tokens, False for padding: bool ``[B, T]``."""
    first_position: int = 0
    """Position of a document's first token if the caller gave no ``position_ids``."""


@dataclass(frozen=True)
class Batch:
    """One rank's part of a batch."""

    inputs: dict[str, Any]
    """Keyword arguments of the model: this rank's ``input_ids`` and ``position_ids``, ``[1, n]``,
    and the batch's context.
    """
    labels: Tensor
    """Label of the token after each of this rank's tokens, or -100: ``[1, n]``."""
    context: ContextParallel
    """The batch's ranks and documents; ``context.positions`` has the sequence positions of this
    rank's tokens.
    """
    whole: PackedBatch


def pack(
    input_ids: Tensor,
    labels: Tensor | None,
    position_ids: Tensor | None,
    documents: Sequence[int] | Tensor | None,
    attention_mask: Tensor | None,
    model_positions: Positions = FROM_ZERO,
) -> PackedBatch:
    """Pack a batch into one sequence, with shifted labels.

    Arguments and errors are as in ``Sharded.batch``; ``model_positions`` describes the positions
    that the model computes itself.
    """
    _check_shapes(input_ids, labels, position_ids, attention_mask)
    if attention_mask is None:
        is_token = torch.ones_like(input_ids, dtype=torch.bool)
    else:
        is_token = _tokens_of_mask(attention_mask)
    if not is_token.any():
        raise UserError("attention_mask leaves no token; give a batch with at least one token")
    _check_holes(is_token)

    row_positions = (is_token.long().cumsum(1) - 1)[is_token]  # [N], counted from 0 in each row
    ids = input_ids[is_token]  # [N]
    positions = row_positions if position_ids is None else position_ids[is_token]  # [N]

    if documents is None:
        is_start = (row_positions == 0) | (positions.diff(prepend=positions[:1]) != 1)
        cu_seqlens = (*is_start.nonzero().flatten().tolist(), len(ids))
    else:
        documents = [int(length) for length in documents]
        cu_seqlens = tuple(accumulate(documents, initial=0))
        if cu_seqlens[-1] != len(ids) or min(documents, default=0) < 1:
            raise UserError(
                f"documents is {tuple(documents)}; give the length of each document, 1 or more, "
                f"with a sum of {len(ids)}, the number of tokens in the batch"
            )
        _check_rows(cu_seqlens, is_token)

    starts = torch.tensor(cu_seqlens[:-1], device=ids.device)
    if documents is not None and position_ids is None:
        lengths = torch.tensor(documents, device=ids.device)
        positions = torch.arange(len(ids), device=ids.device) - starts.repeat_interleave(lengths)

    if model_positions.padding is not None and (ids == model_positions.padding).any():
        raise UserError(
            f"input_ids contains the padding token {model_positions.padding}, but this model gives "
            "it no position and skips it when it counts those of other tokens; set attention_mask "
            "to 0 for it"
        )
    positions = _shift_to_first(
        positions, starts, model_positions.first, from_caller=position_ids is not None
    )

    next_labels = torch.full_like(ids, IGNORED)
    if labels is not None:
        last_tokens = (starts - 1) % len(ids)  # each document's last token; last document first
        next_labels = labels[is_token].roll(-1).index_fill(0, last_tokens, IGNORED)
    tokens = {
        "input_ids": ids[None],
        "position_ids": positions[None],
        "labels": next_labels[None],
    }  # [1, N]
    return PackedBatch(tokens, cu_seqlens, is_token, model_positions.first)


def _check_shapes(
    input_ids: Tensor,
    labels: Tensor | None,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
) -> None:
    """Raise UserError unless all tensors have the shape [B, T]."""
    tensors = {"labels": labels, "position_ids": position_ids, "attention_mask": attention_mask}
    for name, x in tensors.items():
        if input_ids.ndim != 2 or (x is not None and x.shape != input_ids.shape):
            shape = None if x is None else tuple(x.shape)
            raise UserError(
                f"input_ids has shape {tuple(input_ids.shape)}, but {name} has shape {shape}; give "
                "both as [B, T]"
            )


def _tokens_of_mask(attention_mask: Tensor) -> Tensor:
    """Return the mask as bool [B, T]. Raises UserError for numbers other than 0 and 1."""
    others = attention_mask[(attention_mask != 0) & (attention_mask != 1)]
    if len(others):
        raise UserError(
            f"attention_mask contains {others[0].item():g}, but may contain only 1 for tokens and "
            "0 for padding; do not give a mask that is added to scores, and separate documents by "
            "position_ids or documents instead"
        )
    return attention_mask.bool()


def _check_holes(is_token: Tensor) -> None:
    """Raise UserError if padding lies between tokens of a row [B, T].

    transformers counts positions across such a hole, which packing would close.
    """
    no_token = torch.zeros_like(is_token[:, :1], dtype=torch.int)
    is_start = is_token.int().diff(dim=1, prepend=no_token) == 1
    rows = (is_start.sum(1) > 1).nonzero().flatten().tolist()
    if rows:
        raise UserError(
            f"attention_mask has padding between the tokens of row {rows[0]}; padding must come "
            "before or after them: move it there, or give the parts as separate rows or documents"
        )


def _check_rows(cu_seqlens: Sequence[int], is_token: Tensor) -> None:
    """Raise UserError if a document continues from one row [B, T] into the next."""
    lengths = is_token.sum(1)
    row_ends = lengths.cumsum(0)[lengths > 0].tolist()
    for row, end in enumerate(row_ends):
        if end not in cu_seqlens:
            raise UserError(
                f"documents has no document that ends with row {row}, after {end} tokens, so one "
                "document would continue in the next row; make a document end with each row"
            )


def _shift_to_first(positions: Tensor, starts: Tensor, first: int, *, from_caller: bool) -> Tensor:
    """Shift positions [N] of documents that start at 0 to the model's first position."""
    first_positions = positions[starts]
    if first == 0 or (from_caller and bool((first_positions == first).all())):
        return positions
    if bool((first_positions != 0).any()):
        wrong = int(first_positions[first_positions != 0][0])
        raise UserError(
            f"position_ids begin a document at {wrong}, but the model's own positions begin at "
            f"{first}; let all documents begin at 0 or all at {first}, or leave out position_ids"
        )
    return positions + first


def shard_batch(packed: PackedBatch, context: ContextParallel) -> Batch:
    """Return this rank's tokens of a packed batch; padding that the layout adds has no label.

    ``context`` must be for the batch's length and documents.
    """
    input_ids = context.shard(packed.tokens["input_ids"], 1, 0)
    position_ids = context.shard(packed.tokens["position_ids"], 1, 0)
    labels = context.shard(packed.tokens["labels"], 1, IGNORED)

    # All batches of one length share a context; a copy identifies this batch's forward pass.
    context = copy(context)
    inputs = {
        "input_ids": input_ids,
        "position_ids": position_ids,
        "use_cache": False,
        CONTEXT: context,
    }
    return Batch(inputs, labels, context, packed)


def check_same(packed: PackedBatch, group: dist.ProcessGroup | None) -> None:
    """Raise UserError on all ranks of the group if their batches differ. Collective."""
    tensors = {**packed.tokens, "documents": torch.tensor(packed.cu_seqlens)}
    difference = find_difference(tensors, group)
    if difference is not None:
        raise UserError(
            f"{', '.join(difference.names)} differ between the group's rank 0 and its ranks "
            f"{difference.ranks}; give all ranks that share a sequence the same samples, for "
            "example with a sampler whose rank is the group's number"
        )
