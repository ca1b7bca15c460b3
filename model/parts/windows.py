"""Sliding windows of attention, the layers that have them, and sinks, in Megatron-LM's words.

``window_size`` is "L,R": query i sees keys i - L .. i + R. ``window_attn_skip_freq`` names the
layers that see all.
"""

import ast
from functools import lru_cache
from typing import Literal, NamedTuple

from runtime.errors import UserError

SoftmaxType = Literal["vanilla", "off-by-one", "learnable"]
Window = tuple[int, int]
"""(left, right): query i sees keys i - left .. i + right, -1 being all on that side; right is 0
under a causal mask.
"""

WIDEST = 10**9 - 1
MOST_LAYERS = 100_000
LONGEST_PATTERN = 10_000
"""Characters."""


@lru_cache
def windows_of(size: str | None, skip: str | None, layers: int) -> tuple[Window | None, ...]:
    """Return the window of each layer of a causal model, at most ``MOST_LAYERS``; None sees all
    earlier tokens.

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
    """Parse a causal window, such as "1023,0" or "(1023, 0)"; None, and -1 before a token, are
    none.
    """
    if size is None:
        return None
    try:
        left, right = (
            int(word) for word in size.strip().removeprefix("(").removesuffix(")").split(",")
        )
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
    return (
        [True] * min(layers, MOST_LAYERS)
        if skip is None
        else layers_of(skip, layers, WINDOW_PATTERN)
    )


class Pattern(NamedTuple):
    """A setting that names layers: N, or a list of a 1 or a 0 for each."""

    name: str
    """The setting."""
    nth: str
    """Verb of every N-th layer, for messages."""
    listed: str
    """Noun of a layer with a 1, for messages."""
    example: str
    """A pattern, for messages."""
    nth_is_one: bool
    """True if N gives every N-th layer the 1, otherwise the 0."""
    lacking: str
    """Noun of what no layer has if N is 1, for messages."""
    otherwise: str
    """Words for the setting's default, for messages."""


WINDOW_PATTERN = Pattern(
    name="window_attn_skip_freq",
    nth="sees all",
    listed="the window",
    example="([1]*3+[0]*1)*6 for 24",
    nth_is_one=False,
    lacking="the window",
    otherwise="left out",
)


@lru_cache
def layers_of(text: str, layers: int, pattern: Pattern) -> list[bool]:
    """Parse which layers have the 1 of a setting, at most ``MOST_LAYERS``.

    Raises:
        UserError: it is neither a number of 2 or more nor a pattern of so many layers.
    """
    name, count = pattern.name, min(layers, MOST_LAYERS)
    if len(text) > LONGEST_PATTERN:
        raise UserError(
            f"{name} is a text of {len(text):,} characters; it can have {LONGEST_PATTERN:,}: write "
            "layers that repeat as [1]*3"
        )
    try:
        found = _value(ast.parse(text.strip(), mode="eval").body, count, pattern)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        reason = str(error) if type(error) is ValueError else "it is neither"
        raise UserError(
            f"{name} is {text}; it must be a number, of which every so-many-th layer {pattern.nth}, or a "
            f"pattern of 1 and 0 for num_layers {layers}, such as {pattern.example}; {reason}"
        ) from None
    if isinstance(found, int):
        if found < 2:
            raise UserError(
                f"{name} is {text}, which leaves no layer with {pattern.lacking}; it must be 2 (every other "
                f"layer {pattern.nth}) or more, or {pattern.otherwise}"
            )
        return [(layer % found == 0) == pattern.nth_is_one for layer in range(1, count + 1)]
    if len(found) != layers:
        raise UserError(
            f"{name} is {text}, a pattern of {len(found)} layers, and num_layers is {layers}; give each "
            "layer a 1 or a 0"
        )
    return list(map(bool, found))


def _value(node: ast.expr, most: int, pattern: Pattern) -> int | list[int]:
    """Evaluate lists of 1 and 0, numbers, + and *, and nothing else; no list grows longer than
    ``most``.
    """
    match node:
        case ast.Constant(value=int() as number) if type(number) is int:
            return number
        case ast.List(elts=elements):
            found = [_value(element, most, pattern) for element in elements]
            if any(one not in (0, 1) for one in found):
                raise ValueError(
                    f"a list has a 1 for each layer with {pattern.listed} and a 0 for each without"
                )
            return [int(one) for one in found if isinstance(one, int)]
        case ast.BinOp(left=left, op=ast.Add() | ast.Mult() as operator, right=right):
            values = [_value(left, most, pattern), _value(right, most, pattern)]
            lists = [one for one in values if isinstance(one, list)]
            times = [one for one in values if isinstance(one, int)]
            if len(times) != isinstance(operator, ast.Mult):
                raise ValueError("lists are added to lists, and multiplied by numbers")
            if times and len(lists[0]) * times[0] > most:
                raise ValueError(f"it has more than {most} layers")
            return lists[0] * times[0] if times else lists[0] + lists[1]
    raise ValueError("it has more than numbers, lists, + and *")
