"""Striped Attention (Brandon et al. 2023): every P-th token to a rank, so that each round's mask is a triangle."""

from parallel.context.methods.base import RingMethod


class Striped(RingMethod):
    """Rank j owns tokens j, j + P, j + 2P, ...; every round of every rank has half a block's work."""

    name = "striped"
    layout_name = "striped"
