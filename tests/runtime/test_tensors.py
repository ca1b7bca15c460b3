"""Random weights are the same numbers whole and in parts; handles stand for objects.

Operators have their gradients.
"""

import gc
import weakref
from itertools import pairwise, product

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from runtime import tensors
from runtime.tensors import Handles, differentiable, generator_of, initial_weight_slice


def normal(tile, generator):
    return tile.normal_(0.0, 2.0, generator=generator)


@pytest.mark.parametrize("shape", [(100,), (13, 37), (2, 3, 4, 5)])
def test_parts_are_those_of_the_whole(shape, monkeypatch):
    monkeypatch.setattr(tensors, "WHOLE", 64)
    monkeypatch.setattr(tensors, "TILE", (4, 16))
    whole = initial_weight_slice(normal, "w", shape, 3)
    assert whole.shape == shape
    assert whole.std().item() == pytest.approx(2, rel=0.2)
    assert len(whole.unique()) == whole.numel()  # no two tiles have the same numbers
    cuts = [[slice(*cut) for cut in pairwise(sorted({0, 1, n // 3, n - 1, n}))] for n in shape]
    for part in [*product(*cuts), (slice(1, 1), *(cut[0] for cut in cuts[1:]))]:
        assert torch.equal(initial_weight_slice(normal, "w", shape, 3, part), whole[part])


def test_a_weight_of_up_to_a_million_values_has_one_generator():
    """So the curves of small models that are written down still hold."""
    want = torch.empty(1024, 1024).normal_(0.0, 2.0, generator=generator_of(3, "w"))
    assert torch.equal(initial_weight_slice(normal, "w", (1024, 1024), 3), want)
    assert not torch.equal(initial_weight_slice(normal, "w", (1025, 1024), 3)[:1024], want)


class Thing:
    pass


def test_a_number_stands_for_an_object_and_keeps_it_no_longer_alive():
    handles = Handles()
    first_thing, other = Thing(), Thing()
    first, second = handles.add(first_thing), handles.add(other)
    assert first != second
    assert handles[first] is first_thing
    assert handles[second] is other
    del first_thing
    with pytest.raises(KeyError):
        handles[first]
    assert len(handles) == 1
    assert handles.add(Thing()) not in (first, second)  # a number is never used again


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
    gradients = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    assert [dx.dtype for dx in gradients] == [torch.float32] * len(leaves)
    assert torch.equal(gradients[0], torch.full_like(x, 3.0))
    assert torch.equal(
        torch.autograd.grad(more.sum(), x)[0], torch.ones_like(x)
    )  # out has no gradient: zeros


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
