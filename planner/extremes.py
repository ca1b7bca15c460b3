"""The longest sequence that fits given processes, the fewest processes for it, and the changes that
make a run fit.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from planner.cluster import Cluster
from planner.levers import (
    ORDER,
    STAGES,
    described,
    ever_leaner,
    least_changed,
    least_memory,
    settings,
    with_levers,
)
from planner.search import (
    ROOM,
    arrangements,
    candidates_of,
    nothing_left,
    predicted,
    rank,
    suits,
    weigh,
)
from runtime.errors import UserError
from runtime.progress import Progress, counted
from train.config.entries import Config
from train.config.flags import ConfigError, spelled, value_of
from train.config.sizes import validate_sizes

STEP = 1024
"""Tokens."""
PRECISION = 64
"""The longest sequence is found to one part in so many."""
MOST_TOKENS, MOST_PROCESSES = 1 << 30, 1 << 12


def fits(
    config: Config,
    world_size: int,
    cluster: Cluster,
    progress: Callable[[str], None] = lambda said: None,
) -> bool:
    """Return whether some arrangement and method fit in memory, with all that recomputation and
    stages save.
    """

    def held(one: Config) -> bool:
        asked = f"{counted(config.sequence_length, 'token')} on {counted(world_size, 'process')}"
        progress(f"searching: {asked}, {described(one)}")
        return weigh(one, world_size, cluster, None).fits(cluster)

    found = candidates_of(arrangements(config, world_size), world_size, cluster, Counter())
    every = [lean for one in found for lean in least_memory(one, cluster)]
    staged = (
        with_levers(one, (STAGES, stages))
        for one in every
        for stages in STAGES.further(one, cluster)
    )
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
            return STEP * _last(found, MOST_TOKENS // STEP)
    raise ConfigError(_why_not(of_length(config, STEP), world_size, cluster))


def fewest(config: Config, cluster: Cluster) -> int:
    """Return the fewest processes that hold the sequence, a power of two or whole nodes;
    ConfigError above the most.
    """
    node = cluster.gpus_per_node
    with Progress() as progress:
        for size in sorted({node, *(1 << power for power in range(node.bit_length()))}):
            if fits(config, size, cluster, progress):
                return size
        nodes = 1 + _last(
            lambda count: not fits(config, count * node, cluster, progress),
            MOST_PROCESSES // node,
            exact=True,
        )
    if nodes * node > MOST_PROCESSES:
        raise ConfigError(
            f"seq_length is {config.train.seq_length}, which {MOST_PROCESSES} processes do not hold; on one node: "
            + _why_not(config, node, cluster)
        )
    return nodes * node


def _why_not(config: Config, world_size: int, cluster: Cluster) -> str:
    """Say why nothing fits: memory, or the reason for which all is refused."""
    return nothing_left(
        rank(list(arrangements(config, world_size)), world_size, cluster, vary=least_memory),
        cluster,
    )


def of_length(config: Config, tokens: int) -> Config:
    """Return the configuration with sequences of so many tokens."""
    return config.updated(seq_length=tokens)


def _last(good: Callable[[int], bool], most: int, exact: bool = False) -> int:
    """Binary search for the largest n in [1, most] with good(n), which is true up to there and for
    1.
    """
    known, above = 1, 2
    while above <= most and good(above):
        known, above = above, 2 * above
    above = min(above, most + 1)
    while above - known > (1 if exact else max(1, known // PRECISION)):
        middle = (known + above) // 2
        known, above = (middle, above) if good(middle) else (known, middle)
    return known


FIELDS = (
    *(
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "global_batch_size",
    ),
    *(
        f"context_parallel_{name}"
        for name in ("method", "team_size", "placement", "ranks_per_node")
    ),
    "ulysses_degree",
)
"""Fields that decide memory besides the levers', and that change together before these."""


@dataclass(frozen=True)
class Change:
    """A flag, and the predicted bytes once it and those before it are given."""

    flag: str
    bytes: float


def changes(
    config: Any,
    world_size: int,
    cluster: Cluster,
    documents: tuple[int, ...] | None,
    lengths: tuple[int, ...] = (),
) -> tuple[list[Change], float | None]:
    """Return what to change for it to fit, in the order of docs/tasks/long_context.md; and the
    seconds of a step then.

    More context-parallel processes take the place of data-parallel ones, and the global batch
    stays. If no lever is enough, the fastest method or, after that, mesh. Nothing and None: no
    arrangement fits.
    """
    wanted = _pulled(config, world_size, cluster, documents)
    if wanted is None:
        found = rank([config], world_size, cluster, lengths, settings).candidates
        every = list(arrangements(config, world_size))
        found = found or rank(every, world_size, cluster, lengths, settings).candidates
        if not found:
            return [], None
        wanted = found[0].config
    ordered = list(_ordered(config, wanted, world_size, cluster, documents))
    return ordered, predicted(wanted, world_size, cluster, documents).time


def _pulled(
    config: Any, world_size: int, cluster: Cluster, documents: tuple[int, ...] | None
) -> Any | None:
    """Return the configuration with the first levers with which it fits, leaving room if it can;
    None if none do.
    """
    dp, cp = config.mesh.data_parallel_size(world_size), config.mesh.context_parallel_size
    batch, larger = config.train.batch_size(dp), [config]
    for more in (
        n for n in range(2, dp + 1) if dp % n == 0
    ):  # ranks of cp take the place of data-parallel ones
        larger.append(config.updated(context_parallel_size=more * cp, global_batch_size=batch))

    def fits(one: Any) -> bool:
        return (
            one != config
            and suits(one, world_size)
            and weigh(one, world_size, limited, documents).fits(limited)
        )

    for room in (ROOM, 1.0):
        limited = replace(cluster, memory_gb=room * cluster.memory_gb)
        for leaner in ever_leaner(config, cluster):
            tried = (replace(leaner, mesh=other.mesh, train=other.train) for other in larger)
            if found := [least_changed(one, config, cluster, fits) for one in tried if fits(one)]:
                return min(
                    found, key=lambda one: predicted(one, world_size, cluster, documents).time
                )
    return None


def _ordered(
    config: Any, wanted: Any, world_size: int, cluster: Cluster, documents: tuple[int, ...] | None
) -> Iterator[Change]:
    """Yield the flags that lead from one configuration to the other; those that only go together,
    as one.
    """
    flags: list[str] = []
    changed: dict[str, Any] = {}
    steps = [FIELDS]
    for place, lever in enumerate(ORDER):
        before = ORDER[:place].count(lever)
        steps += [lever.fields[before : before + 1]] * (before < len(lever.fields))
    for names in steps:
        for name in names:
            value = value_of(wanted, name)
            if value != value_of(config, name) and name not in changed:
                changed[name] = value
                flags.append(spelled(name, value))
        try:
            one = config.updated(**changed)
            validate_sizes(one, world_size)
            count = weigh(one, world_size, cluster, documents).device if flags else 0.0
        except UserError:  # it changes only together with others
            continue
        if flags:
            yield Change(" ".join(flags), count)
        flags = []
