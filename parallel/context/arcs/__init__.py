"""The layout ``balanced``: packed documents over ranks, by arcs of a circle. ``circles`` has the construction."""

from parallel.context.arcs.layout import ArcLayout

__all__ = ["ArcLayout"]
