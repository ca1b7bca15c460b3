"""Record modules' outputs and gradients in one step on any mesh, and compare them in order.

A piece is the part of a micro-batch that one rank has: the numbers of its tokens [B, T] among all
tokens of the step (sample x length + position, -1 for padding), and the values there [B, T, C] or,
with tensor parallelism, those of a part of the tokens or channels. Nothing is gathered on the
ranks: each piece is compared with the values that one process has for the same tokens.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from data.loader import Batch
from parallel.data import to_local
from train.objectives import Objective

INSIDE = r"(attention|mlp)(_post)?_norm|mlp|attention|attention\.(wq|wk|wv|wu|q_norm|k_norm|norm)"
WATCHED = re.compile(
    rf"x_embedder|(position_)?embedding|sinusoids|norm|final_layer|layers\.\d+(\.({INSIDE}))?"
)
GRADIENT = "gradient of "
BATCH = "batch: "
SHARED_HEADS = (".wk", ".wv", ".k_norm")
"""Endings of the names of modules that compute key heads.

Tensor-parallel ranks may share a key head; each then has only a part of its gradient.
"""


Piece = tuple[Tensor, Tensor, tuple[int, int]]
"""Values of a module on one rank: token numbers, values, tensor-parallel rank and size."""


@dataclass
class Notes:
    """Outputs and gradients of modules that one rank records in its first step.

    ``pieces`` is keyed by module name, in the order in which the modules ran. ``share`` is the
    tensor-parallel rank and size.
    """

    share: tuple[int, int] = (0, 1)
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    on: bool = False
    token_numbers: Tensor | None = None
    """Token numbers [B, T] of the micro-batch whose forward pass is running."""

    def watch(self, parts: Sequence[nn.Module], share: tuple[int, int]) -> None:
        """Add hooks that record the outputs of the parts' modules while ``on``.

        They record only in forward passes of a ``loss_sum`` that ``noted`` has wrapped.
        """
        self.on = True
        self.share = share
        modules = {name: module for part in parts for name, module in part.named_modules()}
        for name, module in modules.items():
            layer, _, last = name.rpartition("attention.")
            # The module that takes the attention core's output: wo, or a norm before it.
            consumer = "norm" if f"{layer}attention.norm" in modules else "wo"
            if layer and last == consumer:
                module.register_forward_pre_hook(
                    partial(self._note_input, f"{layer}attention.attend")
                )
            if WATCHED.fullmatch(name):
                module.register_forward_hook(partial(self._note_output, name))

    def noted(self, loss_sum: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wrap an objective's ``loss_sum``, so that the modules' hooks know the token numbers.

        On the first pipeline stage it also records the batch.
        """

        def noting(objective: Objective, model: Any, local: Batch) -> Tensor:
            numbers = local["place"] if self.on else None
            self.token_numbers = numbers
            if numbers is not None and hasattr(model.layers, "0"):
                for name, values in local.items():
                    if values.shape[:2] == numbers.shape:
                        self._add(BATCH + name, numbers, values)
            return loss_sum(objective, model, local)

        return noting

    def _note_input(self, name: str, _: nn.Module, inputs: Any) -> None:
        self._note(name, inputs[0])

    def _note_output(self, name: str, _: nn.Module, inputs: Any, output: Any) -> None:
        self._note(name, output)

    def _note(self, name: str, values: Any) -> None:
        """Record values, and their gradient when the backward pass computes it."""
        numbers = self.token_numbers
        is_recompute = torch._C._current_graph_task_id() != -1  # forward within a backward pass
        if numbers is None or not self.on or is_recompute:
            return
        self._add(name, numbers, values)
        if values.requires_grad and values.ndim > 2:
            values.register_hook(lambda gradient: self._add(GRADIENT + name, numbers, gradient))

    def _add(self, name: str, numbers: Tensor, values: Any) -> None:
        is_partial = isinstance(values, DTensor) and any(
            placement.is_partial() for placement in values.placements
        )
        if is_partial:
            return  # another module has the whole sum

        values = to_local(values).detach().clone()
        if values.ndim == 2 and values.is_floating_point():  # [T, C], equal in all samples
            values = values.expand(len(numbers), *values.shape)
        self.pieces.setdefault(name, []).append((numbers, values, self.share))


def furthest_of_modules(
    actual: list[dict[str, list[Piece]]], reference: dict[str, list[Piece]]
) -> Iterator[tuple[str, float, float]]:
    """Yield the name, largest difference on any rank, and largest value of each recorded tensor.

    Outputs come first, then gradients, each in the order of the step. If the ranks read other
    samples than one process, the only item says so. The difference is infinite for NaN, and if a
    token of an output is on no rank.

    Args:
        actual: the pieces of every rank of the mesh.
        reference: the pieces of one process.
    """
    read = _token_set(f"{BATCH}place", actual)
    expected = _token_set(f"{BATCH}place", [reference])
    if read != expected:
        other = len(read - expected)
        missing = len(expected - read)
        yield f"data: {other} other tokens, {missing} missing", torch.inf, 1.0
        return

    for name in sorted(reference, key=lambda name: name.startswith(GRADIENT)):
        whole = _whole(reference[name])
        distances = []
        for rank_pieces in actual:
            for piece in rank_pieces.get(name, ()):
                distances.append(_distance(name, *piece, whole))

        largest = max(distances, default=0.0)
        if not name.startswith(GRADIENT) and _token_set(name, actual) != expected:
            largest = torch.inf
        yield name, largest, whole.abs().max().item()


def _whole(pieces: list[Piece]) -> Tensor:
    """Return the values of one process in a tensor indexed by token number: float64 [tokens, C]."""
    all_numbers = []
    all_rows = []
    for piece_numbers, values, _ in pieces:
        all_numbers.append(piece_numbers.flatten())
        all_rows.append(values.reshape(piece_numbers.numel(), -1))

    numbers = torch.cat(all_numbers)
    rows = torch.cat(all_rows).double()

    valid = numbers >= 0
    whole = rows.new_zeros(int(numbers.max()) + 1, rows.shape[1])
    whole[numbers[valid]] = rows[valid]
    return whole


def _token_set(name: str, ranks: list[dict[str, list[Piece]]]) -> set[int]:
    """Return the token numbers of all pieces of a module, without padding."""
    numbers: set[int] = set()
    for rank in ranks:
        for piece in rank.get(name, ()):
            numbers.update(piece[0].flatten().tolist())
    return numbers - {-1}


def _distance(
    name: str, numbers: Tensor, values: Tensor, share: tuple[int, int], whole: Tensor
) -> float:
    """Return the largest difference of a piece from one process's values, without padding.

    It is 0 for the gradient of key heads that tensor-parallel ranks share, since each rank has only
    a part of the sum.
    """
    rank, ranks = share
    if values.shape[1] != numbers.shape[1]:  # sequence parallelism: a share of the tokens
        numbers = numbers.chunk(ranks, 1)[rank]
    values = values.reshape(numbers.numel(), -1).double()
    numbers = numbers.flatten()
    valid = numbers >= 0
    if not valid.any():
        return 0.0

    shards = whole.shape[1] // values.shape[1]  # fewer than ranks if ranks share key heads
    if shards < ranks and name.startswith(GRADIENT) and name.endswith(SHARED_HEADS):
        return 0.0

    expected = whole[numbers[valid]].chunk(shards, 1)[rank * shards // ranks]
    return (values[valid] - expected).abs().max().nan_to_num(torch.inf).item()
