"""A training step of a model over ranks, by Longmesh and by axolotl-ringmaster.

Gradients are averaged over the ranks, as FSDP2 does, for which ringmaster is documented; the
reported loss is the ranks' mean.

ringmaster 0.2.7 is called as its own tests call it on a CPU (tests/test_attention_masks_cp.py of
its source distribution): ``setup`` with ``device_type="cpu"`` and ``inner_attn="sdpa"``, and for
the ring ``make_ring_attention("math", "math", ...)``, whose blocks need no flash attention. Its
ContextParallelContextManager shards the batch and counts the labels.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.transformers import shard
from tests.peers.cases import Batch, valid_logits

Step = Callable[[Any, list[Batch]], tuple[Tensor, Tensor]]
"""Function that computes gradients of a step, and returns the first logits and the loss."""


def longmesh(model: Any, batches: list[Batch], method: str = "exchange") -> tuple[Tensor, Tensor]:
    """Compute a step by ``shard``, ``batch`` and ``loss``."""
    cp = shard(model, dist.group.WORLD, method=method)
    count = torch.tensor(sum(batch.count for batch in batches))
    total = torch.zeros(())
    all_logits = []
    for batch in batches:
        local = cp.batch(batch.ids, batch.labels, **batch.arguments)
        output = model(**local.inputs)
        loss = cp.loss(output, local, count)
        loss.backward()
        total += loss.detach()
        all_logits.append(valid_logits(cp.gather(output.logits.detach()), batch))
    return all_logits[0], total


def runtime_of(model: Any, backend: str, way: str = "allgather", load_balance: str = "none") -> Any:
    """Set ringmaster up for a model; return its runtime."""
    import ringmaster
    from ringmaster.strategies.ring import make_ring_attention
    from ringmaster.strategies.usp import make_usp_attention
    from transformers import AttentionInterface

    config = ringmaster.RingmasterConfig(
        size=dist.get_world_size(),
        backend=ringmaster.Backend(backend),
        rotate_method=ringmaster.RotateMethod(way),
        load_balance=ringmaster.LoadBalance(load_balance),
    )
    if backend == "usp":
        config.ulysses_size, config.ring_size = 2, dist.get_world_size() // 2

    runtime = ringmaster.setup(
        config,
        num_kv_heads=model.config.num_key_value_heads,
        device_type="cpu",
        inner_attn="sdpa",
    )
    makers = {"ring": make_ring_attention, "usp": make_usp_attention}
    if backend in makers:
        attention = makers[backend]("math", "math", config.rotate_method)
        AttentionInterface.register(runtime.attn_implementation, attention)
    model.set_attn_implementation(runtime.attn_implementation)
    model.config.use_cache = False
    ringmaster.wire_recurrent_layers(model)
    return runtime


def managed(model: Any, runtime: Any, num_batches: int) -> AbstractContextManager[Any]:
    """Return ringmaster's context manager, within which the model takes whole batches."""
    import ringmaster

    return ringmaster.ContextParallelContextManager(
        [model],
        runtime.cp_group,
        gradient_accumulation_steps=num_batches,
        load_balance=runtime.shard_load_balance,
    )


def ringmaster_step(model: Any, batches: list[Batch], **options: str) -> tuple[Tensor, Tensor]:
    """Compute a step within ringmaster's ContextParallelContextManager."""
    runtime = runtime_of(model, **options)
    count = torch.tensor(sum(batch.count for batch in batches))
    total = torch.zeros(())
    all_logits = []
    with managed(model, runtime, len(batches)):
        for batch in batches:
            inputs = {"input_ids": batch.ids, "labels": batch.labels, **batch.arguments}
            output = model(**inputs, num_items_in_batch=count)
            output.loss.backward()
            total += output.loss.detach()
            logits = _gathered(output.logits, runtime.shard_load_balance)
            all_logits.append(valid_logits(logits, batch))
    return all_logits[0], total


def quickstart(model: Any, batches: list[Batch]) -> tuple[Tensor, Tensor]:
    """Compute a step as in the quickstart of ringmaster's README."""
    from ringmaster.adapters.raw import context_parallel_region

    runtime_of(model, backend="ulysses")
    (batch,) = batches
    inputs = {"input_ids": batch.ids, "labels": batch.labels, **batch.arguments}
    with context_parallel_region(inputs) as local:
        output = model(**local)
    output.loss.backward()
    return valid_logits(_gathered(output.logits, "contiguous"), batch), output.loss.detach()


def _gathered(logits: Tensor, layout: str) -> Tensor:
    """Return the logits of all ranks, ``[B, T, V]``, in the order of the tokens."""
    size = dist.get_world_size()
    local = logits.detach().contiguous()
    shards = [torch.empty_like(local) for _ in range(size)]
    dist.all_gather(shards, local)
    if layout != "head_tail":
        return torch.cat(shards, 1)

    heads: list[Tensor] = []
    tails: list[Tensor] = []
    for part in shards:
        head, tail = part.chunk(2, dim=1)
        heads.append(head)
        tails.insert(0, tail)
    return torch.cat(heads + tails, 1)


LONGMESH = "longmesh"
ULYSSES = "ringmaster, Ulysses"
RING = "ringmaster, ring"
STEPS: dict[str, Step] = {
    LONGMESH: longmesh,
    ULYSSES: partial(ringmaster_step, backend="ulysses"),
    RING: partial(ringmaster_step, backend="ring"),
}
WAYS: dict[str, Step] = {
    "ring by all-gather": partial(ringmaster_step, backend="ring"),
    "ring by point to point": partial(ringmaster_step, backend="ring", way="alltoall"),
    "ring, balanced by head and tail": partial(
        ringmaster_step, backend="ring", load_balance="head_tail"
    ),
    "ring, balanced as DistFlashAttention": partial(
        ringmaster_step, backend="ring", load_balance="distflash"
    ),
    "Ulysses 2 x ring 2": partial(ringmaster_step, backend="usp"),
    "Ulysses, quickstart of its README": quickstart,
}
"""Ringmaster's other ways, which the second table compares on 4 ranks."""
