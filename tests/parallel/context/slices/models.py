"""Steps of small models, whole or in slices: losses and every gradient, to compare."""

import torch
import torch.distributed as dist

from model.parts.attention import HybridAttention
from model.parts.delta import OneDevice
from parallel import layer_slices
from parallel.context import context_parallel, make_plan
from parallel.recompute import RecomputeConfig, recompute_layers
from tests.model.models import used
from train.context_attention import _cu_seqlens, _uncompiled
from train.objectives.language import NextToken

LENGTH = 24
PACKED = (0, 5, 6, 8, 15, 24)
"""Boundaries of documents: of one token, of fewer than a convolution reads, at a slice's end."""


def batch(vocabulary, documents=None, sequences=1, length=LENGTH):
    """Return tokens, labels of which some are masked, and where documents start."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocabulary, (sequences, length + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, 4:7] = -100
    starts = torch.zeros(sequences, length, dtype=torch.bool)
    starts[:, list((documents or (0, length))[:-1])] = True
    return {"tokens": tokens[:, :-1], "labels": labels, "starts": starts}


def step(
    config,
    slice_len=0,
    *,
    documents=None,
    sequences=1,
    group=None,
    length=LENGTH,
    dtype=torch.float64,
    granularity="full",
    **context,
):
    """Return the loss and every gradient by name, and the bytes that this rank sent.

    ``context`` has the method and its options.
    """
    settings = {"documents": documents, "sequences": sequences, "length": length}
    model, cp, loss_sum = prepared(
        config, slice_len, **settings, group=group, dtype=dtype, granularity=granularity, **context
    )
    loss = loss_sum()
    loss.backward()
    results = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            results[name] = parameter.grad
    if group is not None:
        for x in results.values():
            dist.all_reduce(x, group=group)
    return results, cp.transport.traffic.total


def prepared(
    config,
    slice_len,
    *,
    documents,
    sequences,
    length,
    group,
    dtype,
    granularity,
    method="ulysses",
    **options,
):
    """Return a model, its context parallelism, and a function that computes its loss."""
    cp = context_parallel(method, seq_len=length, group=group, slice_len=slice_len, **options)
    attend = cp.attend
    if config.delta_rule:
        delta = OneDevice(_cu_seqlens)
        if slice_len:
            delta = cp.delta_of_slices(delta)
        elif group is not None:
            delta = _uncompiled(cp.attend_delta, cp.convolve)
        attend = HybridAttention(delta, cp.attend)
    model = used(config, attend, dtype)
    policy = RecomputeConfig(recompute_granularity=granularity)
    if slice_len:
        policy = RecomputeConfig(recompute_granularity="full", layer_chunk_size=slice_len)
    recompute_layers(model.layers, policy)

    packed = documents is not None
    objective = NextToken(
        cp, torch.device("cpu"), reset_position_ids=packed, reset_attention_mask=packed
    )
    data = batch(config.vocabulary, documents, sequences, length)
    local = objective.local(data)
    return model, cp, lambda: objective.loss_sum(model, local)


def planned_bytes(config, rank, size, documents=None, *, length=LENGTH, method, **options):
    """Return the bytes that a rank sends in a step by the plan: every layer's attention forward,
    forward again, and backward.
    """
    plan = make_plan(method, seq_len=length, size=size, documents=documents, **options)
    sizes = {
        "batch": 1,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_query_groups,
        "head_dim": config.head_dim,
        "element_size": 8,
    }
    total = 0
    for window in config.windows:
        attention = plan if window is None else plan.windowed(window)
        cost = attention.cost(rank, **sizes)
        total += 2 * cost.forward.total + cost.backward.total
    return total


def recorded_outputs(patch):
    """Record the outputs of every slice of every layer, each time that it runs."""
    outputs = {}
    run = layer_slices.LayerPass.run

    def recorded(layer_pass, chunk, piece):
        out = run(layer_pass, chunk, piece)
        # With the layer's pass, which stays alive, so that no other pass gets its id.
        key = (id(layer_pass), piece.number)
        outputs.setdefault(key, []).append((out.detach().clone(), layer_pass))
        return out

    patch.setattr(layer_slices.LayerPass, "run", recorded)
    return outputs


def run_again_alike(outputs):
    """Return True if each recorded slice ran twice and computed the same bits."""
    pairs = [(first, again) for (first, _), (again, _) in outputs.values()]
    return bool(pairs) and all(torch.equal(first, again) for first, again in pairs)


def furthest(results, expected):
    """Return the largest difference, relative to each tensor's largest entry.

    The bias of a key shifts all scores of a query, so its gradient is 0 but for rounding.
    """
    assert results.keys() == expected.keys()
    differences = []
    for name, x in expected.items():
        if not name.endswith("wk.bias"):
            differences.append(((results[name] - x).abs().max() / x.abs().max()).item())
    return max(differences)
