"""Pack clips of different sizes into one sequence: each attends to itself and its own text.

There is no padding between clips. First the model's own forward runs up to the blocks for each
clip, and the blocks' arguments are recorded. Then the blocks compute this rank's tokens of all
clips at once, with a modulation per token. Finally the forward runs again for each clip, with the
results in place of the blocks. Everything outside the blocks takes about a thousandth of a forward.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from parallel.context import ContextParallel
from parallel.diffusers.families import Family, Packing
from parallel.diffusers.hooks import CHECKPOINT, SPLIT, Hooks, StandIn, unwrapped
from parallel.diffusers.split import PackedSplit, TokenSplit
from runtime.errors import UserError


class BlocksReached(Exception):
    """Ends a forward at its first block; holds the block's arguments, keyed by name."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


class PackedForward:
    """A forward of several clips at once."""

    def __init__(
        self,
        model: nn.Module,
        family: Family,
        hooks: Hooks,
        context_over: Callable[[int], ContextParallel],
    ) -> None:
        """Pack clips for a model with hooks.

        Args:
            context_over: function that returns the context for a number of tokens.

        Raises UserError if the family's blocks have one modulation for all tokens.
        """
        if family.packing is None:
            raise UserError(
                f"{type(model).__name__} has one modulation for all tokens, so clips with "
                "different timesteps cannot share a sequence; run them one by one, or use Wan or "
                "LTX"
            )
        self._model = model
        self._family = family
        self._packing: Packing = family.packing
        self._hooks = hooks
        self._context_over = context_over
        (self._blocks_name,) = family.blocks
        self._blocks = list(getattr(model, self._blocks_name))
        self._signature = inspect.signature(unwrapped(self._blocks[0]).forward)

    def __call__(self, model: nn.Module, clips: Sequence[Mapping[str, Any]]) -> list[Tensor]:
        """Return the prediction for each clip; ``model`` is the sharded model, possibly wrapped."""
        for clip in clips:
            self._check(clip)
        splits = self._split(clips)
        arguments = []
        for clip, split in zip(clips, splits, strict=True):
            arguments.append(self._block_arguments(clip, split))

        hidden = self._run_blocks(arguments, splits)  # [1, n, C]
        parts = hidden.split([split.num_image for split in splits], 1)
        predictions = []
        for clip, split, part in zip(clips, splits, parts, strict=True):
            # A rank without tokens of this clip passes a token of another clip, which the gather
            # drops, so that the gather has a backward on every rank.
            tokens = part if split.num_image else hidden[:, :1]
            with self._as_blocks(split, lambda *args, _out=tokens, **kwargs: _out):
                predictions.append(model(**clip, return_dict=False)[0])
        return predictions

    def _check(self, clip: Mapping[str, Any]) -> None:
        """Raise UserError for a clip that cannot be packed."""
        batch_size = clip["hidden_states"].shape[0]
        if batch_size != 1:
            raise UserError(
                f"a clip to pack has a batch of {batch_size}; give each clip as a batch of 1"
            )
        for name, reason in self._packing.refused.items():
            if clip.get(name) is not None:
                raise UserError(f"{name} cannot be packed: {reason}; run the clip by itself")

    def _split(self, clips: Sequence[Mapping[str, Any]]) -> list[TokenSplit]:
        """Return each clip's split, which says which of its tokens are this rank's.

        Raises UserError if the clips have too few tokens for every rank to get one.
        """
        token_lens = []
        self._hooks.active = False
        try:
            for clip in clips:
                with torch.no_grad():
                    token_lens.append(self._reach_blocks(clip)["hidden_states"].shape[1])
        finally:
            self._hooks.active = True

        cu_seqlens = tuple(accumulate(token_lens, initial=0))
        context = self._context_over(cu_seqlens[-1])
        if len(clips) > 1:
            context = context.under(documents=cu_seqlens)
        plan = context.plan
        for rank in range(plan.size):
            if not (plan.positions(rank) < cu_seqlens[-1]).any():
                raise UserError(
                    f"the clips have {cu_seqlens[-1]} tokens, of which rank {rank} of {plan.size} "
                    "would get none; pack more clips, or use fewer ranks"
                )
        return [
            TokenSplit(context, token_len, 0, first)
            for token_len, first in zip(token_lens, cu_seqlens, strict=False)
        ]

    def _reach_blocks(self, clip: Mapping[str, Any]) -> dict[str, Any]:
        """Run the forward up to the first block; return the block's arguments, keyed by name."""

        def stop(*args: Any, **kwargs: Any) -> None:
            raise BlocksReached(self._signature.bind(*args, **kwargs).arguments)

        try:
            with self._in_place_of_blocks(stop):
                self._model(**clip)
        except BlocksReached as reached:
            return reached.arguments
        raise AssertionError("the model has no block")

    def _block_arguments(self, clip: Mapping[str, Any], split: TokenSplit) -> dict[str, Any]:
        """Return this rank's part of the first block's arguments for a clip, keyed by name."""
        with self._clip(split):
            arguments = self._reach_blocks(clip)
        for name, argument in self._family.blocks[self._blocks_name].items():
            if name in arguments:
                arguments[name] = split.cut_argument(name, arguments[name], argument)
        return arguments

    @contextmanager
    def _clip(self, split: TokenSplit) -> Iterator[None]:
        """Within the context, let forwards use this clip's split for inputs and output."""
        self._hooks.clip_split = split
        try:
            yield
        finally:
            self._hooks.clip_split = None

    @contextmanager
    def _in_place_of_blocks(self, function: Callable[..., Any]) -> Iterator[None]:
        """Make the model's forward call ``function`` once, instead of all transformer blocks."""
        modules: dict[str, Any] = self._model._modules
        blocks = modules[self._blocks_name]
        modules[self._blocks_name] = nn.ModuleList([StandIn(function)])
        try:
            yield
        finally:
            modules[self._blocks_name] = blocks

    @contextmanager
    def _as_blocks(self, split: TokenSplit, function: Callable[..., Any]) -> Iterator[None]:
        with self._clip(split), self._in_place_of_blocks(function):
            yield

    def _run_blocks(
        self, arguments: Sequence[dict[str, Any]], splits: Sequence[TokenSplit]
    ) -> Tensor:
        """Return the blocks' output for this rank's tokens of all clips, ``[1, n, C]``."""
        packed = self._packed_arguments(arguments, splits)
        text_lens = [clip[self._packing.text].shape[1] for clip in arguments]
        split = PackedSplit(splits[0].context, splits, text_lens)
        self._hooks.packed_split = split
        try:
            return self._run_packed(packed, split)
        finally:
            self._hooks.packed_split = None

    def _run_packed(self, packed: dict[str, Any], split: PackedSplit) -> Tensor:
        """Run all blocks on packed arguments of the first one; return the last block's output."""
        checkpoint = None
        if torch.is_grad_enabled() and getattr(self._model, "gradient_checkpointing", False):
            checkpoint = getattr(self._model, CHECKPOINT)
        hidden: Tensor = packed["hidden_states"]
        for block in self._blocks:
            setattr(hidden, SPLIT, split)
            packed["hidden_states"] = hidden
            bound = self._signature.bind(**packed)
            if checkpoint is None:
                hidden = block(*bound.args, **bound.kwargs)
            else:
                hidden = checkpoint(block, *bound.args)
        return hidden

    def _packed_arguments(
        self, arguments: Sequence[dict[str, Any]], splits: Sequence[TokenSplit]
    ) -> dict[str, Any]:
        """Join each clip's arguments of the first block into arguments for all clips.

        Raises UserError for an argument that is neither per token nor of the text.
        """
        packing = self._packing
        token_arguments = self._family.blocks[self._blocks_name]
        packed: dict[str, Any] = {}
        for name in arguments[0]:
            values = [clip[name] for clip in arguments]
            if name == packing.modulation:
                pairs = zip(values, splits, strict=True)
                parts = [self._per_token(value, split.num_image) for value, split in pairs]
                packed[name] = torch.cat(parts, 1)
            elif name in token_arguments:
                packed[name] = _joined(values, splits, token_arguments[name])
            elif name == packing.text:
                packed[name] = torch.cat(values, 1)
            elif all(value is None for value in values):
                packed[name] = None
            elif name == packing.text_mask:
                packed[name] = torch.cat(values, -1)
            else:
                raise UserError(
                    f"{name} is {values[0]!r}, but this argument of the blocks cannot be packed; "
                    "leave it out"
                )
        return packed

    def _per_token(self, modulation: Tensor, num_tokens: int) -> Tensor:
        """Return a clip's modulation per token, ``[1, n, ...]``."""
        if modulation.ndim < self._packing.modulation_ndim:
            modulation = modulation.unsqueeze(1)
        if modulation.shape[1] == 1:
            return modulation.expand(-1, num_tokens, *modulation.shape[2:])
        return modulation[:, :num_tokens]  # without a stand-in


def _joined(values: Sequence[Any], splits: Sequence[TokenSplit], argument: Any) -> Any:
    """Concatenate the clips' values per token, without stand-ins (see ``split``)."""
    if isinstance(values[0], (tuple, list)):
        return tuple(_joined(parts, splits, argument) for parts in zip(*values, strict=True))
    pairs = zip(values, splits, strict=True)
    return torch.cat(
        [x.narrow(argument.dim, 0, split.num_image) for x, split in pairs], argument.dim
    )
