"""A stand-in for apex on a CPU.

Its kernel's arguments, what it refuses, and its arithmetic or that of torch's kernel.

As csrc/multi_tensor_apply.cuh and multi_tensor_adam.cu of NVIDIA/apex 6424da3b have them.
"""

import sys
from collections import Counter
from types import ModuleType

import torch
from torch import Tensor

from train.optimizers import apex

CALLS = Counter[str]()
Lists = list[list[Tensor]]


def checked(chunk, no_op, lists, *settings):
    """Check a launch by its own assertions, and for what it would read wrongly."""
    assert chunk == 2048 * 32
    assert (no_op.dtype, no_op.numel()) == (torch.int32, 1)
    assert len(lists) == 4
    assert len(lists[0]) > 0, "a launch without tensors"
    assert all(len(tensors) == len(lists[0]) for tensors in lists)
    for of_one in zip(*lists, strict=True):
        assert all(type(x) is Tensor or type(x) is torch.nn.Parameter for x in of_one), (
            "a DTensor has no address"
        )
        assert all(x.is_contiguous() and x.dtype == torch.float32 for x in of_one)
        assert len({x.numel() for x in of_one}) == 1
    assert lists[0][-1].numel() > 0, (
        "the last launch of a list that ends in an empty tensor is left out"
    )
    assert [type(x) for x in settings] == [float, float, float, float, int, int, int, float]
    CALLS["launches"] += 1
    CALLS["tensors"] += len(lists[0])


def as_torch(chunk, no_op, lists, *settings):
    """The update by torch's kernel, for comparisons to the bit."""
    checked(chunk, no_op, lists, *settings)
    lr, first, second, eps, step, mode, correct, decay = settings
    assert (mode, correct) == (1, 1)
    gradients, weights, *moments = lists
    steps = [torch.tensor(float(step)) for _ in weights]
    named = {"lr": lr, "beta1": first, "beta2": second, "weight_decay": decay, "eps": eps}
    torch._fused_adamw_(
        weights, gradients, *moments, [], steps, amsgrad=False, maximize=False, **named
    )


def as_apex(chunk, no_op, lists, *settings):
    """The update in the kernel's own order, in float32."""
    checked(chunk, no_op, lists, *settings)
    lr, first, second, eps, step, mode, correct, decay = settings
    first, second = (torch.tensor(x, dtype=torch.float32) for x in (first, second))
    starts = (1 - first**step, 1 - second**step) if correct else (1.0, 1.0)
    for g, p, m, v in zip(*lists, strict=True):
        gradient = g if mode else g + decay * p
        m.copy_(first * m + (1 - first) * gradient)
        v.copy_(second * v + (1 - second) * gradient * gradient)
        update = (m / starts[0]) / ((v / starts[1]).sqrt() + eps)
        p.sub_(lr * (update + decay * p if mode else update))


class MultiTensorApply:
    """As apex.multi_tensor_apply has it."""

    def __call__(self, op, no_op, lists, *settings):
        op(2048 * 32, no_op, lists, *settings)


def install(kernel=as_torch, modules=None):
    """Put the modules in the place of apex's and its extension's, in this process."""
    modules = sys.modules if modules is None else modules
    modules |= {name: ModuleType(name) for name in ("apex", "apex.multi_tensor_apply", "amp_C")}
    modules["apex.multi_tensor_apply"].multi_tensor_applier = MultiTensorApply()
    modules["amp_C"].multi_tensor_adam = kernel
    apex.EMULATED = True
