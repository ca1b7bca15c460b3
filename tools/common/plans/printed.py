"""Print ranked plans: as JSON, as the answer for a named model, or as a table."""

import argparse
import json

from planner.cluster import Cluster
from planner.dry_run import tightly
from planner.search import Ranking
from tools.common.plan_text import (
    PlanRow,
    alike,
    answer,
    bars,
    discarded,
    headline,
    notes,
    optimizer_share,
    table,
)
from tools.common.plans.ranked import Plans


def _print_json(
    args: argparse.Namespace, rows: list[PlanRow], ranking: Ranking, cluster: Cluster
) -> None:
    entry = {
        "cluster": cluster.entries(),
        "rows": [row.entry() for row in rows[: args.top]],
        "refused": dict(ranking.refused),
        "too_large": len(ranking.over_memory),
        "host_short": len(ranking.over_host_memory),
    }
    print(json.dumps(entry))


def print_plans(plans: Plans) -> None:
    """Print the plans as JSON, as the answer for a named model, or as a table."""
    args = plans.args
    rows = plans.rows
    cluster = plans.cluster
    if args.json:
        _print_json(args, rows, plans.ranking, cluster)
    elif args.model:
        print(answer(rows, plans.base, plans.world_size, cluster, plans.file))
    else:
        shown = rows[: args.top]
        print(headline(plans.world_size, cluster, plans.config))
        print(f"{discarded(plans.ranking, cluster, args.top)}\n{plans.note}".rstrip())
        lines = [table(shown), *alike(shown), *optimizer_share(shown), *notes(plans.config)]
        print("\n".join(lines))
        first = rows[0].candidate.prediction
        owner = f"a process of the first row{tightly(first.bytes, cluster)}"
        print(bars(first.memory, first.host, cluster, owner))
