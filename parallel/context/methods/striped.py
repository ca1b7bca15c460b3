"""Striped Attention (Brandon et al. 2023): each rank owns every P-th token, so that each round's mask is a triangle."""

from parallel.context.methods.base import RingMethod


class Striped(RingMethod):
    """Rank j owns tokens j, j + P, j + 2P, ...; each round costs every rank half a block."""

    name = "striped"
    layout_name = "striped"
