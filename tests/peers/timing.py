"""Seconds of a step of a larger LLaMA over ranks, by both packages, in turns."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from parallel.transformers import shard
from tests.parallel.transformers.families import model_of
from tests.peers.cases import Batch
from tests.peers.contestants import LONGMESH, managed, runtime_of

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 8192,
}
LENGTHS = {"one document": (4096,), "8 documents": (1500, 700, 96, 300, 900, 100, 450, 50)}
"""Documents of the timed sequences, in tokens."""
METHODS = {"one document": ("ulysses", "zigzag"), "8 documents": ("ulysses", "exchange")}
REPEATS = 9
SETTLE = 1
"""Number of first steps that do not count."""
MAX_DIFFERENCE = 1e-4
"""Largest relative difference of two contestants' losses."""


def batch_of(lengths: tuple[int, ...]) -> Batch:
    """Return a sequence of documents with an even number of labels.

    Each token but a document's first has a label, and perhaps the second of the sequence. With an
    odd number, ringmaster's loss on 2 ranks would be off by 1 / 4,096.
    """
    generator = torch.Generator().manual_seed(sum(lengths))
    ids = torch.randint(3, 40, (1, sum(lengths)), generator=generator)
    labels = ids.clone()
    documents = []
    start = 0
    for length in lengths:
        labels[0, start] = -100
        documents.append((0, start, start + length))
        start += length
    if (sum(lengths) - len(lengths)) % 2:
        labels[0, 1] = -100
    position_ids = torch.cat([torch.arange(length) for length in lengths])[None]
    arguments = {"position_ids": position_ids}
    if len(lengths) == 1:
        arguments = {}
    return Batch(ids, labels, tuple(documents), arguments)


def step_of(name: str, batch: Batch) -> Callable[[], float]:
    """Return a step of a contestant, forward and backward, which returns the loss."""
    model = model_of("Llama", 4, torch.float32, **SIZES)
    if name == "ringmaster, ulysses":
        return _ringmaster_step(model, batch)
    cp = shard(model, dist.group.WORLD, method=name.rpartition(" ")[2])

    def step() -> float:
        model.zero_grad()
        local = cp.batch(batch.ids, batch.labels, **batch.arguments)
        loss = cp.loss(model(**local.inputs), local)
        loss.backward()
        return float(loss.detach())

    return step


def _ringmaster_step(model: Any, batch: Batch) -> Callable[[], float]:
    runtime = runtime_of(model, "ulysses")
    managed(model, runtime, 1).__enter__()
    count = torch.tensor(batch.count)

    def step() -> float:
        model.zero_grad()
        inputs = {"input_ids": batch.ids, "labels": batch.labels, **batch.arguments}
        loss = model(**inputs, num_items_in_batch=count).loss
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    return step


def measure(rank: int, world_size: int) -> list[dict[str, Any]]:
    """Return the median seconds of a step of each contestant; all take turns."""
    torch.set_num_threads(1)
    rows = []
    for kind, lengths in LENGTHS.items():
        batch = batch_of(lengths)
        names = ["ringmaster, ulysses", *(f"{LONGMESH}, {method}" for method in METHODS[kind])]
        steps = {name: step_of(name, batch) for name in names}
        losses = {name: step() for name, step in steps.items()}
        first = losses[names[0]]
        for name, loss in losses.items():
            assert abs(loss - first) <= MAX_DIFFERENCE * abs(first), (kind, name, loss, first)

        seconds: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(REPEATS + SETTLE):
            for index in range(len(names)):
                name = names[(index + turn) % len(names)]
                dist.barrier()
                start = time.perf_counter()
                steps[name]()
                dist.barrier()
                if turn >= SETTLE:
                    seconds[name].append(time.perf_counter() - start)
        for name in names:
            rows.append(_time_row(kind, name, seconds[name], losses[name]))
    return rows


def _time_row(kind: str, name: str, seconds: list[float], loss: float) -> dict[str, Any]:
    return {
        "kind": kind,
        "contestant": name,
        "median": median(seconds),
        "fastest": min(seconds),
        "slowest": max(seconds),
        "loss": loss,
    }
