"""What modules return and the gradients of that, in a step on any mesh: noted in pieces, and compared in their order.

A piece is what one rank has of one micro-batch: ``places`` [B, T], the numbers of its tokens among all of the step's
(sample x length + position, -1 for padding), and values [B, T, C] or, under tensor parallelism, some of the tokens or
channels. Nothing is gathered on the ranks: each piece is compared with what one process has at its places.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from data.loader import Batch
from train.objectives.base import Objective

INSIDE = r"attention_norm|mlp_norm|mlp|attention|attention\.(wq|wk|wv|wu|q_norm|k_norm|norm)"
WATCHED = re.compile(rf"x_embedder|(position_)?embedding|sinusoids|norm|final_layer|layers\.\d+(\.({INSIDE}))?")
GRADIENT, BATCH = "gradient of ", "batch: "


class Piece(NamedTuple):
    """Values of one rank at places; ``share`` is its rank and the number of ranks of tensor parallelism."""

    places: Tensor
    values: Tensor
    share: tuple[int, int]


@dataclass
class Notes:
    """Pieces of one rank's first step, by the names of their modules, in the order in which these ran."""

    share: tuple[int, int] = (0, 1)
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    on: bool = False
    places: Tensor | None = None
    """Of the micro-batch whose forward runs; None when none is watched."""

    def watch(self, parts: Sequence[nn.Module], share: tuple[int, int]) -> None:
        """Note what the parts' modules return while ``on``, in forwards of ``noted``."""
        self.on, self.share = True, share
        modules = {name: module for part in parts for name, module in part.named_modules()}
        for name, module in modules.items():
            layer, _, last = name.rpartition("attention.")
            if layer and last == ("norm" if f"{layer}attention.norm" in modules else "wo"):  # what takes the core's out
                core = f"{layer}attention.attend"
                module.register_forward_pre_hook(lambda _, inputs, core=core: self._note(core, inputs[0]))
            if WATCHED.fullmatch(name):
                module.register_forward_hook(lambda _, inputs, out, name=name: self._note(name, out))

    def noted(self, loss_sum: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return ``loss_sum`` of an objective, noting the micro-batch and its modules."""

        def noting(objective: Objective, model: Any, local: Batch) -> Tensor:
            first = getattr(model, "embedding", None) or getattr(model, "x_embedder", None)
            self.places = local["place"] if self.on else None
            for name, values in local.items() if self.on else ():
                hidden = first is None and values.is_floating_point()  # of the stage before, in the place of its input
                if values.shape[:2] == local["place"].shape and name != "plan" and not hidden:
                    self._add(BATCH + name, local["place"], values)
            loss = loss_sum(objective, model, local)
            self.places = None
            return loss

        return noting

    def _note(self, name: str, values: Any) -> None:
        again = torch._C._current_graph_task_id() != -1  # a recomputation, in the backward
        if (places := self.places) is None or again:
            return
        self._add(name, places, values)
        if values.requires_grad and values.ndim > 2:
            values.register_hook(lambda gradient: self._add(GRADIENT + name, places, gradient))

    def _add(self, name: str, places: Tensor, values: Any) -> None:
        if isinstance(values, DTensor):
            if any(placement.is_partial() for placement in values.placements):
                return  # the sum is another module's result
            values = values.to_local()
        values = values.detach().clone()
        if values.ndim == 2 and values.is_floating_point():  # of positions, the same in all samples
            values = values.expand(len(places), *values.shape)
        self.pieces.setdefault(name, []).append(Piece(places, values, self.share))


def furthest_of_modules(
    got: list[dict[str, list[Piece]]], want: dict[str, list[Piece]]
) -> Iterator[tuple[str, float, float]]:
    """Yield each tensor's name, largest difference on any rank, and largest value: forward, then backward, in order.

    Where other samples are read, that is all there is to compare. Infinite where no rank has a token, and for NaN.
    """
    read, wanted = (_read(ranks) for ranks in (got, [want]))
    if read != wanted:
        yield f"data: {len(read - wanted)} other tokens, {len(wanted - read)} missing", torch.inf, 1.0
        return
    for name in sorted(want, key=lambda name: name.startswith(GRADIENT)):
        places = torch.cat([piece.places.flatten() for piece in want[name]])
        values = torch.cat([piece.values.reshape(piece.places.numel(), -1) for piece in want[name]]).double()
        whole = values.new_zeros(int(places.max()) + 1, values.shape[1])
        whole[places[places >= 0]] = values[places >= 0]
        pieces = [piece for ranks in got for piece in ranks.get(name, ())]
        parts = [part for piece in pieces if (part := _part(name, piece, whole)) is not None]
        there = {int(place) for places, _ in parts for place in places}
        found = max((away.abs().max().nan_to_num(torch.inf).item() for _, away in parts if len(away)), default=0.0)
        missing = len(there) < len(wanted) and not name.startswith(GRADIENT)
        yield name, torch.inf if missing else found, whole.abs().max().item()


def _read(ranks: list[dict[str, list[Piece]]]) -> set[int]:
    """Return the places of all tokens that were read."""
    pieces = [piece for rank in ranks for piece in rank.get(f"{BATCH}place", ())]
    return {int(place) for piece in pieces for place in piece.places.flatten()} - {-1}


def _part(name: str, piece: Piece, whole: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return a piece's places [n] without padding, and how far its values are from the whole's there [n, C].

    None for a gradient of key heads that ranks of tensor parallelism share: each has its own part of the sum.
    """
    (rank, ranks), places = piece.share, piece.places
    if piece.values.shape[1] != places.shape[1]:
        places = places.chunk(ranks, 1)[rank]
    values = piece.values.reshape(places.numel(), -1).double()
    shards = whole.shape[1] // values.shape[1]  # fewer than ranks where these share key heads
    if shards < ranks and name.startswith(GRADIENT) and name.endswith((".wk", ".wv", ".k_norm")):
        return None
    there = places.flatten() >= 0
    places = places.flatten()[there]
    return places, values[there] - whole[places].chunk(shards, 1)[rank * shards // ranks]
