"""Find this rank's tokens of a clip, cut tensors to them, gather them, and attend over ranks.

The joint sequence has N = I + T tokens, image tokens first, and is cut into equal contiguous parts,
one per rank. So not every rank computes all of the text. A sample with less text is padded at the
end of the sequence; its padding is a separate document, to which no other token attends.

A rank may have no token of a stream. It then holds the stream's first token as a *stand-in*, since
models fail on empty streams (``x[:, :-0]`` is empty) and DDP waits for parameters without
gradients. A stand-in takes no part in the attention, where its output is 0, and nothing reads the
blocks' output for it.

Shapes: B samples, I image and T text tokens, n of them this rank's, H heads of width D.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from parallel.collectives import SumOverRanks
from parallel.context import ContextParallel
from parallel.diffusers.families import Argument, FirstImageTokens, Stream, TextMask, Tokens
from runtime.errors import UserError
from runtime.tensors import accum_dtype


class SelectTokens(torch.autograd.Function):
    """Copies some tokens, and saves no tensor: its backward reads the index from an attribute.

    A block that checkpointing recomputes must save as many tensors as in its forward, but a tensor
    that several blocks get is cut in only one of them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, index: Tensor) -> Tensor:
        """Return a copy of the tokens; a view would keep the whole tensor in memory."""
        ctx.shape, ctx.dim, ctx.index = x.shape, dim, index
        return x.index_select(dim, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the whole tensor, 0 for the tokens that were not copied."""
        whole = gradient.new_zeros(ctx.shape)
        return whole.index_add_(ctx.dim, ctx.index, gradient), None, None


class LocalCount(int):
    """A number of tokens that was already reduced to this rank's tokens."""


class TokenSplit:
    """Division of one forward's tokens over ranks: this rank's tokens, and the text's lengths."""

    def __init__(
        self, context: ContextParallel, image_len: int, text_len: int, first: int = 0
    ) -> None:
        """Find this rank's tokens.

        Args:
            context: context of a sequence that contains these tokens from position ``first`` on.
            image_len: number of image tokens, on all ranks together.
            text_len: number of text tokens, on all ranks together.
        """
        self.context = context
        self._first = first
        self.whole_len: dict[Stream, int] = {
            "image": image_len,
            "text": text_len,
            "joint": image_len + text_len,
        }
        self.has_mask = False
        """True once ``read_mask`` has read a mask of the text's padding."""
        self.text_lengths: tuple[int, ...] | None = None
        """Number of text tokens of each sample, without padding; None if no text is padded."""

        image = self._image_tokens(context.positions)
        positions = context.positions - first - image_len
        text = positions[(positions >= 0) & (positions < text_len)]
        self.num_image = len(image)
        self.num_text = len(text)
        stand_in = torch.zeros(1, dtype=torch.long)
        image = image if len(image) else stand_in
        if text_len and not len(text):
            text = stand_in
        self._index: dict[Stream, Tensor] = {
            "image": image,
            "text": text,
            "joint": torch.cat([text, image + text_len]),
        }
        self._cuts: dict[tuple[int, Tokens], tuple[Tensor, Tensor]] = {}
        self._indices: dict[tuple[Any, torch.device], Tensor] = {}
        """Cached copies of indices, keyed by index and device, since a new copy would make the host
        wait for the device."""

    def _on_device(self, key: Any, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
        """Return an index on a device; the first call makes and copies it."""
        if (key, device) not in self._indices:
            self._indices[key, device] = make().to(device)
        return self._indices[key, device]

    def _image_tokens(self, positions: Tensor) -> Tensor:
        """Return the indices of this clip's image tokens that lie at ``positions``."""
        tokens = positions - self._first
        return tokens[(tokens >= 0) & (tokens < self.whole_len["image"])]

    def local_len(self, stream: Stream) -> int:
        """Return the number of this rank's tokens in a stream, including a stand-in."""
        return len(self._index[stream])

    def cut_argument(self, name: str, value: Any, argument: Argument) -> Any:
        """Return this rank's part of a block's or model's argument.

        Raises UserError if a tensor has neither all tokens nor exactly this rank's.
        """
        if value is None:
            return None
        if isinstance(argument, TextMask):
            return self._local_mask(value) if argument.ones else None
        if isinstance(argument, FirstImageTokens):
            if isinstance(value, LocalCount):
                return value
            return LocalCount((self._index["image"] < value).sum())
        if isinstance(argument, tuple):
            pairs = zip(value, argument, strict=True)
            return tuple(self.cut_argument(name, part, tokens) for part, tokens in pairs)
        if isinstance(value, (tuple, list)):
            return type(value)(self.cut_argument(name, part, argument) for part in value)
        return self._cut(name, value, argument)

    def _cut(self, name: str, x: Tensor, tokens: Tokens) -> Tensor:
        """Return this rank's tokens of x; x itself if it has only these, or one value for all.

        Cuts are cached, since every block gets the same rotary table, except those of hidden
        states, which differ in each block.
        """
        if tokens.ndim is not None and x.ndim != tokens.ndim:
            return x
        length = x.shape[tokens.dim]
        whole = self.whole_len[tokens.stream]
        local = self.local_len(tokens.stream)
        if length in (1, local):
            return x
        if length != whole:
            raise UserError(
                f"{name} is {tuple(x.shape)}: dimension {tokens.dim} has {length} "
                f"{tokens.stream} tokens, but must have all {whole} or this rank's {local}; if its "
                "block is recomputed in the backward pass, checkpoint it with use_reentrant=False"
            )

        key = (id(x), tokens)
        if key in self._cuts:
            return self._cuts[key][1]
        stream = tokens.stream
        index = self._on_device(stream, x.device, lambda: self._index[stream])
        cut: Tensor = SelectTokens.apply(x, tokens.dim % x.ndim, index)
        if not tokens.is_hidden:
            self._cuts[key] = (x, cut)  # keep x alive, so that no other tensor gets its id
        return cut

    def forget_cuts(self) -> None:
        """Empty the cache of cuts, which keeps the whole tensors alive."""
        self._cuts.clear()

    def _local_mask(self, mask: Tensor) -> Tensor:
        """Return a mask of ones for this rank's text tokens ``[B, n]``."""
        return mask.new_ones(mask.shape[0], self.local_len("text"))

    def read_mask(self, name: str, mask: Tensor) -> None:
        """Set each sample's number of text tokens from a mask ``[B, ..., T]``.

        Raises UserError if the mask has padding before text.
        """
        text = mask.reshape(mask.shape[0], -1)[:, -self.whole_len["text"] :] > 0  # [B, T]
        lengths = text.sum(1)
        position = torch.arange(text.shape[1], device=text.device)
        if not torch.equal(text, position < lengths[:, None]):
            raise UserError(
                f"{name} has padding before text tokens; put the padding at the end of each row"
            )
        self.has_mask = True
        padded = bool((lengths < text.shape[1]).any())
        self.text_lengths = tuple(lengths.tolist()) if padded else None

    def gather(self, x: Tensor) -> Tensor:
        """Gather this rank's image tokens ``[B, n, C]`` to ``[B, I, C]``; differentiable."""
        x = x[:, : self.num_image]  # without a stand-in
        if self.context.group is None:
            return x
        # Each rank has 0 for the tokens of others, so a sum gathers them. Its backward sums the
        # gradients, so every rank may compute a different loss from all tokens.
        local = self._index["image"][: self.num_image]
        index = self._on_device("local image", x.device, lambda: local)
        whole = x.new_zeros(x.shape[0], self.whole_len["image"], *x.shape[2:])
        gathered: Tensor = SumOverRanks.apply(whole.index_copy(1, index, x), self.context.group)
        return gathered

    def attend_whole(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        """Return the attention ``[B, H, Q, D]`` to the image tokens of all ranks.

        It is meant for few queries, since all scores ``[B, H, Q, n]`` are in memory, in float32 or
        wider. The softmax over all keys takes two all-reduces: of the largest scores, and of the
        weighted values with the weights' sum.

        Args:
            q: queries ``[B, H, Q, D]``, the same on every rank.
            k, v: keys and values of this rank's image tokens, ``[B, H, n, D]``.
        """
        dtype = q.dtype
        group = self.context.group
        k = k[:, :, : self.num_image]  # without a stand-in
        v = v[:, :, : self.num_image]
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        with torch.autocast(q.device.type, enabled=False):
            q, k, v = (x.to(accum_dtype(dtype)) for x in (q, k, v))
            scores = factor * q @ k.transpose(-1, -2)  # [B, H, Q, n]
            largest = scores.new_full((*scores.shape[:-1], 1), -torch.inf)
            if self.num_image:
                largest = scores.detach().amax(-1, keepdim=True)
            if group is not None:
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
            weights = (scores - largest).exp()
            sums = torch.cat([weights @ v, weights.sum(-1, keepdim=True)], -1)  # [B, H, Q, D + 1]
            if group is not None:
                sums = SumOverRanks.apply(sums, group)
            return (sums[..., :-1] / sums[..., -1:]).to(dtype)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        text_first: bool,
        scale: float | None,
        sample: int | None = None,
    ) -> Tensor:
        """Return the attention of this rank's queries to their samples' tokens.

        Args:
            q, k, v: this rank's tokens of both streams, or of the image alone, ``[B, n, H, D]``.
            text_first: True if the text tokens come first in q, k and v.
            sample: number of the sample that q, k and v belong to; None if they have all samples.
        """
        with_text = q.shape[1] > self.local_len("image")
        key = ("order", text_first, with_text)
        order = self._on_device(key, q.device, lambda: self._order(text_first, with_text))
        padding = len(self.context.positions) - len(order)

        def local(x: Tensor) -> Tensor:
            return F.pad(x.index_select(1, order), (0, 0, 0, 0, 0, padding))

        local_q, local_k, local_v = local(q), local(k), local(v)
        if with_text and self.text_lengths is not None and sample is None:
            outputs = self._attend_by_length(local_q, local_k, local_v, scale)
        else:
            text_len = self.whole_len["text"] if with_text else 0
            if with_text and self.text_lengths is not None and sample is not None:
                text_len = self.text_lengths[sample]
            outputs = self._attend(local_q, local_k, local_v, text_len, scale)
        rows = q.new_zeros(q.shape)
        return rows.index_copy(1, order, outputs[:, : len(order)])

    def _order(self, text_first: bool, with_text: bool) -> Tensor:
        """Return this rank's tokens in the split's order, as indices in q; without stand-ins."""
        num_text = self.num_text if with_text else 0
        image = torch.arange(self.num_image)
        text = torch.arange(num_text)
        if text_first and with_text:
            image = image + self.local_len("text")
        else:
            text = text + self.local_len("image")
        return torch.cat([image, text])

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, text_len: int, scale: float | None
    ) -> Tensor:
        """Attend ``[B, n, H, D]`` for samples with the same number of text tokens."""
        end = self.whole_len["image"] + text_len
        context = self.context
        if text_len < self.whole_len["text"]:
            context = context.under(documents=(0, end, self.whole_len["joint"]))
        return context.attend(q, k, v, scale=scale)

    def _attend_by_length(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        """Attend ``[B, n, H, D]``, in one call for all samples with the same length of text."""
        assert self.text_lengths is not None
        samples_of: dict[int, list[int]] = {}
        for sample, text_len in enumerate(self.text_lengths):
            samples_of.setdefault(text_len, []).append(sample)

        outputs = torch.zeros_like(q)
        for text_len, samples in samples_of.items():
            key = ("samples", *samples)
            index = self._on_device(key, q.device, partial(torch.tensor, samples))
            selected_q, selected_k, selected_v = (x.index_select(0, index) for x in (q, k, v))
            out = self._attend(selected_q, selected_k, selected_v, text_len, scale)
            outputs = outputs.index_copy(0, index, out)
        return outputs


class PackedSplit:
    """This rank's tokens of several clips that are packed into one sequence."""

    def __init__(
        self, context: ContextParallel, splits: Sequence[TokenSplit], text_lens: Sequence[int]
    ) -> None:
        """Pack clips in this order.

        Args:
            context: context of all clips' tokens, in which each clip is a document.
            splits: split of each clip.
            text_lens: number of text tokens of each clip.
        """
        self.context = context
        self.splits = tuple(splits)
        self._text_lens = tuple(text_lens)

    def cut_argument(self, name: str, value: Any, argument: Argument) -> Any:
        """Return a block's argument unchanged, since packed arguments are this rank's already."""
        return value

    def clips(self) -> Iterator[tuple[slice, slice]]:
        """Yield two slices for each clip: of this rank's tokens, and of the packed text."""
        token, text = 0, 0
        for split, text_len in zip(self.splits, self._text_lens, strict=True):
            yield slice(token, token + split.num_image), slice(text, text + text_len)
            token += split.num_image
            text += text_len

    def attend_packed(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        """Return the attention ``[1, n, H, D]`` of this rank's tokens, each to its own clip."""
        padding = len(self.context.positions) - q.shape[1]
        q_padded, k_padded, v_padded = (F.pad(x, (0, 0, 0, 0, 0, padding)) for x in (q, k, v))
        out = self.context.attend(q_padded, k_padded, v_padded, scale=scale)
        return out[:, : q.shape[1]]
