"""Sliding windows of attention, the layers that have them, and sinks, in Megatron-LM's words.

``window_size`` is "L,R": query i sees keys i - L .. i + R. ``window_attn_skip_freq`` names the layers that see all.
"""

import ast
from functools import lru_cache
from typing import Literal

from runtime.errors import UserError

SoftmaxType = Literal["vanilla", "off-by-one", "learnable"]
Window = tuple[int, int]
"""(left, right): query i sees keys i - left .. i + right, -1 being all on that side; right is 0 under a causal mask."""

WIDEST = 10**9 - 1
MOST_LAYERS = 100_000
LONGEST_PATTERN = 10_000
"""Characters."""


@lru_cache
def windows_of(size: str | None, skip: str | None, layers: int) -> tuple[Window | None, ...]:
    """Return the window of each layer of a causal model, at most ``MOST_LAYERS``; None sees all earlier tokens.

    Args:
        size: ``window_size``; None, and -1 before a token, are no window.
        skip: ``window_attn_skip_freq``; None leaves out no layer.

    Raises:
        UserError: they are no window and no layers, or the one is of no use without the other.
    """
    if size is None and skip is not None:
        raise UserError(
            f"window_attn_skip_freq is {skip} and window_size is not set, so that every layer sees all earlier tokens; "
            "leave it out, or give --window-size"
        )
    window = window_of(size)
    return tuple(window if has else None for has in _layers(skip, layers))


def window_of(size: str | None) -> Window | None:
    """Parse a causal window, such as "1023,0" or "(1023, 0)"; None, and -1 before a token, are none."""
    if size is None:
        return None
    try:
        left, right = (int(word) for word in size.strip().removeprefix("(").removesuffix(")").split(","))
    except ValueError:
        raise UserError(
            f"window_size is {size}; it must be two numbers, the keys that a token sees before and after its own, such "
            "as 1023,0"
        ) from None
    if left != -1 and not 1 <= left <= WIDEST:
        raise UserError(
            f"window_size is {size}, {left} keys before a token's own; it must be from 1 to {WIDEST:,}, or -1 for all "
            "of them"
        )
    if right != 0:
        raise UserError(
            f"window_size is {size}, {right} keys after a token's own, which a causal mask hides; give --window-size "
            f"{left},0"
        )
    return (left, right) if left > 0 else None


def _layers(skip: str | None, layers: int) -> list[bool]:
    """Parse which layers have the window."""
    if skip is None:
        return [True] * min(layers, MOST_LAYERS)
    if len(skip) > LONGEST_PATTERN:
        raise UserError(
            f"window_attn_skip_freq is a text of {len(skip):,} characters; it can have {LONGEST_PATTERN:,}: write "
            "layers that repeat as [1]*3"
        )
    try:
        found = _value(ast.parse(skip.strip(), mode="eval").body, min(layers, MOST_LAYERS))
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        reason = str(error) if type(error) is ValueError else "it is neither"
        raise UserError(
            f"window_attn_skip_freq is {skip}; it must be a number, of which every so-many-th layer sees all, or a "
            f"pattern of 1 and 0 for num_layers {layers}, such as ([1]*3+[0]*1)*6 for 24; {reason}"
        ) from None
    if isinstance(found, int):
        if found < 2:
            raise UserError(
                f"window_attn_skip_freq is {skip}, which leaves no layer with the window; it must be 2 (every other "
                "layer sees all) or more, or left out"
            )
        return [layer % found != 0 for layer in range(1, min(layers, MOST_LAYERS) + 1)]
    if len(found) != layers:
        raise UserError(
            f"window_attn_skip_freq is {skip}, a pattern of {len(found)} layers, and num_layers is {layers}; give each "
            "layer a 1 or a 0"
        )
    return list(map(bool, found))


def _value(node: ast.expr, most: int) -> int | list[int]:
    """Evaluate lists of 1 and 0, numbers, + and *, and nothing else; no list grows longer than ``most``."""
    match node:
        case ast.Constant(value=int() as number) if type(number) is int:
            return number
        case ast.List(elts=elements):
            found = [_value(element, most) for element in elements]
            if any(one not in (0, 1) for one in found):
                raise ValueError("a list has a 1 for each layer with the window and a 0 for each without")
            return [int(one) for one in found if isinstance(one, int)]
        case ast.BinOp(left=left, op=ast.Add() | ast.Mult() as operator, right=right):
            values = [_value(left, most), _value(right, most)]
            lists = [one for one in values if isinstance(one, list)]
            times = [one for one in values if isinstance(one, int)]
            if len(times) != isinstance(operator, ast.Mult):
                raise ValueError("lists are added to lists, and multiplied by numbers")
            if times and len(lists[0]) * times[0] > most:
                raise ValueError(f"it has more than {most} layers")
            return lists[0] * times[0] if times else lists[0] + lists[1]
    raise ValueError("it has more than numbers, lists, + and *")
