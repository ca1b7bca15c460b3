import math

import pytest
import torch
from torch import nn

from model.layers import LayerNorm, RMSNorm, Rotary
from model.rope import RopeConfig


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 5e-7), (torch.bfloat16, 2**-8)])
@pytest.mark.parametrize("width", [64, 250])
def test_rms_norm_and_its_gradients(dtype, bound, width):
    torch.manual_seed(0)
    norm = RMSNorm(width, eps=1e-5)
    norm.weight.data.uniform_(0.5, 1.5)
    norm = norm.to(dtype)
    x = (3 * torch.randn(2, 5, width)).to(dtype).requires_grad_()
    upstream = torch.randn(2, 5, width).to(dtype)
    out = norm(x)
    out.backward(upstream)

    exact_x, exact_weight = (t.detach().double().requires_grad_() for t in (x, norm.weight))
    exact = exact_x * torch.rsqrt(exact_x.pow(2).mean(-1, keepdim=True) + 1e-5) * exact_weight
    exact.backward(upstream.double())
    assert out.dtype == dtype
    for got, want in ((out, exact), (x.grad, exact_x.grad), (norm.weight.grad, exact_weight.grad)):
        assert (got.double() - want).norm() <= bound * want.norm()


@pytest.mark.parametrize("norm_of", [RMSNorm, LayerNorm])
def test_norms_round_bf16_once(norm_of):
    torch.manual_seed(0)
    norm = norm_of(250, eps=1e-5).bfloat16()
    norm.weight.data.uniform_(0.5, 1.5)
    x = torch.randn(2, 50, 250).bfloat16()
    centred, shift, unit_of = x.double(), 0.0, nn.functional.rms_norm
    if norm_of is LayerNorm:
        shift, unit_of = norm.bias.data.uniform_(-0.5, 0.5), nn.functional.layer_norm
        centred = centred - centred.mean(-1, keepdim=True)
    exact = (centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5) * norm.weight + shift).bfloat16()
    assert (norm(x) == exact).float().mean() > 0.999
    unit = unit_of(x, (250,), eps=1e-5)  # negative control: rounded before weight and bias too
    assert (unit * norm.weight + shift == exact).float().mean() < 0.9


def angle_error(rotary, positions, base, dim):
    """Largest error of cos and sin against Python's double arithmetic on the exact product."""
    error = 0.0
    for row, position in enumerate(positions.tolist()):
        for i in range(dim // 2):
            angle = position * base ** (-2 * i / dim)
            error = max(error, abs(rotary.cos[row, 0, i].item() - math.cos(angle)))
            error = max(error, abs(rotary.sin[row, 0, i].item() - math.sin(angle)))
    return error


def test_rotary_angles_hold_at_long_positions():
    positions = torch.tensor([0, 1, 1000, 65_537, 524_287, 524_288, 2_097_151])
    rotary = Rotary(positions, 64, RopeConfig(rotary_base=500_000.0), torch.bfloat16)
    assert rotary.cos.dtype == torch.float32
    assert angle_error(rotary, positions, 500_000.0, 64) < 1e-7


def test_rotary_bound_sees_float32_angles():
    """Negative control: angles in float32, as Hugging Face has them, miss the bound a thousandfold."""
    positions = torch.tensor([524_287])
    rotary = Rotary(positions, 64, RopeConfig(rotary_base=500_000.0), torch.float32)
    frequencies = 1.0 / 500_000.0 ** (torch.arange(0, 64, 2).float() / 64)
    angles = positions[:, None, None].float() * frequencies
    rotary.cos, rotary.sin = angles.cos(), angles.sin()
    assert angle_error(rotary, positions, 500_000.0, 64) > 1e-4


def test_rotation_matches_complex_multiplication_and_its_gradient():
    torch.manual_seed(0)
    x = torch.randn(2, 6, 3, 8, dtype=torch.float64, requires_grad=True)
    positions = torch.tensor([5, 0, 3, 7, 100, 2])
    out = Rotary(positions, 8, RopeConfig(rotary_base=100.0), x.dtype).rotate(x)
    turns = torch.polar(
        torch.ones(6, 1, 4, dtype=torch.float64),
        positions[:, None, None] * 100.0 ** (-torch.arange(4, dtype=torch.float64) / 4),
    )
    turned = torch.complex(x[..., :4], x[..., 4:]) * turns
    expected = torch.cat([turned.real, turned.imag], dim=-1)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-14)
    upstream = torch.randn_like(out)
    got, want = (torch.autograd.grad(y, x, upstream, retain_graph=True)[0] for y in (out, expected))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-14)


def test_bf16_is_rounded_once():
    torch.manual_seed(0)
    x = torch.randn(1, 50, 2, 16).bfloat16()
    positions = torch.arange(50) * 1000
    out = Rotary(positions, 16, RopeConfig(), x.dtype).rotate(x)
    exact = Rotary(positions, 16, RopeConfig(), torch.float64).rotate(x.double())
    assert out.dtype == torch.bfloat16
    assert (out.double() - exact).abs().max() <= 2**-8 * exact.abs().max()
    assert (out == exact.bfloat16()).float().mean() > 0.999
