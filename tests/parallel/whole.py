"""Weights and gradients of a sharded model in full, for its tests."""

from torch.distributed.tensor import DTensor


def full(value):
    """A copy of its own; collective where the value is shared."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def weights_of(model):
    return {name: full(p) for name, p in model.named_parameters()}


def gradients_of(model):
    """The gradients, in full, of the parameters that have one."""
    return {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
