"""Moments in host memory: the numbers of AdamW to the bit, and no memory used before it may be."""

from collections import Counter, defaultdict
from itertools import pairwise

import pytest
import torch
from torch import nn

from parallel.data import to_local
from parallel.offload import Slabs, pinned_bytes
from runtime.ranks import run_ranks
from tests.parallel.streams import streams
from tests.parallel.unequal import loss_sum, sharded
from train.checkpoint.api import load_checkpoint, save_checkpoint
from train.checkpoint.manifest import checkpoint_folder
from train.checkpoint.tensors import tensors_of
from train.optimizers import host
from train.optimizers.config import OptimizerConfig, build_optimizer
from train.optimizers.host import HostAdamW
from train.optimizers.moment_formats import MOMENTS

SIZES = ((33, 7), (7,), (50, 40), (3,), (0,), (64,))


def model():
    torch.manual_seed(0)
    return nn.ParameterList(nn.Parameter(torch.randn(size)) for size in SIZES)


def steps(weights, optimizer, count=3):
    """Take steps of several rates, gradients drawn; a parameter has none in the second."""
    generator = torch.Generator().manual_seed(1)
    for i in range(count):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (i + 1)
        for number, weight in enumerate(weights):
            gradient = torch.randn(weight.shape, generator=generator)
            weight.grad = None if (i, number) == (1, 3) else gradient
        optimizer.step()


def trained(moved, count=3):
    weights = model()
    optimizer = build_optimizer(OptimizerConfig(optimizer_cpu_offload=moved), weights)
    assert isinstance(optimizer, HostAdamW) == moved
    steps(weights, optimizer, count)
    return weights, optimizer


def everything(weights, optimizer):
    state = [optimizer.state[weight] for weight in weights]
    return [
        *weights,
        *(
            weight_state[name]
            for weight_state in state
            for name in ("step", "exp_avg", "exp_avg_sq")
        ),
    ]


@pytest.mark.parametrize("allocate", [host.on_host, host.cut])
@pytest.mark.parametrize("piece", [64, 1 << 24])
def test_weights_and_moments_are_those_of_adamw(piece, allocate, monkeypatch):
    monkeypatch.setattr(host, "PIECE", piece)
    monkeypatch.setattr(host, "on_host", allocate)
    actual, want = (everything(*trained(moved)) for moved in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(actual, want, strict=True))


@pytest.mark.parametrize("shards", [1, 8])
def test_slabs_are_powers_of_two_and_take_little_more_than_is_in_them(shards):
    """The moments are those of Llama 2 13B.

    Each tensor in a slab of its own would take two thirds more.
    """
    layer = [5120**2] * 4 + [5120 * 13824] * 3 + [5120] * 2
    counts = [
        4 * count // shards
        for count in (5120 * 32000, *layer * 40, 5120, 5120 * 32000)
        for _ in MOMENTS
    ]
    slabs, intervals_by_slab = Slabs(), defaultdict(list)
    for count in counts:
        number, start = slabs.place(count)
        intervals_by_slab[number].append((start, start + count))
    assert all(size == pinned_bytes(size) for size in slabs.sizes)
    assert sum(slabs.sizes) < 1.08 * sum(counts) < sum(map(pinned_bytes, counts)) / 1.5
    for number, intervals in intervals_by_slab.items():
        assert intervals[-1][1] <= slabs.sizes[number]
        assert all(end <= start for (_, end), (start, _) in pairwise(intervals))


def test_a_moment_has_a_storage_of_its_own_in_memory_that_others_share():
    slabs = Slabs()
    slabs.place(1 << 20)
    first, second = (host.cut(torch.ones(300, 7).T, slabs) for _ in range(2))
    assert first.shape == (7, 300)
    assert first.untyped_storage().nbytes() == first.nbytes
    assert second.data_ptr() - first.data_ptr() == 8704  # 17 times 512


def played(monkeypatch, dropped=None):
    """Steps on streams, one wait of which is left out.

    What is read after them is the computation's.
    """
    weights = model()
    optimizer = build_optimizer(OptimizerConfig(optimizer_cpu_offload=True), weights)
    with streams(monkeypatch, dropped) as device:
        steps(weights, optimizer, 2)
        tensors = [x.clone() for x in everything(weights, optimizer)]
    return device, tensors


def test_nothing_races_and_both_ways_are_busy_at_once(monkeypatch):
    device, tensors = played(monkeypatch)
    assert not device.races
    assert all(
        torch.equal(a, b) for a, b in zip(tensors, everything(*trained(False, 2)), strict=True)
    )
    filled = 2 * sum(size != (0,) for size in SIZES) - 1
    copies = [
        stream for stream, what in device.log if what == "aten::copy_" and stream != "compute"
    ]
    assert Counter(copies) == {"back": 2 * filled, "out": 2 * filled}
    assert copies[:8] == ["back"] * 4 + ["out"] * 2 + ["back"] * 2, (
        "a piece comes before the one before it is updated"
    )


@pytest.mark.parametrize(
    ("dropped", "race"),
    [
        (("back", "compute"), "back writes what compute writes"),
        (("compute", "back"), "compute writes what back writes"),
        (("out", "compute"), "out reads what compute writes"),
        (("back", "out"), "back writes what out reads"),
        (("compute", "out"), "compute reads what out writes"),
    ],
)
def test_every_wait_is_needed(dropped, race, monkeypatch):
    device, _ = played(monkeypatch, dropped)
    assert race in device.races, device.races


def saved_and_loaded(rank, world_size, folder):
    """Return if shards of weights and moments are those of AdamW after two steps.

    The second is behind a checkpoint.
    """
    host.on_host = host.cut  # as beside a GPU
    states = []
    for order in ((False, False), (True, True), (True, False), (False, True)):
        path = folder / "".join(map(str, order))
        for number, moved in enumerate(order):
            model = sharded(world_size)
            optimizer = build_optimizer(OptimizerConfig(optimizer_cpu_offload=moved), model)
            if number:
                load_checkpoint(checkpoint_folder(path, 1), model, optimizer, {})
            loss_sum(model, rank, number).backward()
            optimizer.step()
            if not number:
                save_checkpoint(path, 1, model, optimizer, architecture={}, extra={})
        states.append([x for part in tensors_of(model, optimizer).values() for x in part.values()])
    return all(
        torch.equal(to_local(a), to_local(b))
        for other in states[1:]
        for a, b in zip(*states[:1], other, strict=True)
    )


def test_sharded_moments_go_through_checkpoints_with_and_without(tmp_path):
    assert run_ranks(saved_and_loaded, 2, tmp_path) == [True, True]


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device; make gpu-check runs it"
)
def test_cuda_moments_are_pinned_and_the_same(monkeypatch):
    monkeypatch.setattr(host, "PIECE", 512)
    results = []
    for moved in (True, False):
        weights = model().cuda()
        optimizer = build_optimizer(OptimizerConfig(optimizer_cpu_offload=moved), weights)
        for _ in range(3):
            for weight in weights:
                weight.grad = weight.detach().sin()
            optimizer.step()
        torch.cuda.synchronize()
        results.append([x.cpu() for x in everything(weights, optimizer)])
        if moved:
            assert all(
                optimizer.state[w][name].is_pinned()
                for w in weights
                if w.numel()
                for name in ("exp_avg",)
            )
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
