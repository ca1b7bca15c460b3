"""No policy changes a loss or a gradient; each computes again and keeps what it says."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import kernels.loss
from model.decoder import Decoder
from model.parts.attention import sdpa
from model.parts.rotary import Rotary
from model.registry import initial_weight
from parallel import offload
from parallel.context import context_parallel
from parallel.data import init_parameters, shard_model
from parallel.offload import ON_DEVICE, Layer
from parallel.recompute import ATTENTION, RecomputeConfig, RecomputeError, recompute_layers
from runtime.ranks import run_ranks
from tests.model.models import model_config
from train.objectives.language import NextToken

MODEL = model_config(
    num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, vocab_size=37
)
LENGTH, SEED = 24, 3
FORWARDS = {"none": 1, "full": 2, "selective": 2, "attention_boundary": 1}
"""Attention forwards per layer and step of each policy."""


class Attentions(TorchDispatchMode):
    """Counts the attention forwards that are computed."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.name() in ATTENTION
        return func(*args, **(kwargs or {}))


def batch():
    tokens = torch.randint(37, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    labels = tokens[:, 1:].clone()
    labels[1, 4:9] = -100
    return {"tokens": tokens[:, :-1], "labels": labels}


def config(granularity, **settings):
    return RecomputeConfig(recompute_granularity=granularity, **settings)


def step(chosen, method="striped", attend=None):
    """Loss and gradients of one process, float64."""
    cp = context_parallel(method, seq_len=LENGTH)
    model = Decoder(MODEL, attend or cp.attend)
    model.init_weights(SEED)
    recompute_layers(model.double().layers, chosen)
    objective = NextToken(cp, torch.device("cpu"), chosen.loss_chunk_size)
    loss = objective.loss_sum(model, objective.local(batch()))
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def furthest(got, want):
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True))


def same(got, want):
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("granularity", FORWARDS)
def test_a_policy_changes_no_bit_and_repeats_what_it_says_also_in_chunks(granularity):
    chunks = {"ffn_chunk_size": 7, "loss_chunk_size": 5}  # neither divides the 48 tokens
    for attend, chunked in ((None, False), (sdpa, False), (None, True)):
        with Attentions() as attentions:
            got = step(config(granularity, **(chunks if chunked else {})), attend=attend)
        want = step(config("none"), attend=attend)
        assert furthest(got, want) < 1e-14 if chunked else same(got, want)
        assert attentions.count == MODEL.num_layers * FORWARDS[granularity]


@pytest.mark.parametrize("size", ["ffn_chunk_size", "loss_chunk_size"])
def test_a_dropped_chunk_would_be_noticed(size, monkeypatch):
    whole = step(config("none"))
    chunks = kernels.loss._chunks
    monkeypatch.setattr(kernels.loss, "_chunks", lambda x, size: list(chunks(x, size))[:-1])
    with (
        monkeypatch.context() as patch
    ):  # rows that nothing fills would be whatever the memory held
        patch.setattr(Tensor, "new_empty", Tensor.new_zeros)
        assert furthest(step(config("none", **{size: 7})), whole) > 1e-3


def layer_output(chosen):
    """One layer's output, and the tensors that autograd's own store holds.

    It holds them between forward and backward.
    """
    cp = context_parallel("striped", seq_len=LENGTH)
    model = Decoder(MODEL, cp.attend)
    model.init_weights(SEED)
    recompute_layers(model.layers, chosen)
    weights = {p.data_ptr() for p in model.parameters()}
    rotary = Rotary(cp.positions, MODEL.head_dim, MODEL, torch.float32)
    x = torch.randn(2, LENGTH, MODEL.hidden_size, requires_grad=True)
    saved_tensors = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved_tensors.append(t) or t, lambda t: t
    ):
        out = model.layers[0](x, rotary)
    # torch before 2.13 keeps an empty tensor besides
    return out, [t for t in saved_tensors if t.numel() and t.data_ptr() not in weights]


@pytest.mark.parametrize("granularity", ["full", "attention_boundary"])
def test_a_layer_keeps_its_input(granularity):
    assert [tuple(t.shape) for t in layer_output(config(granularity))[1]] == [
        (2, LENGTH, MODEL.hidden_size)
    ]
    everything = sum(t.numel() for t in layer_output(config("none"))[1])
    assert everything > 10 * 2 * LENGTH * MODEL.hidden_size


@pytest.mark.parametrize(("granularity", "num_kept"), [("full", 1), ("attention_boundary", 3)])
def test_offload_moves_all_that_is_kept(granularity, num_kept, monkeypatch):
    moved = []
    monkeypatch.setattr(
        offload, "ON_DEVICE", 1
    )  # so that the first of two layers is read from host memory
    pack = Layer.pack
    monkeypatch.setattr(Layer, "pack", lambda layer, x: moved.append(x.shape) or pack(layer, x))
    assert same(step(config(granularity, recompute_offload=True)), step(config("none")))
    heads = (2, LENGTH, MODEL.num_attention_heads)
    of_a_layer = [
        (2, LENGTH, MODEL.hidden_size),
        (*heads, MODEL.head_dim),
        heads,
    ]  # its input, out, lse
    assert [tuple(shape) for shape in moved if shape.numel()] == of_a_layer[
        :num_kept
    ] * MODEL.num_layers


def by_hand(q, k, v):
    """Attention of many operators, each of which would be computed again."""
    k, v = (x.repeat_interleave(2, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) + torch.full(
        (LENGTH, LENGTH), float("-inf")
    ).triu(1)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1).to(v.dtype), v)


