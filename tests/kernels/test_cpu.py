"""Strips by oneDNN's products against the reference in float64.

Blocks of rows and of keys, masks, groups of heads.
"""

import pytest
import torch

from kernels import attention, cpu, cpu_onednn, operators, reference
from kernels.blocks import ANTI, CAUSAL, FULL, Keys, Rows, Tile
from kernels.cpu import heads_first, triangle
from tests.kernels.attention_cases import folded

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch was built without oneDNN"
)

SCALE = 0.3
STRIPS = {
    "several blocks of rows and of keys": (700, 2100, None),
    "one row": (1, 1500, None),
    "causal": (512, 512, 0),
    "causal, more rows than keys": (300, 170, 0),
    "causal, several blocks": (1301, 1301, 0),
    "causal, blocks of rows behind all keys": (1301, 700, 0),
    "mask of a lower strip": (200, 500, 250),
}
"""Rows, keys, and how many keys after its own a row sees."""


def made(rows, columns, heads=4, groups=2, width=16):
    """q, k, v, dout [B, T, H, D] with gaps between their rows.

    Slices of longer sequences have such gaps.
    """
    torch.manual_seed(3)
    batch = 2 if rows * columns < 1_000_000 else 1
    sizes = ((rows, heads), (columns, groups), (columns, groups), (rows, heads))
    return [torch.randn(batch, n + 3, h, 2 * width)[:, 1:-2, :, width:] for n, h in sizes]


def attended(inputs, ahead):
    """out, lse, dq, dk, dv, heads first."""
    q, k, v, dout = heads_first(*inputs)
    mask = (
        triangle(CAUSAL, 512, torch.float32)[ahead : ahead + q.shape[2], : k.shape[2]]
        if ahead
        else None
    )
    out, lse = cpu.onednn_forward(q, k, v, ahead == 0, SCALE, mask)
    return [
        out,
        lse,
        *cpu.onednn_backward(Rows(q, dout, out, lse), Keys(k, v), ahead == 0, SCALE, mask),
    ]


def naive(inputs, ahead):
    """The same in float64."""
    *leaves, dout = (x.double() for x in inputs)
    leaves = [x.requires_grad_() for x in leaves]
    out, lse = reference.attention(*leaves, causal=False, scale=SCALE, window=(None, ahead))
    return heads_first(out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout))


def off(actual, truth):
    return [float((a - b).norm() / b.norm()) for a, b in zip(actual, truth, strict=True)]


@pytest.mark.parametrize("name", STRIPS)
def test_equals_float64(name):
    rows, columns, ahead = STRIPS[name]
    inputs = made(rows, columns)
    actual, truth = attended(inputs, ahead), naive(inputs, ahead)
    assert max(off(actual, truth)) < 1e-6
    assert [x.shape for x in actual] == [x.shape for x in truth]
    inputs[1][0, 0] += 0.1  # negative control: one key
    assert max(off(attended(inputs, ahead), truth)) > 1e-5


def test_large_scores_do_not_overflow():
    inputs = made(300, 1100)
    inputs[0] *= 300
    actual, truth = attended(inputs, None), naive(inputs, None)
    assert all(x.isfinite().all() for x in actual)
    assert max(off(actual[:2], truth[:2])) < 1e-4


@pytest.mark.parametrize("apart", [True, False])
def test_a_backend_takes_it_for_large_strips_alone(apart, monkeypatch):
    """All tiles of a causal sequence, and an ANTI one, beside the reference.

    It is counted who computed how many strips.

    Heads of a group of keys come ``apart`` if they are large, so that what comes back is small.
    """
    monkeypatch.setattr(cpu, "LARGE", 1 if apart else 1 << 30)
    heads, backward = set[int](), cpu.onednn_backward
    monkeypatch.setattr(
        cpu, "onednn_backward", lambda *args: (heads.add(args[0].q.shape[1]), backward(*args))[1]
    )
    monkeypatch.setattr(operators, "ONEDNN", True)
    monkeypatch.setattr(cpu_onednn, "MIN_WORK", 1 << 20)
    monkeypatch.setattr(cpu_onednn, "MIN_WIDTH", 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    decisions = {True: 0, False: 0}
    suits = cpu.suits

    def counted(*args):
        decisions[suits(*args)] += 1
        return suits(*args)

    monkeypatch.setattr(cpu, "suits", counted)
    q, k, v, dout = made(1344, 1344)
    tiles = [
        Tile(slice(0, 1024), slice(0, 1024), CAUSAL),
        Tile(slice(1024, 1344), slice(900, 1220), ANTI),
    ]
    tiles += [
        Tile(slice(1024, 1344), slice(0, 704), FULL),
        Tile(slice(1024, 1344), slice(1220, 1230), FULL),
    ]
    results = []
    for name, dtype in (("aten", torch.float32), ("reference", torch.float64)):
        backend = attention.select_backend(name, "cpu", dtype)
        results.append(
            folded(backend, [x.to(dtype) for x in (q, k, v, dout)], [tiles], SCALE, dtype)
        )
    assert max(off(*results)) < 1e-6
    assert min(decisions.values()) > 0
    assert min(heads) == (2 if apart else 4)


@pytest.mark.parametrize(
    "change", ["another processor", "threads", "float64", "narrow", "little work", "odd"]
)
def test_leaves_the_rest_to_torchs_kernel(change, monkeypatch):
    monkeypatch.setattr(operators, "ONEDNN", change != "another processor")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2 if change == "threads" else 1)
    rows = {"little work": 64, "odd": 216}.get(change, 512)
    width = 16 if change == "narrow" else 128
    q = torch.empty(
        1, 8, rows, width, dtype=torch.float64 if change == "float64" else torch.float32
    )
    if change == "odd":  # where there is more to gain
        assert cpu.suits(q.expand(3, -1, -1, -1), q)
    assert not cpu.suits(q, q)
    monkeypatch.setattr(operators, "ONEDNN", True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert cpu.suits(q.new_empty(1, 8, 512, 128, dtype=torch.float32), q.new_empty(1, 8, 512, 128))
