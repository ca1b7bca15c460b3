"""Deliberate errors of log-probabilities over ranks, which tests must see."""

from contextlib import contextmanager, nullcontext
from importlib import import_module

import torch
import torch.distributed as dist
import torch.nn.functional as F

from parallel.transformers.batch import IGNORED

log_probs = import_module("parallel.transformers.log_probs")
shard = import_module("parallel.transformers.shard")


@contextmanager
def replaced(module, name, wrap):
    """Replace a function of a module by a wrapper of it."""
    plain = getattr(module, name)
    setattr(module, name, wrap(plain))
    try:
        yield
    finally:
        setattr(module, name, plain)


def cut_in_order(shard_batch):
    """The completion mask is cut in the order of tokens, and the tokens by the method."""

    def wrong(packed, context):
        batch = shard_batch(packed, context)
        size = batch.labels.shape[1]
        labels = packed.tokens["labels"]
        padding = size * context.group.size() - labels.shape[1]
        labels = F.pad(labels, (0, padding), value=IGNORED)
        part = labels.chunk(context.group.size(), 1)[context.group.rank()]
        return type(batch)(batch.inputs, part, batch.context, batch.whole)

    return wrong


def sums_per_rank(gather_rows):
    """A rank sums the log-probabilities of its own tokens only."""

    def wrong(x, batch):
        rows = gather_rows(x, batch)
        count = batch.whole.cu_seqlens[-1]
        is_local = torch.zeros(count, dtype=torch.bool)
        positions = batch.context.positions
        is_local[positions[positions < count]] = True
        local_rows = torch.zeros_like(batch.whole.is_token)
        local_rows[batch.whole.is_token] = is_local
        return rows * local_rows[..., None]

    return wrong


def others_reference(gather_rows):
    """The reference's log-probabilities are those of the next rank's tokens."""

    def wrong(x, batch):
        if torch.is_grad_enabled():
            return gather_rows(x, batch)
        group = batch.context.group
        shards = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(shards, x.contiguous(), group=group)
        return gather_rows(shards[(group.rank() + 1) % group.size()], batch)

    return wrong


MISTAKES = {
    "completion mask cut otherwise than labels": (shard, "shard_batch", cut_in_order),
    "sums per rank": (log_probs, "gather_rows", sums_per_rank),
    "reference from other ranks' tokens": (log_probs, "gather_rows", others_reference),
}


def mistaken(name):
    """Make a mistake until the block ends; none if the name is None."""
    return nullcontext() if name is None else replaced(*MISTAKES[name])
