"""Does a configuration fit a cluster: memory of its busiest process by component, and what to change first."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from parallel.mesh import SIZES
from planner.cluster import Cluster
from planner.dry_run import rehearsed
from planner.recorder import Rehearsal
from planner.rehearsal import Build
from planner.search import arrangements, bytes_needed, rank, settings
from runtime.errors import UserError
from train.config.flags import spelled

LEVERS = (
    *(("recompute", name) for name in ("recompute_granularity", "loss_chunk_size", "ffn_chunk_size")),
    ("data_parallel", "data_parallel_sharding_strategy"),
    ("recompute", "recompute_offload"),
    ("optimizer", "optimizer_cpu_offload"),
    *(("mesh", name) for name in SIZES),
    *(("context", f"context_parallel_{name}") for name in ("method", "team_size", "placement", "ranks_per_node")),
    ("context", "ulysses_degree"),
    ("context", "ulysses_head_chunks"),
)
"""Sections and fields that decide memory."""


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
    """Return what leads to the fastest settings that fit, what brings most first; and the seconds of a step then.

    The mesh and the method stay as they are if that is possible. Nothing and None: no arrangement fits.
    """
    found = rank([config], world_size, cluster, lengths, settings).candidates
    single, stages = config.mesh.context_parallel_size == 1, config.context.ulysses_head_chunks
    same = [one for one in found if single or replace(one.config.context, ulysses_head_chunks=stages) == config.context]
    found = (
        same or found or rank(list(arrangements(config, world_size)), world_size, cluster, lengths, settings).candidates
    )
    if not found:
        return [], None
    wanted = found[0].config
    if single and wanted.mesh.context_parallel_size == 1:  # one rank runs every method alike
        wanted = replace(wanted, context=config.context)
    ordered = list(_ordered(config, wanted, world_size, cluster, documents))
    return ordered, found[0].prediction.time


def _ordered(
    config: Any, wanted: Any, world_size: int, cluster: Cluster, documents: tuple[int, ...] | None
) -> Iterator[Change]:
    """Yield the flags that lead from one configuration to the other, each time the one that saves most."""
    left = [(s, name) for s, name in LEVERS if getattr(getattr(config, s), name) != getattr(getattr(wanted, s), name)]
    while left:
        tried: list[tuple[float, tuple[str, str], Any]] = []
        for section, name in left:
            try:
                changed = _moved(config, wanted, [(section, name)])
                tried.append((bytes_needed(changed, world_size, cluster, documents), (section, name), changed))
            except UserError:  # some change only together with others
                continue
        if not tried:
            flags = " ".join(spelled(name, getattr(getattr(wanted, s), name)) for s, name in left)
            yield Change(flags, bytes_needed(_moved(config, wanted, left), world_size, cluster, documents))
            return
        count, best, config = min(tried, key=lambda one: one[0])
        left.remove(best)
        yield Change(spelled(best[1], getattr(getattr(wanted, best[0]), best[1])), count)


def _moved(config: Any, wanted: Any, fields: Sequence[tuple[str, str]]) -> Any:
    for section, name in fields:
        part = replace(getattr(config, section), **{name: getattr(getattr(wanted, section), name)})
        config = replace(config, **{section: part})
    return config
