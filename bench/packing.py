"""Packed documents of drawn lengths: the same draw in every process."""

from collections.abc import Callable

import numpy as np

SEED = 3
"""Of 8 draws of 16,384 log-normal tokens one whose imbalance over 2 ranks of a zigzag is large enough to time: 1.25."""


def lognormal(rng: np.random.Generator, seq_len: int) -> float:
    """Draw exp(N(7.0, 1.6)) tokens, 64 to a quarter of the sequence: few documents hold most of the work."""
    return float(np.clip(np.exp(rng.normal(7.0, 1.6)), 64, seq_len / 4))


def short(rng: np.random.Generator, seq_len: int) -> float:
    """Draw N(500, 120) tokens, 100 to 1,500: many documents of one size."""
    return float(np.clip(rng.normal(500, 120), 100, 1500))


def chat(rng: np.random.Generator, seq_len: int) -> float:
    """Draw exp(N(6.2, 0.8)) tokens and 3 % of the time 4,096 (1 + Pareto(0.9)), 32 to half of the sequence."""
    drawn = 4096 * (1 + rng.pareto(0.9)) if rng.random() < 0.03 else np.exp(rng.normal(6.2, 0.8))
    return float(np.clip(drawn, 32, seq_len / 2))


LENGTHS: dict[str, Callable[[np.random.Generator, int], float]] = {"lognormal": lognormal, "short": short, "chat": chat}
"""Draws of a document's length, by name."""


def documents_of(name: str, seq_len: int, seed: int = SEED) -> tuple[int, ...]:
    """Return cumulative lengths (0, l1, ..., seq_len) of documents drawn until they fill it; the last is cut."""
    rng, found = np.random.default_rng(seed), [0]
    while found[-1] < seq_len:
        found.append(min(found[-1] + max(1, int(LENGTHS[name](rng, seq_len))), seq_len))
    return tuple(found)
