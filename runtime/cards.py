"""Cards by the names that torch gives them: the rates of their data sheets, and the cluster files about them."""

import re
from typing import NamedTuple


class Card(NamedTuple):
    """A card's dense bfloat16 FLOP/s by its data sheet, and the file of configs/clusters/ about nodes of it."""

    flops: float
    cluster: str = ""


CARDS = {
    "gb300": Card(2500e12, "gb300_nvl72"),
    "gb200": Card(2500e12, "gb200_nvl72"),
    "b300": Card(2250e12, "b300_pod"),
    "b200": Card(2250e12, "b200_pod"),
    "gh200": Card(989e12),  # one to a node, beside a Grace
    "h200 nvl": Card(835e12),
    "h200": Card(989e12, "h200_pod"),
    "h100 nvl": Card(835e12),
    "h100 pcie": Card(756e12),
    "h100 80gb": Card(989e12, "h100_pod"),
    "h100": Card(989e12),
    "h800 pcie": Card(756e12),
    "h800 nvl": Card(835e12),
    "h800": Card(989e12, "h800_pod"),
    "h20 3e": Card(148e12),
    "h20": Card(148e12, "h20_pod"),
    "a100 pcie": Card(312e12),
    "a100 80gb": Card(312e12, "a100_pod"),
    "a100": Card(312e12),
    "a800 pcie": Card(312e12),
    "a800 80gb": Card(312e12, "a800_pod"),
    "a800": Card(312e12),
    "l40s": Card(362e12, "l40s_pod"),
    "rtx 4090": Card(165e12),
}
"""By words of the name, of which all must be there; the first that matches counts."""
PARTS = re.compile(r"mig|laptop|d|max|cnx|\d+(c|cme|q|a|b)")
"""Words that make a part of a card, or another one, of a name that is in the table: such as 40C, a virtual GPU's."""


def card_of(name: str) -> Card | None:
    """Return the card of ``torch.cuda.get_device_name()``; None if the table has none of its name."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    if any(map(PARTS.fullmatch, words)):
        return None
    return next((card for known, card in CARDS.items() if words.issuperset(known.split())), None)
