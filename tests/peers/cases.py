"""Batches of tiny models, and what one process computes from them.

A batch has rows of documents. Its labels have -100 at the first token of a document, as
transformers' DataCollatorWithFlattening writes them.
"""

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.parallel.transformers.families import FAMILIES, OTHERS, gradients, tokens

IGNORED = -100
DIVISIBLE = 12
"""The number of labels of a batch is a multiple of this, and so of every number of ranks.

ringmaster rounds the mean number of labels of a rank; with other numbers, this error would hide
all others.
"""
KINDS: dict[str, list[tuple[int, ...]]] = {
    "one document": [(48,)],
    "one document, odd length": [(47,)],
    "packed": [(7, 1, 19, 4, 17)],
    "packed, odd length": [(7, 1, 19, 4, 14)],
    "rows padded at the right": [(24,), (17,)],
    "rows padded at the left": [(24,), (17,)],
    "number of labels not divisible": [(48,)],
    "2 micro-batches": [(48,)],
}
"""The documents of each row, in tokens."""


@dataclass(frozen=True)
class Batch:
    """Tokens and labels ``[B, T]``, the rows' documents as (row, first, end), and the arguments.

    ``arguments`` are position_ids or an attention_mask, which tell a model of the documents.
    """

    ids: Tensor
    labels: Tensor
    documents: tuple[tuple[int, int, int], ...]
    arguments: dict[str, Tensor]

    @property
    def count(self) -> int:
        """Return the number of tokens that have a loss."""
        return int((self.labels[:, 1:] != IGNORED).sum())


@dataclass(frozen=True)
class Case:
    """A family's tiny model on some ranks, the kind of its batch, and its key heads.

    Without ``heads``, there are as many as ranks.
    """

    family: str
    kind: str
    ranks: int = 2
    heads: int = 0

    def batches(self) -> list[Batch]:
        """Return the micro-batches of a step."""
        first = batch_of(self.kind)
        if self.kind != "2 micro-batches":
            return [first]

        # Half the labels, so that the mean over tokens is not the mean of the two means.
        first_labels = first.labels.clone()
        first_labels[:, 24:] = IGNORED
        fewer = _with_remainder(replace(first, labels=first_labels), 0)
        return [first, replace(fewer, ids=tokens(48, seed=5)[0])]


def batch_of(kind: str) -> Batch:
    """Return the batch of a kind of ``KINDS``."""
    rows = KINDS[kind]
    length = max(map(sum, rows))
    at_left = kind == "rows padded at the left"

    ids = torch.zeros(len(rows), length, dtype=torch.long)
    labels = torch.full_like(ids, IGNORED)
    position_ids = torch.zeros_like(ids)
    documents = []
    for row, lengths in enumerate(rows):
        offset = (length - sum(lengths)) * at_left
        row_ids, row_labels = tokens(sum(lengths), seed=3 + row)
        for a, b in pairwise(accumulate(lengths, initial=0)):
            part = slice(offset + a, offset + b)
            ids[row, part] = row_ids[0, a:b]
            labels[row, part] = row_labels[0, a:b]
            labels[row, offset + a] = IGNORED
            position_ids[row, part] = torch.arange(b - a)
            documents.append((row, offset + a, offset + b))

    arguments = {}
    if kind.startswith("packed"):
        arguments = {"position_ids": position_ids}
    elif kind.startswith("rows"):
        arguments = {"attention_mask": (ids != 0).long()}

    batch = Batch(ids, labels, tuple(documents), arguments)
    if kind == "number of labels not divisible":
        return _with_remainder(batch, DIVISIBLE - 1)  # divisible neither by 2 nor by 3
    return _with_remainder(batch, 0)


def _with_remainder(batch: Batch, remainder: int) -> Batch:
    """Remove the first labels until their number has this remainder modulo ``DIVISIBLE``."""
    labels = batch.labels.clone()
    positions = (labels != IGNORED).nonzero()
    for row, column in positions[: (batch.count - remainder) % DIVISIBLE]:
        labels[row, column] = IGNORED
    return replace(batch, labels=labels)


def one_process(model: Any, batches: list[Batch]) -> list[Tensor]:
    """Return logits, loss and gradients of a step, each document alone.

    The loss is the mean over the tokens of all micro-batches; the logits are those of the first,
    as ``valid_logits`` returns them.
    """
    count = sum(batch.count for batch in batches)
    loss = torch.zeros((), dtype=model.dtype)
    all_logits = []
    for batch in batches:
        for row, a, b in batch.documents:
            logits = model(input_ids=batch.ids[row : row + 1, a:b], use_cache=False).logits[0]
            targets = batch.labels[row, a + 1 : b]
            total = F.cross_entropy(logits[:-1], targets, ignore_index=IGNORED, reduction="sum")
            loss = loss + total / count
            if batch is batches[0]:
                all_logits.append(logits.detach())

    return [torch.cat(all_logits), loss.detach(), *gradients(loss, model)]


def valid_logits(logits: Tensor, batch: Batch) -> Tensor:
    """Return the rows of logits ``[B, T, V]`` that belong to documents, ``[N, V]``."""
    return torch.cat([logits[row, a:b] for row, a, b in batch.documents])


def family_cases() -> list[Case]:
    """Every family on two ranks, with one document and with packed ones."""
    cases = []
    for family in [*FAMILIES, *OTHERS]:
        cases += [Case(family, "one document"), Case(family, "packed")]
    return cases


def batch_cases() -> list[Case]:
    """Every kind of batch of a LLaMA on 2, 3 and 4 ranks, and heads that do not divide."""
    cases = []
    for ranks in (2, 3, 4):
        cases += [Case("Llama", kind, ranks) for kind in KINDS]
        cases.append(Case("Llama", "packed", ranks, heads=1))
    return cases


def way_cases() -> list[Case]:
    """The cases of ringmaster's other ways of computing attention."""
    cases = []
    for kind in ("one document", "packed"):
        cases.append(Case("Llama", kind, 4))
    return [*cases, Case("Mistral", "one document", 4), Case("GptOss", "one document", 4)]
