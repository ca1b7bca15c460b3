"""Replace a module's calls of scaled_dot_product_attention by attention over the ranks.

That function is what all attention processors of diffusers have in common: most call it through
``dispatch_attention_fn``, some directly. A TorchFunctionMode around the module's forward intercepts
it in all of them, even after processors were replaced or projections were fused.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from parallel.diffusers.families import Family
from parallel.diffusers.split import PackedSplit, TokenSplit
from runtime.errors import UserError

OTHER_KERNEL = (
    "it did not call torch's scaled_dot_product_attention; call set_attention_backend('native') "
    "before shard, and choose the kernel with shard(..., backend=...)"
)


class ReplacingMode(TorchFunctionMode):
    """Replaces the attention that one module calls during one forward."""

    def __init__(self, layer: str, split: TokenSplit | PackedSplit, family: Family) -> None:
        """Set up for one forward; ``layer`` is the module's name, for messages."""
        super().__init__()
        self.calls = 0
        self._layer = layer
        self._split = split
        self._family = family

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch; attend over the ranks if it is the attention."""
        if func is F.scaled_dot_product_attention:
            out = self._attend_checked(*args, **(kwargs or {}))
            self.calls += 1
            return out
        return func(*args, **(kwargs or {}))

    def _attend_checked(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Check the arguments, and return the attention ``[B, H, n, D]``; signature as torch's."""
        if is_causal or dropout_p > 0 or not self.takes(attn_mask):
            raise UserError(
                f"{self._layer}: its attention has a mask or dropout (is_causal {is_causal}, "
                f"dropout {dropout_p}), but ranks share only full attention without dropout, and "
                "only some families may have a mask, of padded text; leave out the mask and the "
                "dropout"
            )
        if torch.is_autocast_enabled(query.device.type):
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        key, value = key.to(query.dtype), value.to(query.dtype)
        return self.attend(query, key, value, attn_mask, scale)

    def takes(self, mask: Tensor | None) -> bool:
        """Return True if there is no mask, or only one of padded text, which the split has read."""
        return mask is None or (isinstance(self._split, TokenSplit) and self._split.has_mask)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
    ) -> Tensor:
        """Return this rank's part ``[B, H, n, D]`` of the attention over all ranks."""
        raise NotImplementedError

    def check_called(self) -> None:
        """Raise UserError if the module's forward did not call scaled_dot_product_attention."""
        if not self.calls:
            raise UserError(f"{self._layer}: {OTHER_KERNEL}")


class AttentionMode(ReplacingMode):
    """Self-attention of the image tokens, or joint attention with the text tokens."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
    ) -> Tensor:
        """Attend from this rank's tokens to those of all ranks."""
        split = self._split
        if isinstance(split, PackedSplit):
            q, k, v = (x.transpose(1, 2) for x in (query, key, value))  # [1, n, H, D]
            return split.attend_packed(q, k, v, scale).transpose(1, 2)
        num_image = split.local_len("image")
        num_text = split.local_len("text")
        num_queries, num_keys = query.shape[2], key.shape[2]
        if num_queries != num_keys or num_keys not in (num_image, num_image + num_text):
            raise UserError(
                f"{self._layer}: it attends with {num_queries} queries to {num_keys} keys, but "
                f"this rank has {num_image} image and {num_text} text tokens; adapters with keys "
                "of their own, such as IP-Adapter, are not supported"
            )

        sample = None
        if split.text_lengths is not None and len(query) < len(split.text_lengths):
            sample = self.calls  # Mochi attends sample by sample
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))  # [B, n, H, D]
        out = split.attend(q, k, v, text_first=self._family.text_first, scale=scale, sample=sample)
        return out.transpose(1, 2)


class PoolingMode(ReplacingMode):
    """Attention to the image tokens of all ranks, from queries that every rank has completely."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
    ) -> Tensor:
        """Attend from all queries ``[B, H, Q, D]`` to the keys of all ranks."""
        assert isinstance(self._split, TokenSplit)
        return self._split.attend_whole(query, key, value, scale)


class CrossMode(ReplacingMode):
    """Cross-attention of packed clips, from each clip's tokens to its own text."""

    def takes(self, mask: Tensor | None) -> bool:
        """Return True, since ``attend`` splits a mask of the text along with the text."""
        return True

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
    ) -> Tensor:
        """Attend ``[1, H, n, D]`` clip by clip."""
        assert isinstance(self._split, PackedSplit)
        outputs = []
        for tokens, text in self._split.clips():
            local_mask = None if mask is None else mask[..., text]
            out = F.scaled_dot_product_attention(
                query[:, :, tokens], key[:, :, text], value[:, :, text], local_mask, scale=scale
            )
            outputs.append(out)
        return torch.cat(outputs, 2)
