"""The layout ``balanced``: packed documents over ranks, by arcs of a circle. ``circles`` has the construction."""

from parallel.context.arcs.layout import ArcLayout, levels, transfers
from parallel.context.arcs.orders import Level

__all__ = ["ArcLayout", "Level", "levels", "transfers"]
