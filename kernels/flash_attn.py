"""Load attention from the package flash-attn, versions 2.7 and 2.8.

The installed package may be older or newer, or built for another torch and fail on import.
"""

import inspect
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from runtime.errors import UserError

# Arguments of 2.7 and 2.8 after the tensors, in order; 2.6 and older take the window as a pair.
SETTINGS = ["dropout_p", "softmax_scale", "causal", "window_size_left", "window_size_right", "softcap", "alibi_slopes"]
FORWARD = ["q", "k", "v", *SETTINGS, "return_softmax"]
BACKWARD = ["dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv", *SETTINGS, "deterministic", "rng_state"]


class FlashAttnError(UserError):
    """flash-attn is missing or unusable; the message is the reason, worded to follow a comma."""


def is_installed() -> bool:
    """Return whether any version of flash-attn is installed, usable or not."""
    try:
        return any(find_spec(name) is not None for name in ("flash_attn", "flash_attn_interface"))
    except ValueError:  # the imported module has no spec
        return True


def load() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return forward and backward with the signatures of ``AttentionBackend``.

    Raises:
        FlashAttnError: it is not installed, its import fails, or its functions take other arguments.
    """
    ahead, back = _functions()

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = ahead(q, k, v, 0.0, scale, causal, -1, -1, 0.0, None, False)
        return out, lse.transpose(1, 2)

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out = (x.contiguous() for x in (dout, q, k, v, out.to(q.dtype)))
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        lse = lse.float().transpose(1, 2).contiguous()
        back(dout, q, k, v, out, lse, dq, dk, dv, 0.0, scale, causal, -1, -1, 0.0, None, False, rng_state=None)
        return dq, dk, dv

    return forward, backward


@cache
def problem() -> str | None:
    """Say why the installed flash-attn cannot be used; None if it can."""
    try:
        _functions()
    except FlashAttnError as error:
        return str(error)
    return None


def _functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    try:
        from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward
    except Exception as error:  # a build for another torch raises ImportError or OSError, a stub anything
        if isinstance(error, ModuleNotFoundError) and not is_installed():
            raise FlashAttnError("which is not installed") from error
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise FlashAttnError(f"whose import fails ({reason})") from error
    for function, known in ((_flash_attn_forward, FORWARD), (_flash_attn_backward, BACKWARD)):
        if _parameters(function) != known:
            import flash_attn

            version = getattr(flash_attn, "__version__", "of a version it does not tell")
            raise FlashAttnError(f"which is {version}, whose functions take other arguments than 2.7's and 2.8's")
    return _flash_attn_forward, _flash_attn_backward


def _parameters(function: Any) -> list[str]:
    """Return the argument names of a function or torch operator."""
    operator = getattr(function, "_opoverload", None)
    if operator is not None:
        return [argument.name for argument in operator._schema.arguments]
    return list(inspect.signature(function).parameters)
