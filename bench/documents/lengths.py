"""Lengths of documents of public kinds of data, and the documents of a step drawn from them.

``lengths.toml`` has the published histograms and percentiles, with their sources and with the
distributions that were fitted where only percentiles are published.
"""

import tomllib
from dataclasses import dataclass
from math import log
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from data.text.packing import best_fit_decreasing, by_bin


@dataclass(frozen=True, kw_only=True)
class Part:
    """Documents of one distribution. Exactly one of ``length``, ``counts`` and ``normal`` is set.

    A ``tail`` in the file becomes a ``normal``.
    """

    share: float
    """Share of the kind's tokens."""
    length: int = 0
    """Length of every document."""
    counts: tuple[int, ...] = ()
    """Number of documents in each bin; a bin ends at twice the length of the one before."""
    first: int = 0
    """Upper end of the first bin; the lower one is half of it."""
    normal: tuple[float, float] | None = None
    """Mean and standard deviation of the logarithm of the length."""

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Draw lengths: float64 ``[count]``. In a bin, the logarithm is uniform."""
        if self.length:
            return np.full(count, float(self.length))
        if self.normal:
            mean, deviation = self.normal
            return np.exp(rng.normal(mean, deviation, count))
        weights = np.array(self.counts) / sum(self.counts)
        bins = rng.choice(len(weights), count, p=weights)
        return self.first * 2.0 ** (bins - rng.random(count))


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of data: the lengths of its documents, and the tokens of a step."""

    name: str
    title: str
    source: str
    parts: tuple[Part, ...]
    max_length: int
    """Length at which longer documents are cut."""
    min_length: int = 1
    tokens: int = 0
    """Number of tokens of a step, for any number of ranks; 0 if it grows with the ranks."""
    samples_per_rank: int = 0
    """Number of documents of a step for each rank, if ``tokens`` is 0."""
    capacity: int = 0
    """Number of tokens on a rank, as published; 0 means as many as fit into memory."""

    def step_tokens(self, ranks: int) -> int:
        """Return the number of tokens of a step on ``ranks`` ranks."""
        if self.tokens:
            return self.tokens
        mean = float(self.documents(np.random.default_rng(0), 1 << 20).mean())
        return round(mean * self.samples_per_rank) * ranks

    def documents(self, rng: np.random.Generator, tokens: int) -> np.ndarray:
        """Draw documents of ``tokens`` tokens in total, in random order: int64 ``[documents]``.

        Parts have their shares of the tokens; the last document of a part is cut.
        """
        drawn = []
        ends = np.round(tokens * np.cumsum([part.share for part in self.parts])).astype(int)
        for part, size in zip(self.parts, np.diff(ends, prepend=0), strict=True):
            lengths = np.zeros(0)
            while lengths.sum() < size:
                more = np.clip(part.draw(rng, 64), self.min_length, self.max_length)
                lengths = np.concatenate([lengths, np.floor(more)])
            ends_of_documents = np.minimum(np.cumsum(lengths), size)
            drawn.append(np.diff(ends_of_documents, prepend=0))
        lengths = np.concatenate(drawn).astype(np.int64)
        return rng.permutation(lengths[lengths > 0])


def log_normal(tail: list[list[float]]) -> tuple[float, float]:
    """Return mean and deviation of the logarithm for two ``[length, percent longer]``."""
    (near, near_percent), (far, far_percent) = tail
    near_score = NormalDist().inv_cdf(1 - near_percent / 100)
    far_score = NormalDist().inv_cdf(1 - far_percent / 100)
    deviation = log(far / near) / (far_score - near_score)
    return log(near) - near_score * deviation, deviation


def _part(values: dict[str, Any]) -> Part:
    if "tail" in values:
        values["normal"] = log_normal(values.pop("tail"))
    for name in ("counts", "normal"):
        if name in values:
            values[name] = tuple(values[name])
    return Part(**values)


def load_kinds() -> dict[str, Kind]:
    """Return the kinds of data of ``lengths.toml``, keyed by name."""
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    kinds = {}
    for name, values in tomllib.loads(text).items():
        parts = tuple(map(_part, values.pop("parts")))
        kinds[name] = Kind(name=name, parts=parts, **values)
    return kinds


def micro_batches(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Divide a step's documents into micro-batches of exactly ``capacity`` tokens.

    Longest first, each document goes where it leaves the least room. The few short ones that fit
    nowhere are cut to fill what is left. ``lengths`` is int64 ``[documents]``; its sum is a
    multiple of ``capacity``, which no document exceeds.
    """
    count = int(lengths.sum()) // capacity
    items, bounds = by_bin(best_fit_decreasing(lengths, capacity))
    bins = np.split(lengths[items], bounds[1:-1])
    bins.sort(key=lambda members: -int(members.sum()))
    spare = []
    for members in bins[count:]:
        spare += members.tolist()
    filled = []
    for members in bins[:count]:
        pieces = members.tolist()
        room = capacity - sum(pieces)
        while room:
            piece = spare.pop()
            pieces.append(min(piece, room))
            if piece > room:
                spare.append(piece - room)
            room -= pieces[-1]
        filled.append(np.array(pieces, dtype=np.int64))
    return filled