def test_an_attention_that_cannot_be_kept_is_refused():
    with pytest.raises(RecomputeError, match="not a single operator"):
        step(config("attention_boundary"), attend=by_hand)
    step(config("full"), attend=by_hand)


def test_what_was_kept_serves_one_backward():
    out, _ = layer_output(config("attention_boundary"))
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="for one backward"):
        out.sum().backward()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss_chunk_size": -1}, "loss_chunk_size is -1"),
        ({"ffn_chunk_size": -5}, "ffn_chunk_size is -5"),
        ({"recompute_offload": True}, "recompute_granularity is none"),
        (
            {"recompute_offload": True, "recompute_granularity": "selective"},
            "to full or attention_boundary",
        ),
    ],
)
def test_contradictions_are_refused(settings, words):
    with pytest.raises(RecomputeError, match=words):
        RecomputeConfig(**settings)


def sharded_step(chosen, world_size, bf16):
    """As `step`, over context-parallel ranks that share the weights too.

    Return the attention forwards of this rank too.
    """
    cp = context_parallel("zigzag", seq_len=LENGTH, group=dist.group.WORLD)
    with torch.device("meta"):
        model = Decoder(MODEL, cp.attend)
    recompute_layers(model.layers, chosen)
    shard_model(model, model.layers, init_device_mesh("cpu", (world_size,)), bf16=bf16)
    init_parameters(
        model,
        torch.device("cpu"),
        lambda name, shape, part: initial_weight(MODEL, name, shape, SEED, part),
    )
    objective = NextToken(cp, torch.device("cpu"), chosen.loss_chunk_size)
    with Attentions() as attentions:
        loss = objective.loss_sum(model, objective.local(batch()))
        loss.backward()
    gradients = [p.grad.full_tensor() for p in model.parameters() if isinstance(p.grad, DTensor)]
    return [loss.detach(), *gradients], attentions.count


CHUNKED = {"loss_chunk_size": 5, "ffn_chunk_size": 7}


def on_two_ranks(rank, world_size, bf16):
    results = {name: sharded_step(config(name), world_size, bf16) for name in FORWARDS}
    offload.ON_DEVICE = 1  # so that the first of two layers is read from host memory
    for name in ("full", "attention_boundary"):
        assert same(
            sharded_step(config(name, recompute_offload=True), world_size, bf16)[0],
            results["none"][0],
        ), name
    return results | {
        f"{name} in chunks": sharded_step(config(name, **CHUNKED), world_size, bf16)
        for name in FORWARDS
    }


@pytest.mark.parametrize("bf16", [False, True])
def test_with_context_parallelism_and_sharded_weights(bf16):
    for steps in run_ranks(on_two_ranks, 2, bf16):
        want, _ = steps["none"]
        assert len(want) == 1 + len(list(Decoder(MODEL).parameters()))
        for name, forwards in FORWARDS.items():
            got, count = steps[name]
            assert same(got, want), name
            assert count == steps[f"{name} in chunks"][1] == MODEL.num_layers * forwards
            assert furthest(steps[f"{name} in chunks"][0], want) < (2**-7 if bf16 else 1e-6)


def exchanged(rank, world_size):
    """Every policy's loss and gradients, and the share of an exchange that is repeated.

    It is the forward's exchange of heads, which the backward repeats.
    """
    results = {}
    for name in FORWARDS:
        cp = context_parallel("ulysses", seq_len=LENGTH, group=dist.group.WORLD)
        model = Decoder(MODEL, cp.attend)
        model.init_weights(SEED)
        recompute_layers(model.layers, config(name))
        objective = NextToken(cp, torch.device("cpu"))
        loss = objective.loss_sum(model, objective.local(batch()))
        forward = cp.transport.traffic.total
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        results[name] = (
            [loss.detach(), *gradients],
            (cp.transport.traffic.total - 2 * forward) / forward,
        )
    return results


def test_the_heads_exchanged_back_are_kept_at_the_attention_boundary():
    """Going there, q and twice the KV heads, is done again; coming back, as many as q, is not."""
    share_sent = (MODEL.num_attention_heads + 2 * MODEL.query_groups) / (
        2 * MODEL.num_attention_heads + 2 * MODEL.query_groups
    )
    for results in run_ranks(exchanged, 2):
        assert all(same(got, results["none"][0]) for got, _ in results.values())
        again = {name: more for name, (_, more) in results.items()}
        assert again["none"] == 0
        assert again["full"] == 1
        assert again["attention_boundary"] == pytest.approx(share_sent)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device; make gpu-check runs it"
)
@pytest.mark.parametrize("granularity", ["full", "attention_boundary"])
def test_cuda_offload_frees_the_device(granularity):
    shape = replace(MODEL, num_layers=6, hidden_size=256)
    tokens, results, bytes_held = torch.randint(37, (1, 4096), device="cuda"), [], []
    for moved in (False, True):
        model = Decoder(shape)
        model.init_weights(SEED)
        recompute_layers(model.layers, config(granularity, recompute_offload=moved))
        model.to("cuda", torch.bfloat16)
        before = torch.cuda.memory_allocated()
        loss = model(tokens).float().square().sum()
        bytes_held.append(torch.cuda.memory_allocated() - before)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    inputs = (shape.num_layers - ON_DEVICE) * tokens.numel() * shape.hidden_size * 2
    assert bytes_held[0] - bytes_held[1] >= 0.9 * inputs * (
        2 if granularity == "attention_boundary" else 1
    )
    assert furthest(results[1], results[0]) < 2**-8
