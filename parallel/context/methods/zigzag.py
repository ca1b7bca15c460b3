"""Zigzag ring: chunk r and its mirror image to rank r, so that any two ranks meet with the same work."""

from parallel.context.methods.base import RingMethod


class Zigzag(RingMethod):
    """Of 2P chunks rank r owns r and 2P - 1 - r: balanced like striping, with long contiguous runs."""

    name = "zigzag"
    layout_name = "zigzag"
