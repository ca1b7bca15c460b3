import math

import pytest
import torch
from torch import nn

from model.parts.norms import LayerNorm, RMSNorm
from model.parts.rope import RopeConfig
from model.parts.rotary import Rotary


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
    exact = (
        centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5) * norm.weight + shift
    ).bfloat16()
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
    # Negative control: angles in float32, as Hugging Face has them, miss the bound a thousandfold.
    angles = positions[:, None, None].float() / 500_000.0 ** (torch.arange(0, 64, 2).float() / 64)
    rotary.cos, rotary.sin = angles.cos(), angles.sin()
    assert angle_error(rotary, positions, 500_000.0, 64) > 1e-4


def test_bf16_is_rounded_once():
    torch.manual_seed(0)
    x = torch.randn(1, 50, 2, 16).bfloat16()
    positions = torch.arange(50) * 1000
    out = Rotary(positions, 16, RopeConfig(), x.dtype).rotate(x)
    exact = Rotary(positions, 16, RopeConfig(), torch.float64).rotate(x.double())
    assert out.dtype == torch.bfloat16
    assert (out.double() - exact).abs().max() <= 2**-8 * exact.abs().max()
    assert (out == exact.bfloat16()).float().mean() > 0.999
