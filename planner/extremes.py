"""The longest sequence that fits given processes, and the fewest processes that a sequence fits."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from planner.cluster import Cluster
from planner.levers import STAGES, leanest, moved
from planner.ranking import described, nothing_left
from planner.search import arrangements, candidates_of, holds, rank
from runtime.progress import Progress, counted
from train.config.entries import Config
from train.config.flags import ConfigError

STEP = 1024
"""Tokens."""
PRECISION = 64
"""The longest sequence is found to one part in so many."""
MOST_TOKENS, MOST_PROCESSES = 1 << 30, 1 << 12


def fits(
    config: Config, world_size: int, cluster: Cluster, progress: Callable[[str], None] = lambda said: None
) -> bool:
    """Return whether some arrangement and method fit in memory, with all that recomputation and stages save."""

    def held(one: Config) -> bool:
        asked = f"{counted(config.sequence_length, 'token')} on {counted(world_size, 'process')}"
        progress(f"searching: {asked}, {described(one)}")
        return holds(one, world_size, cluster, None)

    found = candidates_of(arrangements(config, world_size), world_size, cluster, Counter())
    every = [lean for one in found for lean in leanest(one, cluster)]
    staged = (moved(one, (STAGES, stages)) for one in every for stages in STAGES.further(one, cluster))
    return any(map(held, every)) or any(map(held, staged))


def longest(config: Config, world_size: int, cluster: Cluster) -> int:
    """Return the tokens of the longest sequence that fits, a multiple of ``STEP``.

    Raises:
        ConfigError: not even ``STEP`` tokens fit, or all is refused; with the reason.
    """
    with Progress() as progress:

        def found(steps: int) -> bool:
            return fits(of_length(config, steps * STEP), world_size, cluster, progress)

        if found(1):
            return STEP * _last(found, 1, MOST_TOKENS // STEP)
    raise ConfigError(_why_not(of_length(config, STEP), world_size, cluster))


def fewest(config: Config, cluster: Cluster) -> int:
    """Return the fewest processes that hold the sequence, a power of two or whole nodes; ConfigError above the most."""
    node = cluster.gpus_per_node
    with Progress() as progress:
        for size in sorted({node, *(1 << power for power in range(node.bit_length()))}):
            if fits(config, size, cluster, progress):
                return size
        nodes = 1 + _last(
            lambda count: not fits(config, count * node, cluster, progress), 1, MOST_PROCESSES // node, exact=True
        )
    if nodes * node > MOST_PROCESSES:
        raise ConfigError(
            f"seq_length is {config.train.seq_length}, which {MOST_PROCESSES} processes do not hold; on one node: "
            + _why_not(config, node, cluster)
        )
    return nodes * node


def _why_not(config: Config, world_size: int, cluster: Cluster) -> str:
    """Say why nothing fits: memory, or the reason for which all is refused."""
    return nothing_left(rank(list(arrangements(config, world_size)), world_size, cluster, vary=leanest), cluster)


def of_length(config: Config, tokens: int) -> Config:
    """Return the configuration with sequences of so many tokens."""
    return replace(config, train=replace(config.train, seq_length=tokens))


def _last(holds: Callable[[int], bool], known: int, most: int, exact: bool = False) -> int:
    """Return the last number for which ``holds`` is true, as it is for ``known`` and not for all up to ``most``."""
    above = 2 * known
    while above <= most and holds(above):
        known, above = above, 2 * above
    above = min(above, most + 1)
    while above - known > (1 if exact else max(1, known // PRECISION)):
        middle = (known + above) // 2
        known, above = (middle, above) if holds(middle) else (known, middle)
    return known
