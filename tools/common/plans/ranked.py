"""The ranked plans that a page shows, and the question that they answer."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.cluster import Cluster
from planner.search import Ranking
from tools.common.plan_text import OTHERS, PlanRow
from train.config.flags import MODELS

RankPlans = Callable[[argparse.Namespace, Any, int, Cluster], tuple[Ranking, str]]
"""The search of tools.plan: returns the ranked candidates of a configuration, and a note."""


@dataclass(frozen=True)
class Plans:
    """Rows of a plan's table, and the question that they answer."""

    args: argparse.Namespace
    argv: list[str]
    """The command line of tools.plan."""
    config: Any
    base: Any
    """Configuration of a named model's file; None if the flags are those of a run."""
    world_size: int
    cluster: Cluster
    ranking: Ranking
    rows: list[PlanRow]
    note: str
    """A note on the ranking; empty if there is none."""
    limit: str
    """The memory that a longer sequence lacks, with --longest; empty without."""
    rank_plans: RankPlans

    @property
    def file(self) -> str:
        """Return the named model as --config names it."""
        file = Path(self.args.model)
        return file.stem if file.resolve().parent == MODELS else str(self.args.model)

    @property
    def shown(self) -> list[PlanRow]:
        """Return the rows that the text output shows."""
        if self.args.model:
            return self.rows[: 1 + OTHERS]
        return self.rows[: self.args.top]
