"""The time, bytes and memory of layers with a delta rule.

They are compared with figures worked out by hand and a measured step.
"""

from collections import Counter
from dataclasses import replace

import pytest

from bench.memory import measured
from parallel.context import make_plan
from planner.cluster import DELTA, load_cluster
from planner.layers.delta_cost import DeltaCost, DeltaShape, wide_share
from planner.rehearsal import rehearse
from planner.search import candidates_of
from runtime.ranks import run_ranks
from tests.planner.test_step_cost import COMPUTE, LATENCY, NETWORK
from train.config.language import load_config, parse_args
from train.tasks.language import LanguageTask

H100 = load_cluster("h100")
SHAPE = DeltaShape(key_heads=16, heads=32, key_dim=128, value_dim=128, taps=4)
"""A layer of Qwen3.5 9B."""


def cost(cluster, size=4, tokens=4096, method="ring", shape=SHAPE, **options):
    return DeltaCost(make_plan(method, seq_len=tokens, size=size, **options), shape, 1, 2, cluster)


def bytes_sent(cost):
    """Bytes of a forward and a backward inside nodes, and between them."""
    node, bytes_by_link = cost.cluster.gpus_per_node, [0, 0]
    for sent in (
        round_cost for reverse in (False, True) for round_cost in cost.rounds(reverse=reverse)
    ):
        for rank, peer, size in sent:
            bytes_by_link[rank // node != peer // node] += size
    return bytes_by_link


def test_products_are_counted_by_hand():
    """3 d^2 + 5 C d multiply-adds of a token and head; Q, M and Q S of those that continue.

    A backward has N.
    """
    computing = replace(COMPUTE, delta_fraction=1.0)
    plain, map_products, d2 = 3 * 128**2 + 5 * 64 * 128, 3 * 128**2 + 64 * 128, 128**2
    rows = 2 * 32 / 1e12
    assert (plain, map_products) == (90112, 57344)
    alone = cost(computing, 1)
    assert alone.forward() == pytest.approx(rows * 4096 * plain)
    assert alone.backward() == pytest.approx(rows * 4096 * 2.5 * plain)
    shared = cost(computing)  # 1,024 tokens a rank, and the busiest continue a document
    joined = 3 * rows * 128 * d2  # M S, from each rank to the next
    assert shared.forward() == pytest.approx(rows * 1024 * (plain + map_products + d2) + joined)
    assert shared.backward() == pytest.approx(rows * 1024 * (2.5 * plain + d2) + joined)
    channels = cost(computing, 1, shape=SHAPE._replace(per_channel=True))
    assert channels.forward() == pytest.approx(1.6 * alone.forward())
    assert cost(COMPUTE, 1).forward() == pytest.approx(alone.forward() / DELTA), (
        "a file without a rate"
    )


def test_states_and_halos_are_what_travels():
    state, row = 32 * 128 * 128 * 4, 2 * 16 * 128 + 32 * 128
    halos = 3 * row * (2 + 4)  # gradients are in float32
    for tokens in (4096, 65536):
        assert bytes_sent(cost(NETWORK, tokens=tokens))[0] == 3 * (2 * state + halos)
        # the middle pieces of a zigzag lie on one rank: 7 cuts, 6 of them between ranks
        assert bytes_sent(cost(NETWORK, tokens=tokens, method="zigzag"))[0] == 6 * (
            2 * state + halos
        )
    far = replace(NETWORK, gpus_per_node=2)
    assert bytes_sent(cost(far))[1] == 2 * state + halos
    assert cost(NETWORK).forward() == pytest.approx(3 * state / 1e9 + 3 * row * 2 / 1e9, rel=1e-6)
    assert cost(LATENCY).forward() == pytest.approx(1 + 3), (
        "the halo, and a state from each rank to the next"
    )
    assert cost(LATENCY, method="zigzag").forward() == pytest.approx(1 + 6), (
        "halos to two peers set out together"
    )


def test_documents_that_no_rank_shares_cost_nothing_more():
    whole, cut = (range(0, 4097, step) for step in (1024, 4096))
    apart = cost(LATENCY, documents=tuple(whole))
    assert bytes_sent(apart) == [0, 0]
    assert apart.forward() < 1e-9
    assert wide_share(apart.plan) == 0
    assert wide_share(make_plan("ring", seq_len=4096, size=4, documents=tuple(cut))) == 1


def config_of(**sizes):
    config = load_config("configs/models/qwen3_5_9b.toml")
    return replace(
        config, model=replace(config.model, num_layers=8), mesh=replace(config.mesh, **sizes)
    )


def test_methods_have_consecutive_tokens():
    refused = Counter()
    configs = candidates_of(
        [config_of(context_parallel_size=2)], 2, replace(H100, gpus_per_node=2), refused
    )
    named = {config.context.context_parallel_method for config in configs}
    assert "zigzag" in named
    assert "striped" not in named
    assert not refused


@pytest.mark.slow
def test_memory_is_that_of_a_real_step():
    flags = (
        "--model-type qwen3_5 --num-layers 4 --hidden-size 128 --num-attention-heads 8 "
        "--micro-batch-size 1"
    )
    flags += " --vocab-size 1024 --seq-length 1024 --device cpu --context-parallel-method none"
    (real,) = run_ranks(measured, 1, flags)
    stage = rehearse(parse_args(flags.split()), LanguageTask, 0, 1, per_node=1)
    assert stage.bytes == pytest.approx(real["bytes"], rel=0.05)
