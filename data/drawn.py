"""Draws by name: each is a SHA-256 of what it is for, so that a seed gives the same on any machine and Python."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from typing import TypeVar

T = TypeVar("T")


def below(draw: str, bound: int, name: str, number: int) -> int:
    """Return one of [0, bound), which depends on these names alone; ``bound`` is far less than 2^64."""
    return int.from_bytes(next(_digests(draw, name, number))[:8], "big") % bound


def bits(draw: str, name: str, number: int) -> int:
    """Return one of [0, 2^128)."""
    return int.from_bytes(next(_digests(draw, name, number))[:16], "big")


def distinct(draw: str, size: int, bound: int, name: str) -> list[int]:
    """Return ``size`` different ones of [0, bound), which begin alike for any size."""
    return different(size, (int.from_bytes(digest[:8], "big") % bound for digest in _digests(draw, name)))


def different(size: int, numbers: Iterable[int]) -> list[int]:
    """Return the first ``size`` different numbers."""
    found, left = dict[int, None](), iter(numbers)
    while len(found) < size:
        found[next(left)] = None
    return list(found)


def shuffled(draw: str, items: Sequence[T], name: str) -> list[T]:
    """Return the items in an order that depends on these names and their number alone."""
    digests = list(islice(_digests(draw, name), len(items)))
    return [items[place] for place in sorted(range(len(items)), key=digests.__getitem__)]


def _digests(draw: str, name: str, first: int = 0) -> Iterator[bytes]:
    begin = f"{draw}:{name}:".encode()
    return (hashlib.sha256(begin + b"%d" % number).digest() for number in count(first))
