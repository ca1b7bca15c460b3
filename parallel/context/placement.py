"""Placement: which place of a method each rank takes. A launcher fills nodes with consecutive ranks."""

import numpy as np

PLACEMENTS = ("collect_intra", "p2p_intra")


def places(placement: str, size: int, team_size: int) -> np.ndarray:
    """The place in the method of each of ``size`` ranks, a permutation (WallFacer, section 3.4): int64 ``[size]``.

    A team group is G teams of ``team_size`` C, and as many rings of G: ``collect_intra`` makes neighbours of a team's
    members, which gather and reduce, and ``p2p_intra`` of a ring's members, so that it is they who share a node.
    """
    place = np.arange(size)
    if placement == "p2p_intra":
        place = (
            place.reshape(team_size, -1, team_size).swapaxes(1, 2).ravel()
        )  # [group, team, member], last two swapped
    return place
