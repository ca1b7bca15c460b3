"""Print ranked plans: as JSON, as the answer for a named model, or as a table."""

import json

from planner.dry_run import tightly
from tools.common.plan_text import (
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


def _print_json(plans: Plans) -> None:
    ranking = plans.ranking
    entry = {
        "cluster": plans.cluster.entries(),
        "rows": [row.entry() for row in plans.rows[: plans.args.top]],
        "refused": dict(ranking.refused),
        "too_large": len(ranking.over_memory),
        "host_short": len(ranking.over_host_memory),
        "limit": plans.limit,
    }
    print(json.dumps(entry))


def print_plans(plans: Plans) -> None:
    """Print the plans as JSON, as the answer for a named model, or as a table."""
    args = plans.args
    rows = plans.rows
    cluster = plans.cluster
    if args.json:
        _print_json(plans)
    elif args.model:
        print(answer(rows, plans.base, plans.world_size, cluster, plans.file))
        if plans.limit:
            print(plans.note)
    else:
        shown = rows[: args.top]
        print(headline(plans.world_size, cluster, plans.config))
        print(f"{discarded(plans.ranking, cluster, args.top)}\n{plans.note}".rstrip())
        lines = [table(shown), *alike(shown), *optimizer_share(shown), *notes(plans.config)]
        print("\n".join(lines))
        first = rows[0].candidate.prediction
        owner = f"a process of the first row{tightly(first.bytes, cluster)}"
        print(bars(first.memory, first.host, cluster, owner))
