"""The ranked plans that a page shows, and the question that they answer."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from planner.cluster import Cluster
from planner.search import Ranking
from tools.common.plan_text import OTHERS, PlanRow

RankPlans = Callable[[argparse.Namespace, Any, int, Cluster], tuple[Ranking, str]]
"""The search of tools.plan: returns the ranked candidates of a configuration, and a note."""


@dataclass(frozen=True)
class Plans:
    """What tools.plan found: the rows of its table and the question that they answer."""

    args: argparse.Namespace
    argv: list[str]
    """The command line of tools.plan."""
    config: Any
    world_size: int
    cluster: Cluster
    ranking: Ranking
    rows: list[PlanRow]
    note: str
    """A note on the ranking; empty if there is none."""
    rank_plans: RankPlans
    file: str
    """The named model, as its command names it; empty if the flags are those of a run."""

    @property
    def shown(self) -> list[PlanRow]:
        """Return the rows that the text output shows."""
        if self.args.model:
            return self.rows[: 1 + OTHERS]
        return self.rows[: self.args.top]
