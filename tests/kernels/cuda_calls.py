"""Arguments and results of a GPU's attention kernels, by their shape functions.

These run without a GPU.

The shape functions take what the kernels refuse, so the kernels' own conditions stand here (torch's
aten/src/ATen/native/transformers/cuda: flash_attn/flash_api.cpp and attention.cu, of 2.13; cuDNN
takes as few).
"""

from collections import Counter
from contextlib import ExitStack
from unittest.mock import patch

import torch

aten = torch.ops.aten
HALVES = (torch.bfloat16, torch.float16)
FORWARD = {
    "aten::_scaled_dot_product_flash_attention": "heads first",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_flash_attention_forward": "packed",
}
BACKWARD = {f"{name.removesuffix('_forward')}_backward": layout for name, layout in FORWARD.items()}


class CudaCalls:
    """While entered, check each call of an attention kernel, and count them by operator.

    Raises AssertionError.

    A dispatch mode would see all other operators too, which takes twice as long.
    """

    def __init__(self):
        self.calls = Counter[str]()
        self._patches = ExitStack()

    def __enter__(self):
        for name in (*FORWARD, *BACKWARD):
            short_name = name.removeprefix("aten::")
            self._patches.enter_context(
                patch.object(
                    aten, short_name, _Checked(name, getattr(aten, short_name), self.calls)
                )
            )
        return self

    def __exit__(self, *exc_info):
        self._patches.close()


class _Checked:
    """An operator whose calls are checked and counted."""

    def __init__(self, name, plain, calls):
        self.name, self.plain, self.calls = name, plain, calls

    def __getattr__(self, name):
        return getattr(self.plain, name)

    def __call__(self, *args, **kwargs):
        outputs, named = self.plain(*args, **kwargs), _named(self.plain.default, args, kwargs)
        q, k, v = named["qkv"]
        if self.name in FORWARD:
            _check(FORWARD[self.name], named, q, k, v, outputs[0], outputs[1], is_backward=False)
        else:
            _check(
                BACKWARD[self.name],
                named,
                q,
                k,
                v,
                named["out"],
                named["logsumexp"],
                is_backward=True,
            )
            _check_rows(named["grad_out"], q, "dout")
            for gradient, tensor in zip(outputs[:3], (q, k, v), strict=True):
                assert (gradient.shape, gradient.dtype) == (tensor.shape, tensor.dtype), (
                    f"{self.name} returns {gradient.shape}"
                )
        self.calls[self.name] += 1
        return outputs


def _named(func, args, kwargs):
    named = dict(
        zip((argument.name for argument in func._schema.arguments), args, strict=False)
    ) | (kwargs or {})
    assert named.get("scale") is not None, "the kernel's own scale is that of padded heads"
    return named | {"qkv": (named["query"], named["key"], named["value"])}


def _check(layout, named, q, k, v, out, lse, is_backward):
    """q, k, v and out ``[B, H, T, D]``, or packed ``[R, H, D]``.

    lse ``[B, H, T]``, cuDNN's one more, or ``[H, R]``.
    """
    rows, head = (0, 1) if layout == "packed" else (2, 1)
    for x, what in ((q, "q"), (k, "k"), (v, "v")):
        _check_rows(x, q, what, like=k if what == "v" else None)
    assert q.shape[-1] % 8 == 0, f"heads of {q.shape[-1]} are not padded"
    assert q.shape[-1] <= 256
    assert q.shape[head] % k.shape[head] == 0, f"{q.shape[head]} query heads share {k.shape[head]}"
    assert q.shape[rows], "no query"
    assert k.shape[rows], "no key"
    causal, lengths = named.get("is_causal", False), (q.shape[rows], k.shape[rows])
    assert causal is False or lengths[0] == lengths[1], (
        f"a causal rectangle of {lengths}, which kernels align apart"
    )
    _check_rows(out, q, "out")
    want = {"heads first": q.shape[:3], "cudnn": (*q.shape[:3], 1), "packed": q.shape[1::-1]}[
        layout
    ]
    assert (lse.shape, lse.dtype) == (torch.Size(want), torch.float32), (
        f"lse is {lse.dtype} {tuple(lse.shape)}"
    )
    assert lse.is_contiguous() or not is_backward, "lse is not contiguous"
    if layout == "packed":
        starts = [x for name, x in named.items() if name.startswith("cum_seq")]
        assert [x.dtype for x in starts] == [torch.int32] * 2
        assert starts[0].shape == starts[1].shape
    if layout == "packed" or is_backward:
        max_lengths = named["max_q"], named["max_k"]
        assert (
            max_lengths == lengths
            if layout != "packed"
            else all(0 < a <= b for a, b in zip(max_lengths, lengths, strict=True))
        )


def _check_rows(x, q, what, like=None):
    assert x.dtype == q.dtype, f"{what} is {x.dtype} beside {q.dtype}"
    assert x.dtype in HALVES, f"{what} is {x.dtype}"
    assert x.stride(-1) == 1, f"channels of {what} have stride {x.stride(-1)}"
    if what in ("out", "dout"):
        assert x.shape == q.shape, f"{what} is {x.shape}"
    elif like is not None:
        assert x.shape == like.shape, f"{what} is {x.shape}"
