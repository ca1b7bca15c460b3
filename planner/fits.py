"""Does a configuration fit a cluster: memory of its busiest process by component, and what to change first."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from planner.cluster import Cluster
from planner.dry_run import rehearsed
from planner.levers import in_order, in_turn, settings, without_needless
from planner.recorder import Rehearsal
from planner.rehearsal import Build
from planner.search import ROOM, arrangements, bytes_needed, holds, predicted, rank, validated
from runtime.errors import UserError
from train.config.flags import spelled

FIELDS = {
    "mesh": ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    "train": ("global_batch_size",),
    "context": (
        *(f"context_parallel_{name}" for name in ("method", "team_size", "placement", "ranks_per_node")),
        "ulysses_degree",
    ),
}
"""Fields by section that decide memory besides the levers', and that change together before these."""


@dataclass(frozen=True)
class Change:
    """A flag, and the predicted bytes once it and those before it are given."""

    flag: str
    bytes: float


def busiest(
    config: Any, build: Build[Any], world_size: int, cluster: Cluster, documents: tuple[int, ...] | None
) -> Rehearsal:
    """Rehearse the processes that may take most, of these documents, and return the one that does."""
    return max(rehearsed(config, build, world_size, cluster, documents), key=lambda one: one.bytes)


def changes(
    config: Any, world_size: int, cluster: Cluster, documents: tuple[int, ...] | None, lengths: tuple[int, ...] = ()
) -> tuple[list[Change], float | None]:
    """Return what to change for it to fit, in the order of docs/tasks/long_context.md; and the seconds of a step then.

    More context-parallel processes take the place of data-parallel ones, and the global batch stays. If no lever is
    enough, the fastest method or, after that, mesh. Nothing and None: no arrangement fits.
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


def _pulled(config: Any, world_size: int, cluster: Cluster, documents: tuple[int, ...] | None) -> Any | None:
    """Return the configuration with the first levers with which it fits, leaving room if it can; None if none do."""
    larger = list(_more_context_parallel(config, world_size))

    def fits(one: Any) -> bool:
        try:
            validated(one, world_size)
        except UserError:
            return False
        return one != config and holds(one, world_size, limited, documents)

    for room in (ROOM, 1.0):
        limited = replace(cluster, memory_gb=room * cluster.memory_gb)
        for leaner in in_order(config, cluster):
            tried = (replace(leaner, mesh=other.mesh, train=other.train) for other in larger)
            if found := [without_needless(one, config, cluster, fits) for one in tried if fits(one)]:
                return min(found, key=lambda one: predicted(one, world_size, cluster, documents).time)
    return None


def _more_context_parallel(config: Any, world_size: int) -> Iterator[Any]:
    """Yield the configuration, then with more context- and fewer data-parallel ranks and the same global batch."""
    dp, cp = config.mesh.data_parallel_size(world_size), config.mesh.context_parallel_size
    yield config
    train = replace(config.train, global_batch_size=config.train.batch_size(dp))
    for more in (n for n in range(2, dp + 1) if dp % n == 0):
        yield replace(config, mesh=replace(config.mesh, context_parallel_size=more * cp), train=train)


def _ordered(
    config: Any, wanted: Any, world_size: int, cluster: Cluster, documents: tuple[int, ...] | None
) -> Iterator[Change]:
    """Yield the flags that lead from one configuration to the other; those that only go together, as one."""
    flags: list[str] = []
    parts: dict[str, Any] = {}
    for step in (FIELDS, *({lever.section: (name,)} for lever, name in in_turn())):
        for section, names in step.items():
            own, then = parts.get(section) or {}, getattr(wanted, section)
            changed = [name for name in names if getattr(then, name) != getattr(getattr(config, section), name)]
            flags += [spelled(name, getattr(then, name)) for name in changed if name not in own]
            parts[section] = own | {name: getattr(then, name) for name in changed}
        try:
            one = replace(config, **{part: replace(getattr(config, part), **own) for part, own in parts.items()})
            count = bytes_needed(validated(one, world_size), world_size, cluster, documents) if flags else 0.0
        except UserError:  # it changes only together with others
            continue
        if flags:
            yield Change(" ".join(flags), count)
        flags = []
