"""Outputs of modules and their gradients, in a step on any mesh: noted in pieces, compared in their
order.

A piece is what one rank has of one micro-batch: ``places`` [B, T], the numbers of its tokens among
all of the step's (sample x length + position, -1 for padding), and values [B, T, C] or, under
tensor parallelism, some of the tokens or channels. Nothing is gathered on the ranks: each piece is
compared with what one process has at its places.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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
GRADIENT, BATCH = "gradient of ", "batch: "


Piece = tuple[Tensor, Tensor, tuple[int, int]]
"""Places, values there, and the rank and the number of ranks of tensor parallelism."""


@dataclass
class Notes:
    """Pieces of one rank's first step, by the names of their modules, in the order in which these
    ran.
    """

    share: tuple[int, int] = (0, 1)
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    on: bool = False
    places: Tensor | None = None
    """Places of the micro-batch whose forward runs, [B, T]."""

    def watch(self, parts: Sequence[nn.Module], share: tuple[int, int]) -> None:
        """Note what the parts' modules return while ``on``, in forwards of ``noted``."""
        self.on, self.share = True, share
        modules = {name: module for part in parts for name, module in part.named_modules()}
        for name, module in modules.items():
            layer, _, last = name.rpartition("attention.")
            if layer and last == (
                "norm" if f"{layer}attention.norm" in modules else "wo"
            ):  # what takes the core's out
                core = f"{layer}attention.attend"
                module.register_forward_pre_hook(
                    lambda _, inputs, core=core: self._note(core, inputs[0])
                )
            if WATCHED.fullmatch(name):
                module.register_forward_hook(
                    lambda _, inputs, out, name=name: self._note(name, out)
                )

    def noted(self, loss_sum: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return ``loss_sum`` of an objective, noting a first stage's micro-batches and all
        modules.
        """

        def noting(objective: Objective, model: Any, local: Batch) -> Tensor:
            self.places = places = local["place"] if self.on else None
            if places is not None and hasattr(model.layers, "0"):
                whole = {
                    name: values
                    for name, values in local.items()
                    if values.shape[:2] == places.shape
                }
                for name, values in whole.items():
                    self._add(BATCH + name, places, values)
            return loss_sum(objective, model, local)

        return noting

    def _note(self, name: str, values: Any) -> None:
        places, again = (
            self.places,
            torch._C._current_graph_task_id() != -1,
        )  # a recomputation, in the backward
        if places is not None and self.on and not again:
            self._add(name, places, values)
            if values.requires_grad and values.ndim > 2:
                values.register_hook(lambda gradient: self._add(GRADIENT + name, places, gradient))

    def _add(self, name: str, places: Tensor, values: Any) -> None:
        if isinstance(values, DTensor) and any(
            placement.is_partial() for placement in values.placements
        ):
            return  # the sum is another module's result
        values = to_local(values).detach().clone()
        if values.ndim == 2 and values.is_floating_point():  # of positions, the same in all samples
            values = values.expand(len(places), *values.shape)
        self.pieces.setdefault(name, []).append((places, values, self.share))


def furthest_of_modules(
    got: list[dict[str, list[Piece]]], want: dict[str, list[Piece]]
) -> Iterator[tuple[str, float, float]]:
    """Yield each tensor's name, largest difference on any rank, and largest value: forward, then
    backward, in order.

    Where other samples are read, that is all there is to compare. Infinite where no rank has a
    token, and for NaN.
    """
    read, wanted = (_read(f"{BATCH}place", ranks) for ranks in (got, [want]))
    if read != wanted:
        yield (
            f"data: {len(read - wanted)} other tokens, {len(wanted - read)} missing",
            torch.inf,
            1.0,
        )
        return
    for name in sorted(want, key=lambda name: name.startswith(GRADIENT)):
        places = torch.cat([at.flatten() for at, *_ in want[name]])
        values = torch.cat([part.reshape(at.numel(), -1) for at, part, _ in want[name]]).double()
        whole = values.new_zeros(int(places.max()) + 1, values.shape[1])
        whole[places[places >= 0]] = values[places >= 0]
        parts = [_apart(name, *piece, whole) for ranks in got for piece in ranks.get(name, ())]
        missing = not name.startswith(GRADIENT) and _read(name, got) != wanted
        yield name, torch.inf if missing else max(parts, default=0.0), whole.abs().max().item()


def _read(name: str, ranks: list[dict[str, list[Piece]]]) -> set[int]:
    """Return the places of all pieces."""
    return {
        place
        for rank in ranks
        for piece in rank.get(name, ())
        for place in piece[0].flatten().tolist()
    } - {-1}


def _apart(
    name: str, places: Tensor, values: Tensor, share: tuple[int, int], whole: Tensor
) -> float:
    """Return how far a piece is from the whole, padding left out.

    A gradient of key heads that ranks of tensor parallelism share is left out too: each has its own
    part of the sum.
    """
    rank, ranks = share
    if values.shape[1] != places.shape[1]:
        places = places.chunk(ranks, 1)[rank]
    values, places = values.reshape(places.numel(), -1).double(), places.flatten()
    shards, there = (
        whole.shape[1] // values.shape[1],
        places >= 0,
    )  # fewer than ranks where these share key heads
    if not there.any() or (
        shards < ranks and name.startswith(GRADIENT) and name.endswith((".wk", ".wv", ".k_norm"))
    ):
        return 0.0
    apart = values[there] - whole[places[there]].chunk(shards, 1)[rank * shards // ranks]
    return apart.abs().max().nan_to_num(torch.inf).item()
