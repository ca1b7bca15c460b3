"""Slices of a sequence that go through a layer one after the other, and what they share.

A query of a slice sees the keys of its own and of earlier slices (FPDT, Yao et al. 2024,
arXiv:2408.16978). So one layer's slices share their keys and values and, in the backward pass, the
sums of their gradients: slice i adds to the sums of slices <= i. Once the slices from i on have run
back, the sums of slice i are complete, and its own backward pass takes them from there. Layers with
a state hand it on from slice to slice, and its gradient back.

Shapes: B sequences, S positions of all slices and ranks, G key heads of this rank, D their width.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernels.blocks import Keys
from runtime.tensors import Handles, accum_dtype

StateKey = tuple[int, str]
"""Number of the slice that takes a state, and the name of the state."""


def slice_bounds(total: int, size: int) -> list[tuple[int, int]]:
    """Return the first token of each slice of ``size`` tokens, and the one after its last."""
    return [(first, min(first + size, total)) for first in range(0, total, size)]


class KeysStoredError(Exception):
    """Ends the forward pass of a slice of which only the keys and values are needed."""


class SliceOrderError(RuntimeError):
    """A slice runs back before the slice after it, whose gradients it needs."""


@dataclass(eq=False)
class SliceMemory:
    """Tensors that the slices of one layer share during one pass, forward or backward."""

    states: dict[StateKey, Tensor] = field(default_factory=dict)
    """States that slices take from the slice before them; the backward pass gets them from the
    forward pass."""
    state_gradients: dict[StateKey, Tensor] = field(default_factory=dict)
    keys: Keys | None = None
    """Keys and values of all slices so far, ``[B, S, G, D]``; None if no attention stored any."""
    has_all_keys: bool = False
    """True in a backward pass, once the keys of all slices are stored."""
    key_gradients: Keys | None = None
    """Sums of the gradients of ``keys``, in float32 or wider."""
    last_returned: int | None = None
    """Number of the slice whose attention was the last to run back."""

    def store_keys(self, first: int, k: Tensor, v: Tensor, total: int) -> None:
        """Store keys and values ``[B, n, G, D]`` from position ``first`` on, of ``total``."""
        if self.keys is None:
            shape = (k.shape[0], total, *k.shape[2:])
            self.keys = Keys(k.new_empty(shape), v.new_empty(shape))
        end = first + k.shape[1]
        self.keys.k[:, first:end] = k
        self.keys.v[:, first:end] = v

    def gradient_sums(self) -> Keys:
        """Return the sums of the gradients of all keys, which begin as zeros."""
        assert self.keys is not None, "a slice has stored its keys before it runs back"
        if self.key_gradients is None:
            k, v = self.keys
            dtype = accum_dtype(k.dtype)
            self.key_gradients = Keys(
                torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
            )
        return self.key_gradients

    def clear(self) -> None:
        """Drop all tensors, at the end of a backward pass or after an error in it."""
        self.states = {}
        self.state_gradients = {}
        self.keys = None
        self.key_gradients = None

    def check_order(self, number: int, count: int) -> None:
        """Note that slice ``number`` of ``count`` runs back.

        Raises:
            SliceOrderError: the slice after it has not run back.
        """
        expected = count - 1 if self.last_returned is None else self.last_returned - 1
        if number != expected:
            raise SliceOrderError(
                f"slice {number} of a layer runs back, but slice {expected} comes next, and would "
                "add to the gradients of its keys; run the slices back from the last to the first"
            )
        self.last_returned = number


@dataclass(eq=False)
class Slice:
    """One slice, in the place of a micro-batch's mask among a layer's arguments."""

    memory: SliceMemory
    number: int
    count: int
    """Number of slices."""
    first: int
    """Index of the slice's first token among this rank's tokens of a sequence."""
    end: int
    """Index after the slice's last token."""
    total: int
    """Number of this rank's tokens of a sequence, in all slices."""
    mask: Any = None
    """Mask of the micro-batch, a ``PlanHandle``; None for the mask of the attention."""
    keys_only: bool = False
    """True if only the keys and values are needed; ``KeysStoredError`` then ends the forward pass.
    """
    incoming_states: dict[str, Tensor] = field(default_factory=dict)
    """States that this slice took in a pass with gradients."""
    outgoing_states: dict[str, Tensor] = field(default_factory=dict)
    """States that this slice handed on in a pass with gradients."""

    @property
    def length(self) -> int:
        """Number of this rank's tokens in every slice but a shorter last one."""
        return self.first // self.number if self.number else self.end

    def positions(self, ranks: int) -> tuple[int, int]:
        """Return the slice's first position, and the one after its last, over ``ranks`` ranks."""
        return self.first * ranks, self.end * ranks

    def take(self, name: str) -> Tensor:
        """Return a state that the slice before handed on."""
        state = self.memory.states[self.number, name]
        if torch.is_grad_enabled():
            state = state.detach().requires_grad_()
            self.incoming_states[name] = state
        return state

    def hand_on(self, name: str, state: Tensor) -> None:
        """Give a state to the next slice."""
        if torch.is_grad_enabled():
            self.outgoing_states[name] = state
        else:
            self.memory.states[self.number + 1, name] = state

    def outgoing_gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Return the states that this slice handed on and that have gradients, with these."""
        pairs = []
        gradients = self.memory.state_gradients
        for name, state in self.outgoing_states.items():
            key = (self.number + 1, name)
            if key not in gradients:
                raise SliceOrderError(
                    f"slice {self.number} of a layer runs back, but slice {self.number + 1} has "
                    f"not, and would return the gradient of its {name}; run the slices back from "
                    "the last to the first"
                )
            gradient = gradients.pop(key)
            if state.requires_grad:
                pairs.append((state, gradient))
        self.outgoing_states.clear()
        return pairs

    def return_gradients(self, gradients: tuple[Tensor, ...]) -> None:
        """Leave the gradients of the states that entered, in their order, for the slice before."""
        for name, gradient in zip(self.incoming_states, gradients, strict=True):
            self.memory.state_gradients[self.number, name] = gradient
        self.incoming_states.clear()


SLICES: Handles[Slice] = Handles()
"""Slices in use, keyed by the handles that operators take in their place."""
