"""The masks and the methods to compare in the attention alone, and what is asked of each mask."""

from typing import Any

CASES: dict[str, dict[str, Any]] = {
    "lognormal": {"documents": "lognormal"},
    "short": {"documents": "short"},
    "window": {"window": 1024},
    "one": {},
    "one_grouped": {"grouped": 4},
}
"""Masks, as fields of a Workload, and query heads per KV head."""
ASKED = {"lognormal": 2.3, "short": 8.0, "window": 6.0, "one": 1.05, "one_grouped": 1.05}
"""Times as fast as the best other method that sends all rows, at least."""
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("ring", "striped", "zigzag", "double_ring", "ulysses", "allgather")},
    "wallfacer_c2": ("wallfacer", {"team_size": 2}),
}
OURS = "exchange"
SHARE_ON_LINK = 0.7
"""Of the time of the best other method that sends all rows: where the link takes less, it is not what is measured."""
