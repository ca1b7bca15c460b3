"""Cards: the rates of data sheets by the names that torch gives, of which none is taken for another."""

import pytest

from planner.cluster import CLUSTERS, load_cluster
from runtime.machine import CARDS, card_of

TFLOPS = {
    148: ["H20"],
    165: ["GeForce RTX 4090"],
    312: ["A100-SXM4-40GB", "A100-PCIE-40GB", "A100-SXM4-80GB"],
    362: ["L40S"],
    756: ["H100 PCIe"],
    835: ["H100 NVL", "H200 NVL", "H800 NVL"],
    989: ["H100 80GB HBM3", "H200", "GH200 480GB", "H800"],
    2250: ["B200", "B300 SXM6 AC"],
    2500: ["GB200", "GB300"],
}


@pytest.mark.parametrize(("name", "tflops"), [(name, rate) for rate, names in TFLOPS.items() for name in names])
def test_a_card_has_its_data_sheets_rate(name, tflops):
    card = card_of(f"NVIDIA {name}")
    assert card is not None
    assert card.flops == 1e12 * tflops


@pytest.mark.parametrize(
    "name",
    [
        *("NVIDIA L40", "NVIDIA A10", "NVIDIA GeForce RTX 4090 D", "NVIDIA H100 80GB HBM3 MIG 3g.40gb", "Tesla T4"),
        *("NVIDIA H100 CNX", "NVIDIA A100-SXM4-80GB-40C", "GRID A100-20C", "NVIDIA H100-1-10CME", "NVIDIA L40S-48Q"),
    ],
)
def test_what_is_not_in_the_table_is_measured(name):
    assert card_of(name) is None


def test_the_files_of_cards_are_there_and_have_their_rate():
    for card in CARDS.values():
        if card.cluster:
            assert load_cluster(CLUSTERS / f"{card.cluster}.toml").peak_tflops == card.flops / 1e12
