"""Print a run's memory by component, and the settings to change if it does not fit."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from planner.choice import with_layout
from planner.cluster import Cluster, endless
from planner.dry_run import rehearsed, verdict
from planner.extremes import changes
from planner.levers import described, memory_of, mesh_of, method_of
from planner.limits import nothing_left
from planner.recorder import CAUSES
from planner.search import rank
from planner.workload import heaviest_documents, typical_documents
from runtime.progress import amount, counted, duration
from tools.common.plan_text import bars, headline
from train.config.derive import with_joined_ranks
from train.config.flags import ConfigError
from train.config.sizes import validate_sizes
from train.tasks.registry import task_of


def print_memory(args: argparse.Namespace, config: Any, world_size: int, cluster: Cluster) -> None:
    """Print the busiest process's memory, and the settings to change if it does not fit.

    The step is rehearsed on the documents that take the most memory, from the run's own data if it
    is on this machine, or else on documents drawn by length.

    Raises UserError if the configuration does not suit the processes, or if no method fits.
    """
    config = with_joined_ranks(config, world_size)
    device = config.mesh.device if config.context.cluster is None else cluster.device
    config = config.updated(device=device, cluster=None)

    lengths = tuple(args.document_lengths)
    has_data = config.reads_text and config.data.data_path and config.data.tokenizer_model
    from_data = has_data and not lengths
    if from_data:
        cu_seqlens = heaviest_documents(config)
    else:
        cu_seqlens = typical_documents(config, lengths)

    if config.context.context_parallel_method == "auto":
        config = _fastest_method(config, world_size, cluster, lengths)
    config = with_layout(config, cluster)
    validate_sizes(config, world_size)

    rehearsals = rehearsed(config, task_of(config), world_size, cluster, cu_seqlens)
    busiest = max(rehearsals, key=lambda rehearsal: rehearsal.bytes)
    parts = {name: busiest.memory[name] for name in CAUSES if busiest.memory.get(name)}
    fits, message = verdict([busiest], cluster)
    needed_changes: Sequence[Any] = []
    seconds = None
    if not fits:
        needed_changes, seconds = changes(config, world_size, cluster, cu_seqlens, lengths)

    if args.json:
        entry = {
            "cluster": cluster.entries(),
            "memory_bytes_by_part": parts,
            "memory_bytes": busiest.bytes,
            "host_bytes": busiest.host,
            "fits": fits,
            "changes": [asdict(change) for change in needed_changes],
            "seconds_then": seconds,
            "method": method_of(config),
            "mesh": mesh_of(config),
            "memory_by": memory_of(config),
            "processes": world_size,
            "sequence_length": config.sequence_length,
        }
        print(json.dumps(entry))
        return

    print(f"{headline(world_size, cluster, config)}: {described(config)}")
    if cu_seqlens:
        longest = max(end - start for start, end in pairwise(cu_seqlens))
        origin = "a micro-batch drawn at random"
        if from_data:
            origin = "the heaviest of the run's first micro-batches"
        number = counted(len(cu_seqlens) - 1, "document")
        print(f"{origin}: {number}, the longest of {longest} tokens")

    print(bars(parts, busiest.host, cluster))
    print(message)
    if not fits:
        _print_changes(needed_changes, seconds)


def _print_changes(needed_changes: Sequence[Any], seconds: float | None) -> None:
    """Print the settings that make a configuration fit, and the time of a step with them."""
    if seconds is None:
        advice = "use more processes (--fewest says how many) or shorter sequences"
        print(f"the search found no arrangement of these processes that fits; {advice}")
        return

    order = "settings to change, in the order of docs/tasks/long_context.md"
    print(f"{order}; a step then takes {duration(seconds)}:")
    for change in needed_changes:
        effect = "" if change.exact else ", and changes the results"
        print(f"  {change.flag}  (about {amount(change.bytes)}{effect})")


def _fastest_method(
    config: Any, world_size: int, cluster: Cluster, lengths: tuple[int, ...]
) -> Any:
    """Return the configuration with the fastest method that fits; if none fits, the fastest."""
    ranking = rank([config], world_size, cluster, lengths)
    candidates = ranking.candidates
    if not candidates:
        candidates = rank([config], world_size, endless(cluster), lengths).candidates
    if not candidates:
        raise ConfigError(nothing_left(ranking, cluster))

    return candidates[0].config
