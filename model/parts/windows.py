"""Sliding windows of attention, the layers that have them, and sinks, in Megatron-LM's terms.

``window_size`` is "L,R": query i sees keys i - L .. i + R. ``window_attn_skip_freq`` selects the
layers without the window, which see all earlier tokens.
"""

import ast
from functools import lru_cache
from typing import Literal, NamedTuple

from runtime.errors import UserError

SoftmaxType = Literal["vanilla", "off-by-one", "learnable"]
Window = tuple[int, int]
"""(before, after): query i sees keys i - before .. i + after; -1 means all keys on that side, and
after is 0 under a causal mask."""

WIDEST = 10**9 - 1
MOST_LAYERS = 100_000
LONGEST_PATTERN = 10_000
"""Maximum number of characters in a pattern."""


@lru_cache
def windows_of(size: str | None, skip: str | None, layers: int) -> tuple[Window | None, ...]:
    """Return the window of each layer of a causal model; None means all earlier tokens.

    Args:
        size: ``window_size``; None and "-1,0" mean no window.
        skip: ``window_attn_skip_freq``; None gives every layer the window.
        layers: number of layers; the windows of at most ``MOST_LAYERS`` are returned.

    Raises:
        UserError: a setting cannot be parsed, or ``skip`` is given without ``size``.
    """
    if size is None and skip is not None:
        raise UserError(
            f"window_attn_skip_freq is {skip}, but window_size is not set, so every layer sees all "
            "earlier tokens; leave window_attn_skip_freq out, or give --window-size"
        )
    window = window_of(size)
    if skip is None:
        return (window,) * min(layers, MOST_LAYERS)
    windowed = layers_of(skip, layers, WINDOW_PATTERN)
    return tuple(window if has_window else None for has_window in windowed)


def window_of(size: str | None) -> Window | None:
    """Parse a causal window, such as "1023,0" or "(1023, 0)"; None and "-1,0" mean no window."""
    if size is None:
        return None
    words = size.strip().removeprefix("(").removesuffix(")").split(",")
    try:
        keys_before, keys_after = map(int, words)
    except ValueError:
        raise UserError(
            f"window_size is {size}; it must be two numbers, such as 1023,0: how many keys a token "
            "sees before its own, and how many after it"
        ) from None
    if keys_before != -1 and not 1 <= keys_before <= WIDEST:
        raise UserError(
            f"window_size is {size}, with {keys_before} keys before a token's own; this number "
            f"must be from 1 to {WIDEST:,}, or -1 for all earlier keys"
        )
    if keys_after != 0:
        raise UserError(
            f"window_size is {size}, with {keys_after} keys after a token's own, but a causal mask "
            f"hides those; give --window-size {keys_before},0"
        )
    return (keys_before, keys_after) if keys_before > 0 else None


class Pattern(NamedTuple):
    """A setting that selects layers: a number N, or a list of 1 and 0 for the layers.

    The fields from ``nth`` on, except ``nth_is_one``, are words for its error messages.
    """

    name: str
    """Name of the setting."""
    nth: str
    """Words for the property of every N-th layer, such as "has no rope"."""
    listed: str
    """Words for the property of a layer with a 1, to follow "with"."""
    example: str
    """A valid pattern."""
    nth_is_one: bool
    """True if a number N means a 1 for every N-th layer and 0 for the others; else the reverse."""
    lacking: str
    """Name of the property that no layer has if N is 1."""
    otherwise: str
    """Words for leaving the setting out."""


WINDOW_PATTERN = Pattern(
    name="window_attn_skip_freq",
    nth="sees all earlier tokens",
    listed="the window",
    example="([1]*3+[0]*1)*6 for 24 layers",
    nth_is_one=False,
    lacking="the window",
    otherwise="left out",
)


@lru_cache
def layers_of(text: str, layers: int, pattern: Pattern) -> list[bool]:
    """Return for each of at most ``MOST_LAYERS`` layers whether a setting gives it a 1.

    Raises:
        UserError: the text is neither a number of 2 or more nor a pattern with an entry per layer.
    """
    name = pattern.name
    count = min(layers, MOST_LAYERS)
    if len(text) > LONGEST_PATTERN:
        raise UserError(
            f"{name} has {len(text):,} characters, but at most {LONGEST_PATTERN:,} are allowed; "
            "write repeated layers as in [1]*3"
        )
    try:
        value = _evaluate(ast.parse(text.strip(), mode="eval").body, count, pattern)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        reason = str(error) if type(error) is ValueError else "it is neither"
        raise UserError(
            f"{name} is {text}; it must be a number N, if every N-th layer {pattern.nth}, or a "
            f"pattern of 1 and 0 for num_layers {layers}, such as {pattern.example}; {reason}"
        ) from None

    if isinstance(value, int):
        if value < 2:
            raise UserError(
                f"{name} is {text}, which leaves no layer with {pattern.lacking}; it must be 2 "
                f"(every other layer {pattern.nth}) or more, or {pattern.otherwise}"
            )
        return [(layer % value == 0) == pattern.nth_is_one for layer in range(1, count + 1)]
    if len(value) != layers:
        raise UserError(
            f"{name} is {text}, a pattern of {len(value)} layers, but num_layers is {layers}; "
            "give each layer a 1 or a 0"
        )
    return list(map(bool, value))


def _evaluate(node: ast.expr, max_layers: int, pattern: Pattern) -> int | list[int]:
    """Evaluate a number, or lists of 1 and 0 with + and *; refuse all else.

    The text comes from command lines and files, so it is never passed to ``eval``, and no list
    grows longer than ``max_layers``: [1]*10**12 fails before it takes memory.
    """
    match node:
        case ast.Constant(value=int() as number) if type(number) is int:
            return number
        case ast.List(elts=elements):
            flags = [_evaluate(element, max_layers, pattern) for element in elements]
            if any(flag not in (0, 1) for flag in flags):
                raise ValueError(
                    f"a list has a 1 for each layer with {pattern.listed} and a 0 for the rest"
                )
            return [int(flag) for flag in flags if isinstance(flag, int)]
        case ast.BinOp(left=first_node, op=ast.Add(), right=second_node):
            first = _evaluate(first_node, max_layers, pattern)
            second = _evaluate(second_node, max_layers, pattern)
            if isinstance(first, list) and isinstance(second, list):
                return first + second
            raise ValueError("lists can only be added to lists and multiplied by numbers")
        case ast.BinOp(left=first_node, op=ast.Mult(), right=second_node):
            factors = (
                _evaluate(first_node, max_layers, pattern),
                _evaluate(second_node, max_layers, pattern),
            )
            lists = [factor for factor in factors if isinstance(factor, list)]
            numbers = [factor for factor in factors if isinstance(factor, int)]
            if len(lists) != 1:
                raise ValueError("lists can only be added to lists and multiplied by numbers")
            if len(lists[0]) * numbers[0] > max_layers:
                raise ValueError(f"it has more than {max_layers} layers")
            return lists[0] * numbers[0]
    raise ValueError("it may only have numbers, lists, + and *")
