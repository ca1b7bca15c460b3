"""Find the longest sequence, the fewest processes, or the changes with which a run fits.

The first two ask one question for many sizes: does any arrangement fit in memory? Only the settings
that take least memory are tried for each arrangement, and no time is predicted. Memory grows with
the length and falls with the number of processes, so a bisection finds the limit. The third enables
memory-saving settings (levers, planner/levers.py) until the run fits, disables those that it does
not need, and orders the rest.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from parallel.context.methods import METHODS
from planner.cluster import Cluster
from planner.levers import (
    ORDER,
    SLICES,
    STAGES,
    described,
    ever_leaner,
    least_changed,
    least_memory,
    settings,
    with_levers,
)
from planner.limits import lacking, nothing_left
from planner.search import (
    ROOM,
    arrangements,
    candidates_of,
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
"""The longest sequence is a multiple of this number of tokens."""
PRECISION = 64
"""The longest sequence is found to within a relative error of 1 / ``PRECISION``."""
MAX_TOKENS = 1 << 30
MAX_PROCESSES = 1 << 12


def fits(
    config: Config,
    world_size: int,
    cluster: Cluster,
    progress: Callable[[str], None] = lambda message: None,
) -> bool:
    """Return True if some arrangement and method fit with the settings that save most memory.

    Stages of heads (ulysses_head_chunks) and slices of layers (layer_chunk_size) are tried last,
    since only some methods have them.
    """
    question = f"{counted(config.sequence_length, 'token')} on {counted(world_size, 'process')}"

    def fits_memory(candidate: Config) -> bool:
        progress(f"searching: {question}, {described(candidate)}")
        return weigh(candidate, world_size, cluster, None).fits(cluster)

    leanest: list[Config] = []
    meshes = arrangements(config, world_size)
    for candidate in candidates_of(meshes, world_size, cluster, Counter()):
        leanest += least_memory(candidate, cluster)
    if any(map(fits_memory, leanest)):
        return True
    for lever in (SLICES, STAGES):
        for lean in leanest:
            for values in lever.further(lean, cluster):
                if fits_memory(with_levers(lean, (lever, values))):
                    return True
    return False


def longest(config: Config, world_size: int, cluster: Cluster) -> int:
    """Return the number of tokens of the longest sequence that fits, a multiple of ``STEP``.

    Args:
        config: a run of a language model; its mesh and method are varied.

    Raises:
        ConfigError: not even ``STEP`` tokens fit, or all arrangements are refused; the message says
            why.
    """
    with Progress() as progress:

        def fits_length(num_steps: int) -> bool:
            return fits(of_length(config, num_steps * STEP), world_size, cluster, progress)

        if fits_length(1):
            return STEP * last_good(fits_length, MAX_TOKENS // STEP)
    raise ConfigError(_why_not(of_length(config, STEP), world_size, cluster))


def limit_of_longest(config: Config, world_size: int, cluster: Cluster) -> str:
    """Return the kind of memory that a sequence longer than the longest lacks.

    Args:
        config: a run with the longest sequence that fits.
    """
    tokens = config.train.seq_length
    longer = of_length(config, tokens + max(STEP, tokens // PRECISION))
    meshes = list(arrangements(longer, world_size))
    return lacking(rank(meshes, world_size, cluster, vary=least_memory))


def fewest(config: Config, cluster: Cluster) -> int:
    """Return the smallest number of processes that fits: a power of two, or full nodes.

    Raises ConfigError if more than MAX_PROCESSES would be needed.
    """
    per_node = cluster.gpus_per_node
    powers = [1 << power for power in range(per_node.bit_length())]
    with Progress() as progress:

        def is_too_small(num_nodes: int) -> bool:
            return not fits(config, num_nodes * per_node, cluster, progress)

        for size in sorted({per_node, *powers}):
            if fits(config, size, cluster, progress):
                return size
        num_nodes = 1 + last_good(is_too_small, MAX_PROCESSES // per_node, exact=True)
    if num_nodes * per_node > MAX_PROCESSES:
        raise ConfigError(
            f"seq_length is {config.train.seq_length}, too long for {MAX_PROCESSES} processes; "
            f"on one node: {_why_not(config, per_node, cluster)}"
        )
    return num_nodes * per_node


def _why_not(config: Config, world_size: int, cluster: Cluster) -> str:
    """Return the reason why nothing fits: too little memory, or the first arrangement's error."""
    meshes = list(arrangements(config, world_size))
    return nothing_left(rank(meshes, world_size, cluster, vary=least_memory), cluster)


def of_length(config: Config, tokens: int) -> Config:
    """Return the configuration with sequences of this length."""
    return config.updated(seq_length=tokens)


def last_good(is_good: Callable[[int], bool], maximum: int, exact: bool = False) -> int:
    """Return the largest n in [1, maximum] with is_good(n); all smaller n must be good too.

    The upper bound doubles first, then the interval is halved. Without ``exact`` the relative error
    is at most 1 / PRECISION.
    """
    low = 1
    high = 2
    while high <= maximum and is_good(high):
        low = high
        high = 2 * high
    high = min(high, maximum + 1)
    while True:
        tolerance = 1
        if not exact:
            tolerance = max(1, low // PRECISION)
        if high - low <= tolerance:
            return low
        middle = (low + high) // 2
        if is_good(middle):
            low = middle
        else:
            high = middle


FIELDS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "global_batch_size",
    "context_parallel_method",
    "context_parallel_team_size",
    "context_parallel_placement",
    "context_parallel_ranks_per_node",
    "ulysses_degree",
)
"""Fields that affect memory and belong to no lever; they change together, before the levers."""


