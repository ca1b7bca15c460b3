"""An operator with its gradient: what it saves, casts and keeps alive, and that torch's own check takes it."""

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from runtime.operators import differentiable
from runtime.tensors import Handles


class Scale:
    """Multiplies by a factor and adds a shift, if there is one."""

    def __init__(self, factor):
        self.factor, self.handle = factor, SCALES.add(self)


SCALES = Handles()


def forward(x, shift, handle):
    return x * SCALES[handle].factor + (0 if shift is None else shift), x.sum(0)


def backward(dout, dmore, x, shift, more, handle):
    assert torch.equal(more, x.sum(0))
    dx = dout.double() * SCALES[handle].factor + (0 if dmore is None else dmore)
    return dx, None if shift is None else dout.double()


differentiable(
    "longmesh_tests::scale",
    "Tensor x, Tensor? shift",
    "int handle",
    forward,
    lambda x, shift, handle: (x.new_empty(x.shape), x.new_empty(x.shape[1:])),
    backward,
    saves=[1],
    owner=lambda handle: SCALES[handle],
)
scale = torch.ops.longmesh_tests.scale


@pytest.mark.parametrize("shifted", [False, True])
def test_gradients_are_the_formulas_in_the_dtypes_of_the_inputs(shifted):
    owner = Scale(3.0)
    x = torch.randn(4, 3, requires_grad=True)
    shift = torch.randn(4, 3, requires_grad=True) if shifted else None
    torch.library.opcheck(scale.default, (x, shift, owner.handle))
    leaves = [x, shift] if shifted else [x]
    out, more = scale(x, shift, owner.handle)
    found = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    assert [dx.dtype for dx in found] == [torch.float32] * len(leaves)
    assert torch.equal(found[0], torch.full_like(x, 3.0))
    assert torch.equal(torch.autograd.grad(more.sum(), x)[0], torch.ones_like(x))  # out has no gradient: zeros


def test_the_owner_lives_until_the_backward_and_a_checkpoint_can_be_around_it():
    owner = Scale(2.0)
    x, alive, handle = torch.randn(4, 3, requires_grad=True), weakref.ref(owner), owner.handle
    out = scale(x, None, handle)[0]
    again = checkpoint(lambda y: scale(y, None, handle)[0], x, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(again.sum(), x)[0], torch.full_like(x, 2.0))
    del owner, again
    gc.collect()
    assert alive() is not None
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.full_like(x, 2.0))
