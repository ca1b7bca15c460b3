"""Sinks added to the global results, and gradients of blocks from these, equal gpt-oss's attention in float64."""

from types import SimpleNamespace

import pytest
import torch

from kernels import reference
from kernels.attention import FULL, block_backward, select_backend
from kernels.blocks import Keys, Rows, merged, sinks_gradient, with_sinks

BOUND = 1e-12


def inputs(dtype=torch.float64):
    """q, k, v, sinks and dout of 4 heads, two per key head; sinks far above and below the scores, too."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 9, 4, 8), (2, 12, 2, 8), (2, 12, 2, 8), (2, 9, 4, 8)]
    q, k, v, dout = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v, torch.tensor([0.3, -1.5, 30.0, -60.0], dtype=dtype), dout


def expected():
    """Return out, dq, dk, dv and dsinks of transformers' gpt-oss, under no mask."""
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    *leaves, dout = inputs()
    q, k, v, sinks = (x.requires_grad_() for x in leaves)
    module = SimpleNamespace(num_key_value_groups=2, sinks=sinks, training=False)
    out = eager_attention_forward(module, *(x.transpose(1, 2) for x in (q, k, v)), None, scaling=8**-0.5)[0]
    return [out.detach(), *torch.autograd.grad(out, (q, k, v, sinks), dout)]


def in_blocks(gradient_lse="with sinks"):
    """Return the same from two blocks of keys, merged, then sinks; the backward takes the global results."""
    q, k, v, sinks, dout = inputs()
    halves = (slice(0, 5), slice(5, 12))
    blocks = [reference.block_forward(q, k[:, half], v[:, half], False, 8**-0.5) for half in halves]
    plain = merged(*(torch.stack(parts) for parts in zip(*blocks, strict=True)))
    out, lse = with_sinks(*plain, sinks)
    backend = select_backend("reference", "cpu", torch.float64)
    taken = lse if gradient_lse == "with sinks" else plain[1]
    rows = Rows(q, dout, out, taken)
    parts = [block_backward(rows, Keys(k[:, half], v[:, half]), FULL, 8**-0.5, backend) for half in halves]
    dq, dk, dv = zip(*parts, strict=True)
    return [out, sum(dq), torch.cat(dk, 1), torch.cat(dv, 1), sinks_gradient(dout, out, taken, sinks)]


def test_sinks_and_all_gradients_equal_those_of_gpt_oss():
    want = expected()
    for got, wanted in zip(in_blocks(), want, strict=True):
        assert (got - wanted).abs().max() < BOUND * max(1.0, wanted.abs().max().item())
    for got, wanted in zip(in_blocks("plain")[1:], want[1:], strict=True):  # negative control: an lse without sinks
        assert (got - wanted).norm() > 1e-3 * wanted.norm()


def test_a_row_without_keys_is_zero_and_has_the_sinks_lse():
    sinks = torch.tensor([0.5, -2.0])
    out, lse = with_sinks(torch.zeros(1, 3, 2, 4), torch.full((1, 3, 2), float("-inf")), sinks)
    assert torch.equal(out, torch.zeros(1, 3, 2, 4))
    assert torch.equal(lse, sinks.expand(1, 3, 2))
    assert torch.equal(sinks_gradient(torch.ones_like(out), out, lse, sinks), torch.zeros(2))


@pytest.mark.parametrize("sink", [-1e4, 1e4])
def test_sinks_far_from_the_scores_overflow_nothing(sink):
    """The first is as good as none, the second leaves nothing."""
    out, lse = torch.randn(1, 5, 2, 4), torch.randn(1, 5, 2)
    got, with_sink = with_sinks(out, lse, torch.full((2,), sink))
    assert torch.equal(got, out if sink < 0 else torch.zeros_like(out))
    assert torch.equal(with_sink, lse if sink < 0 else torch.full_like(lse, sink))
    gradient = sinks_gradient(torch.ones_like(out), got, with_sink, torch.full((2,), sink))
    assert torch.equal(gradient, torch.zeros(2))


def test_bfloat16_sinks_are_added_in_the_dtype_of_lse():
    out, lse, sinks = torch.randn(1, 5, 2, 4), torch.randn(1, 5, 2), torch.tensor([0.1, -3.3]).bfloat16()
    for got, want in zip(with_sinks(out, lse, sinks), with_sinks(out, lse, sinks.float()), strict=True):
        assert got.dtype == torch.float32
        assert torch.equal(got, want)
    assert sinks_gradient(out.bfloat16(), out, lse, sinks).dtype == torch.float32
