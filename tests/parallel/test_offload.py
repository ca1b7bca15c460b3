"""Copies to host memory and back beside the computation.

On stubbed streams, no memory is used before it may be.
"""

import warnings
from collections import Counter

import pytest
import torch

from model.decoder import Decoder
from model.parts.attention import sdpa
from parallel import offload
from parallel.offload import ON_DEVICE, Offload
from parallel.recompute import RecomputeConfig, recompute_layers
from tests.model.models import model_config
from tests.parallel.streams import streams

MODEL = model_config(
    num_layers=4, hidden_size=32, num_attention_heads=4, num_query_groups=2, vocab_size=37
)
KEPT = {"full": 1, "attention_boundary": 3}
"""Tensors that a layer keeps."""
TOKENS = torch.randint(37, (2, 24), generator=torch.Generator().manual_seed(1))


def model_of(granularity, moved):
    model = Decoder(MODEL, sdpa)
    model.init_weights(3)
    recompute_layers(
        model.layers, RecomputeConfig(recompute_granularity=granularity, recompute_offload=moved)
    )
    return model


def gradients(model):
    model.zero_grad()
    model(TOKENS.to(next(model.parameters()).device)).square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.fixture
def pools(monkeypatch):
    offloads = []
    init = Offload.__init__
    monkeypatch.setattr(Offload, "__init__", lambda self: offloads.append(self) or init(self))
    return offloads


def buffers(pools):
    return sorted(x.data_ptr() for pool in pools for idle in pool.idle.values() for x in idle)


@pytest.mark.parametrize("granularity", KEPT)
def test_nothing_races_and_no_bit_changes(granularity, monkeypatch, pools):
    want = gradients(model_of(granularity, False))
    with streams(monkeypatch) as device:
        model = model_of(granularity, True)
        buffers_by_step = []
        for _ in range(2):
            device.log.clear()
            assert all(torch.equal(a, b) for a, b in zip(gradients(model), want, strict=True))
            copies = Counter(device.log)
            assert copies["out", "aten::copy_"] == KEPT[granularity] * MODEL.num_layers
            assert copies["back", "aten::copy_"] == KEPT[granularity] * (
                MODEL.num_layers - ON_DEVICE
            )
            buffers_by_step.append(buffers(pools))
            assert (
                buffers_by_step[-1] == buffers_by_step[0]
            )  # all are idle again, and the first step made all
            assert len(buffers_by_step[0]) == KEPT[granularity] * MODEL.num_layers
    assert not device.races


@pytest.mark.parametrize(
    ("dropped", "race"),
    [
        (("out", "compute"), "out reads what compute writes"),
        (("compute", "out"), "compute frees what out reads"),
        (("back", "compute"), "back writes what compute writes"),
        (("compute", "back"), "compute reads what back writes"),
        (("compute", "back"), "out writes what back reads"),  # a buffer that is used again
    ],
)
def test_every_wait_is_needed(dropped, race, monkeypatch):
    with streams(monkeypatch, dropped) as device:
        model = model_of("full", True)
        for _ in range(2):
            gradients(model)
    assert race in device.races


def lead(log):
    """Operators of the computation between the call for each copy back and the wait for it."""
    called, leads, done = list[int](), list[int](), 0
    for stream, what in log:
        done += stream == "compute" and what.startswith("aten::") and "wait" not in what
        if (stream, what) == ("back", "aten::copy_"):
            called.append(done)
        if (stream, what) == ("compute", "waits for back"):
            leads.append(done - called.pop(0))
    return leads


@pytest.mark.parametrize("ahead", [True, False])
def test_a_layer_is_fetched_while_the_one_after_it_computes(ahead, monkeypatch):
    size = TOKENS.numel() * MODEL.hidden_size * 4
    monkeypatch.setattr(offload, "FETCH_AHEAD", size if ahead else size - 1)
    want = gradients(model_of("full", False))
    with streams(monkeypatch) as device:
        assert all(
            torch.equal(a, b) for a, b in zip(gradients(model_of("full", True)), want, strict=True)
        )
    assert len(lead(device.log)) == MODEL.num_layers - (
        ON_DEVICE if ahead else 1
    )  # a large one makes room
    assert all((operators > 50) == ahead for operators in lead(device.log))
    assert not device.races


@pytest.mark.parametrize("granularity", KEPT)
def test_a_backward_that_never_came_or_that_ends_early(granularity, monkeypatch, pools):
    with streams(monkeypatch) as device:
        model = model_of(granularity, True)
        inside = []
        model.layers[1].register_forward_hook(lambda *args: inside.append(args[-1]))
        gradients(model)
        model(TOKENS)
        loss = model(TOKENS).square().sum()
        torch.autograd.grad(loss, inside[-1])  # layer 1 was fetched ahead, and nobody asks for it
        assert len(buffers(pools)) < 2 * KEPT[granularity] * MODEL.num_layers
        del loss
        inside.clear()
        before = buffers(pools)
        gradients(model)
        assert buffers(pools) == before
    assert not device.races


def test_a_graph_may_be_gone_through_again(monkeypatch):
    want = [2 * x for x in gradients(model_of("full", False))]
    with streams(monkeypatch) as device:
        model = model_of("full", True)
        loss = model(TOKENS).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert all(torch.equal(p.grad, x) for p, x in zip(model.parameters(), want, strict=True))
    assert not device.races


def test_order_of_dimensions_is_kept():
    layer = Offload().layer(first=True)
    for x in (
        torch.randn(3, 4, 5).transpose(0, 2),
        torch.randn(7, 6)[1:5, ::2],
        torch.tensor([2.0]).bfloat16(),
    ):
        handle = layer.pack(x)
        handle.release()
        got = offload.unpack(handle)
        assert got is not x
        assert torch.equal(got, x)
        assert got.dtype == x.dtype
        assert got.stride() == torch.empty_like(x).stride()


def test_numbers_stay_where_they_are():
    """Some kernels for CUDA return seeds on the host, which has no streams."""
    layer = Offload().layer(first=True)
    for x in (torch.tensor(2), torch.empty(0, 3)):
        packed = layer.pack(x)
        assert packed is x
        assert offload.unpack(packed) is x


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device; make gpu-check runs it"
)
@pytest.mark.parametrize("granularity", KEPT)
def test_cuda_steps_pin_memory_once_and_wait_no_more_than_without(granularity, pools):
    waits, gradients_by_run = [], []
    for moved in (False, True):
        model = model_of(granularity, moved).to("cuda", torch.bfloat16)
        gradients(model)
        first = buffers(pools)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                gradients_by_run.append(gradients(model))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("synchronizing" in str(warning.message) for warning in caught))
        assert buffers(pools) == first
    assert all(x.is_pinned() for pool in pools for idle in pool.idle.values() for x in idle)
    assert waits[1] == waits[0]
    assert all(
        (a - b).float().norm() <= 2**-8 * b.float().norm()
        for a, b in zip(gradients_by_run[1], gradients_by_run[0], strict=True)
    )
