"""The router's loss of models with experts over ranks, against transformers in one process.

One process runs transformers' own forward, loss and router's loss on the whole batch.
"""

from contextlib import nullcontext
from importlib import import_module
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from parallel.comparison import Float64Mode, mean_loss
from parallel.transformers import router, shard
from parallel.transformers.batch import IGNORED
from parallel.transformers.router import load_of
from runtime.errors import UserError
from runtime.ranks import run_ranks
from tests.parallel.transformers.families import (
    EXPERTS,
    averaged,
    errors,
    gradients,
    model_of,
    tokens,
)

WEIGHT = 0.2
"""Weight of the router's loss, so large that an error in it is one of every gradient."""
SPREAD = 0.2
"""Standard deviation of the numbers that are added to the routers weights, which unbalances them."""
FAMILIES = {
    "Qwen3Moe": {},
    "GptOss": {},
    "Mixtral": {**EXPERTS, "experts_implementation": "eager"},
}
LENGTH, LENGTHS = 47, (9, 1, 20, 17)
"""Tokens and documents of a packed sequence; no number of ranks divides it without padding."""
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6}


def precision(dtype):
    return Float64Mode() if dtype == torch.float64 else nullcontext()


def routed(family, heads, dtype=torch.float64):
    """A model with a router's loss, whose routers are far from balanced."""
    model = model_of(
        family,
        heads,
        dtype,
        output_router_logits=True,
        router_aux_loss_coef=WEIGHT,
        **FAMILIES[family],
    )
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("gate.weight", "router.weight", "router.bias")):
                parameter += SPREAD * torch.randn(parameter.shape, generator=generator)
    return model


def packed(length=LENGTH, documents=LENGTHS, seed=3):
    """A packed batch as transformers takes it: positions restart, a document's first has no loss."""
    ids, labels = tokens(length, seed)
    lengths = torch.tensor(documents)
    starts = lengths.cumsum(0) - lengths
    positions = torch.arange(length) - starts.repeat_interleave(lengths)
    return {
        "input_ids": ids,
        "labels": labels.masked_fill(positions == 0, IGNORED),
        "position_ids": positions[None],
    }


def padded():
    """Three rows of which two have padding, as a collator makes them."""
    lengths = torch.tensor([[17], [9], [4]])
    ids, labels = (x.view(3, 17) for x in tokens(51))
    mask = (torch.arange(17) < lengths).long()
    return {
        "input_ids": ids * mask,
        "labels": labels.masked_fill(mask == 0, IGNORED),
        "attention_mask": mask,
    }


BATCHES = {"packed": packed, "padded": padded}


def each_alone(family, heads, batch, lengths, dtype=torch.float64):
    """The naive twin of a packed batch: each document alone, and all their routers' logits.

    Of transformers' models, some ignore where documents begin, unless they have flash attention.
    """
    with precision(dtype):
        model = routed(family, heads, dtype)
        logits, labels, router_logits = [], [], []
        for ids, targets in zip(
            batch["input_ids"].split(lengths, 1), batch["labels"].split(lengths, 1), strict=True
        ):
            output = model(ids, use_cache=False)
            logits.append(output.logits[0, :-1])
            labels.append(targets[0, 1:])
            router_logits.append(output.router_logits)
        gathered = tuple(torch.cat(layer) for layer in zip(*router_logits, strict=True))
        balance = import_module(type(model).__module__).load_balancing_loss_func
        loss = F.cross_entropy(torch.cat(logits), torch.cat(labels), ignore_index=IGNORED)
        loss = loss + WEIGHT * balance(gathered, model.num_experts, model.num_experts_per_tok)
        return [x.double() for x in (loss.detach(), *gradients(loss, model))]


def one_process(family, heads, micro_batches, dtype=torch.float64):
    """The loss and gradients of transformers for micro-batches in sequence, as its trainer has."""
    count = sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in micro_batches)
    with precision(dtype):
        model = routed(family, heads, dtype)
        loss = sum(
            model(**batch, use_cache=False, num_items_in_batch=count).loss
            for batch in micro_batches
        )
        return [x.double() for x in (loss.detach(), *gradients(loss, model))]


def in_both(twin, dtype):
    """What a twin computes in a dtype, and in float64."""
    return [twin(x) for x in sorted({dtype, torch.float64}, key=str)]


def relative_error(mine, truths):
    """The largest error of a tensor; each is its error against the truth that is nearest."""
    return max(map(min, zip(*(errors(mine, truth) for truth in truths), strict=True)))


def on_ranks(family, heads, micro_batches, dtype=torch.float64, group=None, loss_of=None):
    """The same over the ranks of a group."""
    with precision(dtype):
        model = routed(family, heads, dtype)
        cp = shard(model, group or dist.group.WORLD)
        batches = [cp.batch(**batch) for batch in micro_batches]
        count = torch.tensor([int((x.labels != IGNORED).sum()) for x in batches]).sum()
        dist.all_reduce(count)
        losses = []
        for batch in batches:
            output = model(**batch.inputs)
            losses.append((loss_of or plain_loss)(cp, output, batch, count))
        return averaged(sum(losses), model)


def plain_loss(cp, output, batch, count):
    return cp.loss(output, batch, count)


def mean_of_products(cp, output, batch, count):
    """Wrong: the mean of the ranks' own router's losses, as transformers has them."""
    without = cp.loss(output, batch, count, router_aux_loss_coef=0.0)
    return without + WEIGHT * mean_loss(output.aux_loss, 1, dist.group.WORLD)


def padding_counted(cp, output, batch, count):
    """Wrong: the tokens that the layout adds are counted."""
    with patch.object(router, "real_tokens", lambda context: len(context.positions)):
        return cp.loss(output, batch, count)


def compared(rank, world_size):
    """Rank 0's errors of all that these ranks compute."""
    results = {}
    for family in FAMILIES:
        twins = {
            "packed": lambda dtype, family=family: each_alone(
                family, world_size, packed(), LENGTHS, dtype
            ),
            "padded": lambda dtype, family=family: one_process(
                family, world_size, [padded()], dtype
            ),
        }
        for (name, twin), dtype in product(twins.items(), BOUNDS):
            mine = on_ranks(family, world_size, [BATCHES[name]()], dtype)
            if rank == 0:
                results[family, name, dtype] = relative_error(mine, in_both(twin, dtype))
    return results
