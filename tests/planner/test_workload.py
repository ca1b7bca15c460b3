"""The layouts of a hybrid's softmax layers, weighed by what they compute and send."""

from dataclasses import replace

import pytest

from model.config import ModelConfig
from parallel.context.config import HybridConfig
from parallel.mesh import MeshConfig
from planner.choice import with_layout
from planner.cluster import CLUSTERS, load_cluster
from planner.workload import layout_seconds
from train.config.entries import Config, TrainConfig


def run(length, size, method="ring"):
    return Config(
        model=ModelConfig(model_type="transnormer", hidden_size=2048, num_attention_heads=16, softmax_every=2),
        mesh=MeshConfig(context_parallel_size=size),
        train=TrainConfig(seq_length=length, micro_batch_size=1, bf16=True),
        hybrid=HybridConfig(hybrid_softmax_method=method),
    )


@pytest.mark.parametrize("size", [2, 8])
def test_layouts_are_weighed_by_pairs_and_bytes(size):
    """Contiguous gives the last rank (2 P - 1) / P of the mean; an exchange sends at most all tokens."""
    length, none = 1024 * size, {"launch_us": 0.0, "inside_latency_us": 0.0, "masked_share": 0.0}
    ideal = replace(load_cluster("h100"), **none, posted_overlap=1.0, inside_gb_per_s=1e12)
    for method in ("ring", "allgather"):
        plain_, zigzag = layout_seconds(run(length, size, method), ideal).values()
        assert plain_ / zigzag == pytest.approx((2 * size - 1) / size * length / (length + 1), rel=1e-3)
    moved = length // size // (2 if size == 2 else 1)  # of two ranks each keeps half
    busy = replace(ideal, peak_tflops=1.0)  # behind whose computation a ring's messages are hidden
    (plain_, zigzag), (far, balanced) = (
        layout_seconds(run(length, size), replace(busy, inside_gb_per_s=rate)).values() for rate in (1e12, 50.0)
    )
    exchanged = 50e9 * ((balanced - far) - (zigzag - plain_))  # both have the same messages besides
    assert exchanged == pytest.approx(2 * (2 * 16 + 2 * 16) * 128 * 2 * moved, rel=1e-3)


def test_auto_takes_the_faster_layout():
    """The balance saves by the square of the length, the exchange costs by the length."""
    chosen = {}
    for length in (1024, 1 << 20):
        for fast in ("h100_pod", "cpu"):
            cluster = load_cluster(CLUSTERS / f"{fast}.toml")
            costs = layout_seconds(run(length, 4), cluster)
            chosen[length, fast] = with_layout(run(length, 4), cluster).hybrid.hybrid_softmax_layout
            assert chosen[length, fast] == min(costs, key=costs.get)
    assert chosen[1024, "h100_pod"] == "contiguous"
    assert {chosen[1 << 20, fast] for fast in ("h100_pod", "cpu")} == {"zigzag"}
