"""Handles: numbers and tensors that stand for objects, and how long these live."""

import gc

import pytest
import torch

from runtime.handles import Handles


class Thing:
    pass


def test_a_number_stands_for_an_object_and_keeps_it_no_longer_alive() -> None:
    handles: Handles[Thing] = Handles()
    one, other = Thing(), Thing()
    first, second = handles.add(one), handles.add(other)
    assert first != second
    assert handles[first] is one
    assert handles[second] is other
    del one
    with pytest.raises(KeyError):
        handles[first]
    assert len(handles) == 1
    assert handles.add(Thing()) not in (first, second)  # a number is never used again


def test_a_tensor_keeps_its_object_alive_and_so_does_a_graph_that_saves_it() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, handle):
            ctx.save_for_backward(handle)
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            (handle,) = ctx.saved_tensors
            assert isinstance(handles[handle], Thing)
            return 2 * gradient, None

    handles: Handles[Thing] = Handles()
    handle = handles.tensor(Thing())
    gc.collect()
    assert len(handles) == 1
    x = torch.ones(2, requires_grad=True)
    y = Double.apply(x, handle)
    del handle
    gc.collect()
    y.sum().backward()
    del y
    gc.collect()
    assert len(handles) == 0
