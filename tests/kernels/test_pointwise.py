"""The gate by torch's operators: what it returns, its gradients, and what it keeps."""

from itertools import product

import torch
from torch.autograd.graph import saved_tensors_hooks

from kernels.pointwise import ACTIVATIONS, gated


def kept(gate, up, activation, fused):
    """The result and the gradients of gate and up, and how many tensors were kept for them."""
    saved = []
    with saved_tensors_hooks(lambda x: saved.append(x.data_ptr()) or x, lambda x: x):
        out = gated(gate, up, activation) if fused else ACTIVATIONS[activation][0](gate) * up
    return [out.detach(), *torch.autograd.grad(out, (gate, up), out.detach().cos())], len(set(saved))


def test_the_gate_keeps_its_inputs_alone_and_changes_no_bit():
    for dtype, activation in product((torch.float64, torch.float32, torch.bfloat16), ACTIVATIONS):
        gate, up = (torch.randn(3, 50, dtype=dtype, requires_grad=True) for _ in range(2))
        (got, ours), (want, torchs) = (kept(gate, up, activation, fused) for fused in (True, False))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert (ours, torchs) == (2, 3)
