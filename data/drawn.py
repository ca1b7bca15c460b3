"""Draws by name: each is a SHA-256 of what it is for, so that a seed gives the same on any machine and Python."""

import hashlib
from collections.abc import Iterable, Sequence
from itertools import count
from typing import TypeVar

T = TypeVar("T")


def below(draw: str, bound: int, name: str, number: int) -> int:
    """Return one of [0, bound), which depends on these names alone; ``bound`` is far less than 2^64."""
    return int.from_bytes(_digest(draw, name, number)[:8], "big") % bound


def bits(draw: str, name: str, number: int) -> int:
    """Return one of [0, 2^128)."""
    return int.from_bytes(_digest(draw, name, number)[:16], "big")


def distinct(draw: str, size: int, bound: int, name: str) -> list[int]:
    """Return ``size`` different ones of [0, bound), which begin alike for any size."""
    return different(size, (below(draw, bound, name, number) for number in count()))


def different(size: int, numbers: Iterable[int]) -> list[int]:
    """Return the first ``size`` different numbers."""
    found, left = dict[int, None](), iter(numbers)
    while len(found) < size:
        found[next(left)] = None
    return list(found)


def shuffled(draw: str, items: Sequence[T], name: str) -> list[T]:
    """Return the items in an order that depends on these names and their number alone."""
    return [items[place] for place in sorted(range(len(items)), key=lambda place: _digest(draw, name, place))]


def _digest(draw: str, name: str, number: int) -> bytes:
    return hashlib.sha256(f"{draw}:{name}:{number}".encode()).digest()
