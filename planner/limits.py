"""Name the resource that a run lacks: device memory or host memory."""

from planner.cluster import Cluster
from planner.search import Ranking


def nothing_left(ranking: Ranking, cluster: Cluster) -> str:
    """Explain why there is no candidate, and what to do.

    Host memory is named first: a configuration that fits the device and not the host is nearer to
    fitting than one that exceeds the device.
    """
    if ranking.over_host_memory:
        without = f", or leave out {' or '.join(ranking.moving)}" if ranking.moving else ""
        return (
            f"host_memory_gb of {cluster.name} is {cluster.host_memory_gb:g}, but the smallest of "
            f"{len(ranking.over_host_memory)} tried configurations moves "
            f"{min(ranking.over_host_memory) / 1e9:.1f} GB there; "
            f"use more processes or a lower seq_length{without}"
        )
    if ranking.over_memory:
        smallest = min(ranking.over_memory)
        fields = "".join(f", {name}" for name in ranking.saving)
        hint = " (python -m tools.plan --fits says what to change)" if ranking.saving else ""
        return (
            f"memory_gb of {cluster.name} is {cluster.memory_gb:g}, but the smallest of "
            f"{len(ranking.over_memory)} tried configurations takes {smallest / 1e9:.1f} GB; "
            f"use more processes{fields} or a lower seq_length{hint}"
        )
    reason = next(iter(ranking.refused), "there is no arrangement of these processes")
    return f"context_parallel_method is auto, but no method suits the run: {reason}"


def lacking(ranking: Ranking) -> str:
    """Return the kind of memory that a ranking without candidates lacks; empty if it lacks none."""
    if ranking.over_host_memory:
        return "host memory"
    if ranking.over_memory:
        return "device memory"
    return ""
