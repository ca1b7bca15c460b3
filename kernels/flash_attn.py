"""Attention from the packages flash-attn, versions 2.7 and 2.8, and flash-attn 3, which is for the H100 and H200.

An installed package may be older or newer, or built for another torch and fail on import. Shapes as in
``kernels.attention`` and ``kernels.packed``.
"""

import inspect
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.blocks import Gradients, Keys, Rows
from kernels.packed import Lengths
from runtime.errors import UserError

# Arguments of 2.7 and 2.8 after the tensors, in order; 2.6 and older take the window as a pair.
SETTINGS = ["dropout_p", "softmax_scale", "causal", "window_size_left", "window_size_right", "softcap", "alibi_slopes"]
FORWARD = ["q", "k", "v", *SETTINGS, "return_softmax"]
BACKWARD = ["dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv", *SETTINGS, "deterministic", "rng_state"]
# Arguments of 3 that are given by name.
PACKED_3 = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}
GIVEN_3 = {"softmax_scale", "is_causal", *PACKED_3}


class FlashAttnError(UserError):
    """flash-attn is missing or unusable; the message is the reason, worded to follow a comma."""


class Kernels(NamedTuple):
    """Functions with the signatures of ``AttentionBackend`` and, where the package's own are used, ``Packed``."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    packed: tuple[Callable[..., Any], Callable[..., Any]] | None = None


class Package(NamedTuple):
    """A package as a person names it, the module that it installs, and the versions that are known."""

    title: str
    module: str
    known: str


PACKAGES = {
    "flash_attn_3": Package("flash-attn 3", "flash_attn_interface", "flash-attn 3 (hopper/ of its repository)"),
    "flash_attn": Package("flash-attn", "flash_attn", "flash-attn 2.7 or 2.8"),
}
"""Candidates, the faster one first."""


def is_installed(name: str) -> bool:
    """Return whether any version of this one of ``PACKAGES`` is installed, usable or not."""
    try:
        return find_spec(PACKAGES[name].module) is not None
    except ValueError:  # the imported module has no spec
        return True


def load(name: str) -> Kernels:
    """Return the kernels of this one of ``PACKAGES``.

    Raises:
        FlashAttnError: it is not installed, its import fails, or its functions take other arguments.
    """
    return _third() if name == "flash_attn_3" else _second()


@cache
def problem(name: str) -> str | None:
    """Say why the installed package cannot be used; None if it can."""
    try:
        load(name)
    except FlashAttnError as error:
        return str(error)
    return None


def _second() -> Kernels:
    ahead, back = _functions()

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = ahead(q, k, v, 0.0, scale, causal, -1, -1, 0.0, None, False)
        return out, lse.transpose(1, 2)

    def backward(rows: Rows, keys: Keys, causal: bool, scale: float) -> Gradients:
        dout, q, k, v, out, lse = _dense(rows, keys)
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        back(dout, q, k, v, out, lse, dq, dk, dv, 0.0, scale, causal, -1, -1, 0.0, None, False, rng_state=None)
        return dq, dk, dv

    return Kernels(forward, backward)


def _third() -> Kernels:
    ahead, back = _operators()

    def packed_forward(
        q: Tensor, k: Tensor, v: Tensor, lengths: Lengths | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        # One split of the keys: where several are added up, their number depends on how busy the device is.
        given = {"softmax_scale": scale, "is_causal": causal, "num_splits": 1, **_bounds(lengths)}
        out, lse, *_ = ahead(q, k, v, **given)
        return out, lse.transpose(-1, -2)

    def packed_backward(rows: Rows, keys: Keys, lengths: Lengths | None, causal: bool, scale: float) -> Gradients:
        dout, q, k, v, out, lse = _dense(rows, keys)
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        back(dout, q, k, v, out, lse, dq, dk, dv, softmax_scale=scale, is_causal=causal, **_bounds(lengths))
        return dq, dk, dv

    return Kernels(
        lambda q, k, v, *rest: packed_forward(q, k, v, None, *rest),
        lambda rows, keys, *rest: packed_backward(rows, keys, None, *rest),
        (packed_forward, packed_backward),
    )


def _dense(rows: Rows, keys: Keys) -> tuple[Tensor, ...]:
    """Return dout, q, k, v, out and lse ``[..., H, T]`` as the packages' kernels take them."""
    lse = rows.lse.float().transpose(-1, -2).contiguous()
    return *(x.contiguous() for x in (rows.dout, rows.q, *keys, rows.out.to(rows.q.dtype))), lse


def _bounds(lengths: Lengths | None) -> dict[str, Any]:
    if lengths is None:
        return {}
    return {
        "cu_seqlens_q": lengths.rows,
        "cu_seqlens_k": lengths.columns,
        "max_seqlen_q": lengths.most_rows,
        "max_seqlen_k": lengths.most_columns,
    }


def _functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the forward and backward of version 2. Raises FlashAttnError."""
    try:
        from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward
    except Exception as error:  # a build for another torch raises ImportError or OSError, a stub anything
        raise _failed("flash_attn", error) from error
    for function, known in ((_flash_attn_forward, FORWARD), (_flash_attn_backward, BACKWARD)):
        if _parameters(function) != known:
            import flash_attn

            version = getattr(flash_attn, "__version__", "of a version it does not tell")
            raise FlashAttnError(f"which is {version}, whose functions take other arguments than 2.7's and 2.8's")
    return _flash_attn_forward, _flash_attn_backward


def _operators() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the operators of version 3, forward and backward, which its import registers. Raises FlashAttnError."""
    try:
        import flash_attn_interface  # noqa: F401

        ahead, back = torch.ops.flash_attn_3.fwd.default, torch.ops.flash_attn_3.bwd.default
    except Exception as error:
        raise _failed("flash_attn_3", error) from error
    for function, given in ((ahead, {"num_splits", *GIVEN_3}), (back, {"dq", "dk", "dv", *GIVEN_3})):
        if missing := given - set(_parameters(function)):
            raise FlashAttnError(f"whose {function} takes no {', '.join(sorted(missing))}")
    return ahead, back


def _failed(name: str, error: Exception) -> FlashAttnError:
    if isinstance(error, ModuleNotFoundError) and not is_installed(name):
        return FlashAttnError("which is not installed")
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return FlashAttnError(f"whose import fails ({reason})")


def _parameters(function: Any) -> list[str]:
    """Return the argument names of a function or torch operator."""
    operator = getattr(function, "_opoverload", function)
    if isinstance(operator, torch._ops.OpOverload):
        return [argument.name for argument in operator._schema.arguments]
    return list(inspect.signature(function).parameters)