@dataclass(frozen=True)
class Change:
    """Flags to set, and the predicted bytes with these flags and those of earlier changes."""

    flag: str
    bytes: float
    exact: bool = True
    """False if the flags change the results of the run by more than the order of sums."""


def changes(
    config: Any,
    world_size: int,
    cluster: Cluster,
    cu_seqlens: tuple[int, ...] | None,
    lengths: tuple[int, ...] = (),
) -> tuple[list[Change], float | None]:
    """Return the changes that make a run fit, and the predicted seconds of a step with them.

    The changes are in the order of docs/tasks/long_context.md. More context-parallel processes
    replace data-parallel ones, and the global batch stays. If all levers (settings that save
    memory) are not enough, the fastest method that fits is chosen, and if there is none, the
    fastest mesh. Only if there is none either, levers are tried that change the results. If nothing
    fits, the result is an empty list and None.
    """
    target = _pulled(config, world_size, cluster, cu_seqlens, exact=True)
    if target is None:
        candidates = rank([config], world_size, cluster, lengths, settings).candidates
        if not candidates:
            meshes = list(arrangements(config, world_size))
            candidates = rank(meshes, world_size, cluster, lengths, settings).candidates
        if candidates:
            target = candidates[0].config
    if target is None:
        target = _pulled(config, world_size, cluster, cu_seqlens, exact=False)
    if target is None:
        return [], None
    ordered = list(_ordered(config, target, world_size, cluster, cu_seqlens))
    return ordered, predicted(target, world_size, cluster, cu_seqlens).time


def _pulled(
    config: Any,
    world_size: int,
    cluster: Cluster,
    cu_seqlens: tuple[int, ...] | None,
    *,
    exact: bool,
) -> Any | None:
    """Return the configuration with the first levers that make it fit; None if none do.

    With ``exact``, levers that change a run's results are left out.

    Levers that leave a tenth of the memory to an allocator are preferred.
    """
    dp = config.mesh.data_parallel_size(world_size)
    cp = config.mesh.context_parallel_size
    global_batch = config.train.batch_size(dp)
    meshes = [config]
    for factor in range(2, dp + 1):  # context-parallel ranks replace data-parallel ones
        if dp % factor == 0:
            meshes.append(
                config.updated(context_parallel_size=factor * cp, global_batch_size=global_batch)
            )

    for room in (ROOM, 1.0):
        limited = replace(cluster, memory_gb=room * cluster.memory_gb)

        def fits(candidate: Any, limited: Cluster = limited) -> bool:
            if candidate == config or not suits(candidate, world_size):
                return False
            return weigh(candidate, world_size, limited, cu_seqlens).fits(limited)

        for leaner in ever_leaner(config, cluster, exact=exact):
            fitting = []
            for mesh in meshes:
                candidate = replace(leaner, mesh=mesh.mesh, train=mesh.train)
                if fits(candidate):
                    fitting.append(least_changed(candidate, config, cluster, fits))
            if fitting:
                return min(
                    fitting,
                    key=lambda config: predicted(config, world_size, cluster, cu_seqlens).time,
                )
    return None


def _ordered(
    config: Any, target: Any, world_size: int, cluster: Cluster, cu_seqlens: tuple[int, ...] | None
) -> Iterator[Change]:
    """Yield the flags that change ``config`` into ``target``, step by step.

    Flags that are only valid together form one step.
    """
    fields: tuple[str, ...] = FIELDS
    method = value_of(config, "context_parallel_method")
    target_method = value_of(target, "context_parallel_method")
    if method in METHODS and METHODS[method].in_slices == target_method:
        # Only with slices does this change save memory, so it is part of their step.
        fields = tuple(name for name in FIELDS if name != "context_parallel_method")
    steps: list[tuple[str, ...]] = [fields]
    inexact: set[str] = set()
    for index, lever in enumerate(ORDER):
        num_before = ORDER[:index].count(lever)
        if ORDER.count(lever) == 1:
            steps.append(lever.fields)
        elif num_before < len(lever.fields):
            steps.append((lever.fields[num_before],))
        if not lever.exact:
            inexact.update(lever.fields)

    flags: list[str] = []
    overrides: dict[str, Any] = {}
    exact = True
    for names in steps:
        for name in names:
            value = value_of(target, name)
            if value != value_of(config, name) and name not in overrides:
                overrides[name] = value
                flags.append(spelled(name, value))
                exact = exact and name not in inexact
        if not flags:
            continue
        try:
            candidate = config.updated(**overrides)
            validate_sizes(candidate, world_size)
            num_bytes = weigh(candidate, world_size, cluster, cu_seqlens).device
        except UserError:  # these flags are valid only together with those of later steps
            continue
        yield Change(" ".join(flags), num_bytes, exact)
        flags = []
        exact = True
