"""Zigzag ring: rank r owns chunk r and its mirror image, so that every pair of ranks has the same work."""

from parallel.context.methods.base import RingMethod


class Zigzag(RingMethod):
    """Rank r owns chunks r and 2P - 1 - r of 2P: balanced like striping, with long contiguous runs."""

    name = "zigzag"
    layout_name = "zigzag"
