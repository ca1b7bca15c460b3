"""Cards: the rates of data sheets by the names that torch gives.

None of these is taken for another.
"""

import pytest

from planner.cluster import CLUSTERS, load_cluster
from runtime.machine import CARDS, card_of


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("H20", 148),
        ("L40S", 362),
        ("A100-SXM4-40GB", 312),
        ("H100 PCIe", 756),
        ("H100 80GB HBM3", 989),
        ("B300 SXM6 AC", 2250),
    ],
)
def test_a_card_has_its_data_sheets_rate(name, tflops):
    card = card_of(f"NVIDIA {name}")
    assert card is not None
    assert card.flops == 1e12 * tflops


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA L40",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "Tesla T4",
        "NVIDIA A100-SXM4-80GB-40C",
        "GRID A100-20C",
    ],
)
def test_what_is_not_in_the_table_is_measured(name):
    assert card_of(name) is None


def test_the_files_of_cards_are_there_and_have_their_rate():
    for card in CARDS.values():
        if card.cluster:
            assert load_cluster(CLUSTERS / f"{card.cluster}.toml").peak_tflops == card.flops / 1e12
