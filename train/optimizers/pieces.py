"""AdamW that updates one piece of a parameter at a time, with moments in any format.

A piece's moments are read as float32, updated by torch's fused AdamW kernel, and rounded to their
format, so float32 moments exist only for a piece. Weights stay float32. With both moments in
float32 the results equal those of ``torch.optim.AdamW(fused=True)`` to the bit.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel.data import to_local
from train.optimizers import bf16_moments
from train.optimizers.base import NO_PIECE, StepPiece
from train.optimizers.moment_formats import (
    MOMENTS,
    SCALE,
    Float32,
    MomentFormat,
    block_length,
    zeros,
)

PIECE = 1 << 22
"""Number of elements of a parameter that are updated at once.

Both moments in float32, random numbers and temporary results take up to 200 MiB.
"""
FLOAT32 = Float32()


def rounding_piece(formats: Sequence[MomentFormat]) -> StepPiece:
    """Return a piece of a step whose moments stay on the device."""
    rounded = [moment_format for moment_format in formats if moment_format.name != "fp32"]
    if not rounded:
        return NO_PIECE
    rounding = max(moment_format.rounding_bytes for moment_format in rounded)
    return StepPiece(PIECE, 4 * len(rounded) + rounding)


class ParameterPiece(NamedTuple):
    """Consecutive elements of this rank's shard of a parameter, each a view ``[n]``."""

    group: dict[str, Any]
    step: Tensor
    weight: Tensor
    gradient: Tensor
    stored: tuple[Tensor, ...]
    """The stored tensors of both moments; scales have an element per block."""
    formats: tuple[MomentFormat, ...]
    """The formats of both moments."""
    parameter: Tensor
    start: int
    """Number of the shard's elements before the piece."""
    key: Tensor | None
    """Key of the step's random bits, int64 ``[2]``, if a format needs them."""


class PiecewiseAdamW(torch.optim.AdamW):
    """A fused AdamW in pieces; ``formats`` are those of exp_avg and exp_avg_sq.

    Groups have ``names``, the names of their parameters, and ``seed``, the run's.
    """

    _keys: tuple[list[int], Tensor] | None = None

    def __init__(
        self, groups: Any, formats: Sequence[MomentFormat] = (FLOAT32, FLOAT32), **settings: Any
    ) -> None:
        super().__init__(groups, **settings)
        self.formats = dict(zip(MOMENTS, formats, strict=True))
        """Maps a moment to the format of the run; parameters without blocks keep float32."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; unlike AdamW's, it takes no closure."""
        trained = []
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    trained.append((group, p))
        if not trained:
            return

        for _, p in trained:
            if not self.state[p]:
                self.state[p] = {"step": torch.zeros((), device=p.device), **self._new_state(p)}
        torch._foreach_add_([self.state[p]["step"] for _, p in trained], 1)

        keys = self._keys_of_step(trained)
        pieces = []
        for number, (group, p) in enumerate(trained):
            key = None if keys is None else keys[number]
            pieces += self._pieces(group, p, key)
        if pieces:
            self._update(pieces)

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return a parameter's moments of zero, and their scales."""
        state = {}
        for name, moment_format in self.formats.items():
            length = block_length(parameter) if moment_format.blocks else None
            if moment_format.blocks and length is None:
                moment_format = FLOAT32
            state[name] = self._zeros(parameter, moment_format.dtype, None)
            if length is not None:
                blocks = parameter.shape[1:].numel() // length
                state[name + SCALE] = self._zeros(parameter, torch.float32, blocks)
        return state

    def _zeros(self, parameter: Tensor, dtype: torch.dtype, columns: int | None) -> Tensor:
        return zeros(parameter, dtype, columns)

    def _piece_length(self) -> int:
        return PIECE

    def _pieces(
        self, group: dict[str, Any], parameter: Tensor, key: Tensor | None
    ) -> list[ParameterPiece]:
        """Return the pieces of this rank's shard; pieces have whole blocks."""
        weight = to_local(parameter).view(-1)
        assert parameter.grad is not None, "only parameters with a gradient are updated"
        gradient = to_local(parameter.grad).view(-1)
        count = weight.numel()
        if not count:
            return []

        state = self.state[parameter]
        stored = []
        formats = []
        length = self._piece_length()
        for name, moment_format in self.formats.items():
            names = [name]
            if name + SCALE in state:
                names.append(name + SCALE)
            elif moment_format.blocks:
                moment_format = FLOAT32
            formats.append(moment_format)
            for tensor_name in names:
                stored.append(to_local(state[tensor_name]).view(-1))
            block = count // stored[-1].numel()
            length = max(1, length // block) * block

        pieces = []
        for start in range(0, count, length):
            stop = min(start + length, count)
            parts = []
            for tensor in stored:
                block = count // tensor.numel()
                parts.append(tensor[start // block : stop // block])
            pieces.append(
                ParameterPiece(
                    group,
                    state["step"],
                    weight[start:stop],
                    gradient[start:stop],
                    tuple(parts),
                    tuple(formats),
                    parameter,
                    start,
                    key,
                )
            )
        return pieces

    def _update(self, pieces: list[ParameterPiece]) -> None:
        for piece in pieces:
            self._apply(piece, piece.stored)

    def _apply(self, piece: ParameterPiece, stored: Sequence[Tensor]) -> None:
        """Update a piece, whose stored tensors are given on its device."""
        tensors = list(stored)
        groups = []
        for moment_format in piece.formats:
            count = 1 + moment_format.blocks
            groups.append(tuple(tensors[:count]))
            del tensors[:count]
        moments = []
        for name, moment_format, group in zip(MOMENTS, piece.formats, groups, strict=True):
            moments.append(moment_format.unpack(group, name))

        beta1, beta2 = piece.group["betas"]
        torch._fused_adamw_(  # the kernel of ``torch.optim.AdamW(fused=True)``
            [piece.weight],
            [piece.gradient],
            [moments[0]],
            [moments[1]],
            [],
            [piece.step],
            amsgrad=False,
            lr=piece.group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=piece.group["weight_decay"],
            eps=piece.group["eps"],
            maximize=False,
        )

        words = self._words(piece)
        for number, (name, moment_format, group) in enumerate(
            zip(MOMENTS, piece.formats, groups, strict=True)
        ):
            bits = None
            if words is not None:  # each moment has half of the random bits
                bits = (words >> 16 * number) & 0xFFFF
            moment_format.pack(moments[number], group, name, bits)

    def _words(self, piece: ParameterPiece) -> Tensor | None:
        """Return 32 random bits for each element of a piece, if a format rounds with them."""
        if piece.key is None or not any(moment_format.random for moment_format in piece.formats):
            return None
        positions = bf16_moments.positions_of(piece.parameter, piece.start, piece.weight.numel())
        return bf16_moments.random_words(piece.key, positions)

    def _keys_of_step(self, trained: list[tuple[dict[str, Any], Tensor]]) -> Tensor | None:
        """Return the keys of this step's random bits, int64 ``[P, 2]``, if a format needs them."""
        if not any(moment_format.random for moment_format in self.formats.values()):
            return None
        numbers = [id(p) for _, p in trained]
        if self._keys is None or self._keys[0] != numbers:
            names: dict[Tensor, str] = {}
            for group in self.param_groups:
                names.update(zip(group["params"], group["names"], strict=True))
            keys = [bf16_moments.key_of(group["seed"], names[p]) for group, p in trained]
            self._keys = (numbers, torch.tensor(keys, device=trained[0][1].device))
        steps = torch.stack([self.state[p]["step"] for _, p in trained])
        return bf16_moments.keys_of_step(self._keys[1], steps)
