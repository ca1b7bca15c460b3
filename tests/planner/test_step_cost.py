"""The cost model, against figures worked out by hand and measured memory.

It is also compared with what is published of the best layouts.
"""

from dataclasses import replace

import pytest

from parallel.context import make_plan
from parallel.context.traffic import sizes
from planner.cluster import CLUSTERS, Cluster, load_cluster
from planner.host_memory import moments, offloaded, pinned
from planner.layers.attention_cost import AttentionCost
from planner.step_cost import predict
from planner.step_shape import Arrangement, StepShape

FREE = 1e15
"""So much of a rate that what it carries takes no time."""
NETWORK = Cluster(
    name="links alone",
    gpus_per_node=64,
    peak_tflops=FREE,
    matmul_fraction=1.0,
    attention_fraction=1.0,
    launch_us=0.0,
    memory_gb=80.0,
    inside_gb_per_s=1.0,
    inside_latency_us=0.0,
    between_gb_per_s=1.0,
    between_latency_us=0.0,
    between_link="node",
)
COMPUTE = replace(NETWORK, peak_tflops=1.0, inside_gb_per_s=FREE, between_gb_per_s=FREE)
LATENCY = replace(NETWORK, inside_gb_per_s=FREE, inside_latency_us=1e6)


def attention(method, cluster, size=64, tokens=65536, **options):
    """METHODS' worked example: 65,536 tokens of 52 heads of 128, bfloat16."""
    plan = make_plan(method, seq_len=tokens, size=size, **options)
    return AttentionCost(plan, sizes(plan.geometry, 1, 52, 52, 128, 2), cluster)


def test_a_link_takes_the_bytes_of_the_worked_example_and_a_message_its_latency():
    gib, key_elements = 2**30 / 1e9, 1024 * 6656  # elements of a rank's K
    assert attention("zigzag", NETWORK).forward() == pytest.approx(1.625 * gib * 63 / 64)
    # teams of 4: KV placed and passed on, q, k and v gathered, partial results and lse in float32
    # brought back
    teams = (
        0.40625 * gib + 3 * 3 * key_elements * 2 / 1e9 + 3 * (key_elements + 1024 * 52) * 4 / 1e9
    )
    assert attention("wallfacer", NETWORK, team_size=4).forward() == pytest.approx(teams)
    assert attention("zigzag", LATENCY).forward() == pytest.approx(63)
    # a placement, 3 hops, 2 all-gathers of 3 messages one after the other, and partial results
    # straight to each owner
    assert attention("wallfacer", LATENCY, team_size=4).forward() == pytest.approx(
        1 + 3 + 2 * 3 + 1
    )
    # so do q, k, v there and out back
    assert attention("ulysses", LATENCY, 4, 4096, ulysses_degree=4).forward() == pytest.approx(2)
    # KV travels 63 times, its gradient 64, the last alone; both are under way in 62 rounds at once
    assert attention("zigzag", LATENCY).backward() == pytest.approx(127)


def test_states_cost_what_a_matrix_per_head_does_however_long_the_sequence():
    state = 52 * 128 * 128 * 4 / 1e9
    for tokens in (4096, 65536):
        for name in ("lasp", "lasp2"):  # one after the other, or all round a ring
            assert attention(name, NETWORK, 8, tokens).forward() == pytest.approx(7 * state)
            assert attention(name, NETWORK, 8, tokens).backward() == pytest.approx(7 * state)
            assert attention(name, NETWORK, 8, tokens).links().inside == pytest.approx(
                2 * 7 * (8 if name == "lasp2" else 1) * state * 1e9
            )
    scan = 4 * 512 * 52 * 128 * 128 / 1e12
    assert attention("lasp", COMPUTE, 8, 4096).forward() == pytest.approx(scan)
    assert attention("lasp", COMPUTE, 8, 4096).backward() == pytest.approx(3 * scan)
    assert attention("lasp2", COMPUTE, 8, 4096).forward() == pytest.approx(
        1.5 * scan
    )  # the state, and then the scan


@pytest.mark.parametrize("method", ["zigzag", "wallfacer", "ulysses"])
def test_what_goes_on_at_once_is_a_share_of_the_shorter(method):
    options = {"zigzag": {}, "wallfacer": {"team_size": 2}, "ulysses": {"ulysses_degree": 4}}[
        method
    ]
    both = replace(NETWORK, peak_tflops=1.0)

    def seconds(posted, shared, cluster=both):
        overlapping = replace(cluster, posted_overlap=posted, shared_overlap=shared)
        return attention(method, overlapping, 4, 4096, **options).forward()

    apart = seconds(1, 0, NETWORK), seconds(1, 0, COMPUTE)
    assert seconds(0, 0) == pytest.approx(sum(apart))
    assert seconds(1, 1) == pytest.approx(max(apart), rel=0.35)
    assert (seconds(1, 0) < seconds(0, 0)) == (method == "zigzag"), (
        "posted before the computing beside it"
    )
    assert seconds(0.5, 0) == pytest.approx((seconds(0, 0) + seconds(1, 0)) / 2)
    assert seconds(0, 0.5) == pytest.approx((seconds(0, 0) + seconds(0, 1)) / 2)
    assert min(seconds(posted, 1) for posted in (0, 0.5, 1)) >= max(apart) * (1 - 1e-9), (
        "no computing counts twice"
    )


def test_compute_goes_by_pairs_and_every_tile_takes_a_launch():
    pairs = 4096 * 4097 / 2
    one_rank = attention("zigzag", COMPUTE, 1, 4096)
    assert one_rank.forward() == pytest.approx(4 * pairs * 6656 / 1e12)
    assert one_rank.backward() == pytest.approx(10 * pairs * 6656 / 1e12)
    launches = replace(NETWORK, inside_gb_per_s=FREE, launch_us=1e6)
    assert attention("zigzag", launches, 8, 4096).forward() == pytest.approx(8)
    assert attention("zigzag", launches, 8, 4096, ulysses_degree=4).backward() == pytest.approx(2)
    assert attention("ring", launches, 8, 4096).forward() == pytest.approx(
        8
    )  # the last rank has one in every round


def test_a_kernel_computes_the_blocks_that_a_mask_cuts_and_a_masked_tile_may_take_longer():
    """Work by hand: 2 ranks of 4 tokens; blocks of 2 queries and 4 keys hide nothing of a tile."""

    def pairs(method, **kernel):
        cluster = replace(COMPUTE, **kernel)
        return attention(method, cluster, 2, 8).forward() * 1e12 / (4 * 52 * 128)

    triangle, square = 4 * 5 / 2, 16
    assert pairs("ring") == pytest.approx(triangle + square)
    assert pairs("striped") == pytest.approx(2 * triangle)
    whole = {"block_queries": 2, "block_keys": 4}
    assert pairs("ring", **whole) == pytest.approx(2 * square)
    assert pairs("striped", **whole) == pytest.approx(2 * square)
    assert pairs("ring", mask_overhead=0.5) == pytest.approx(1.5 * triangle + square)
    assert pairs("striped", **whole, mask_overhead=0.5) == pytest.approx(1.5 * 2 * square)
    # a share of the hidden pairs that no block computes
    half = {"block_queries": 2, "block_keys": 2, "masked_share": 0.5}
    assert pairs("striped", **half) == pytest.approx(2 * (triangle + 2 + (6 - 2) / 2))


def test_a_shared_link_carries_all_ranks_of_a_node_and_a_rail_one():
    nodes = replace(NETWORK, gpus_per_node=8, inside_gb_per_s=FREE)
    shared, rails = nodes, replace(nodes, between_link="rank")
    ring = attention("zigzag", shared).forward()
    assert ring == pytest.approx(
        attention("zigzag", rails).forward()
    )  # one rank of a node sends out
    far = {"team_size": 8, "placement": "collect_intra"}  # all of them do
    assert (
        attention("wallfacer", shared, **far).forward()
        > 4 * attention("wallfacer", rails, **far).forward()
    )
    assert attention("double_ring", rails, ranks_per_node=8).forward() < ring / 4


GPT_7B = StepShape(
    layers=32,
    hidden=4096,
    ffn=16384,
    gated=False,
    heads=32,
    kv_heads=32,
    head_dim=128,
    vocab=50304,
    parameters=6_650_208_256,
    outside=2 * 50304 * 4096,
    matrix_weights=6_648_496_128,
    element_size=2,
    micro_batch=1,
    micro_batches=1,
)


@pytest.mark.parametrize(("nodes", "best"), [("wallfacer_a100_16", 2), ("wallfacer_a100_8", 4)])
def test_the_best_team_is_the_one_that_wallfacers_paper_found(nodes, best):
    """Section 4.1: C = 2 with 16 GPUs per node, C = 4 with 8, both faster than the ring."""
    cluster, times = load_cluster(CLUSTERS / f"{nodes}.toml"), {}
    for team in (1, 2, 4):
        plans = (
            make_plan("wallfacer", seq_len=65536, size=32, team_size=team, placement=placement)
            for placement in ("collect_intra", "p2p_intra")
        )
        times[team] = min(predict(GPT_7B, plan, Arrangement(), cluster).time for plan in plans)
    assert min(times, key=lambda team: times[team]) == best
    assert times[best] < times[1] / 1.1


MEASURED = {
    ("none", 0, 0): 1122.9,
    ("none", 1024, 0): 690.8,
    ("none", 1024, 1024): 426.8,
    ("attention_boundary", 1024, 0): 248.6,
    ("attention_boundary", 1024, 1024): 173.9,
    ("full", 1024, 0): 224.2,
    ("full", 1024, 1024): 149.5,
}
"""MiB at the peak beyond weights and gradients, by recompute policy and chunks.

They are those of docs/evidence/memory.md.
"""
SMALL = replace(
    GPT_7B,
    layers=4,
    hidden=256,
    ffn=704,
    gated=True,
    heads=8,
    kv_heads=8,
    head_dim=32,
    vocab=8192,
    parameters=7_407_872,
    outside=2 * 8192 * 256,
    matrix_weights=5_308_416,
    element_size=4,
    micro_batches=2,  # gradients are there
)


@pytest.mark.parametrize("policy", MEASURED, ids=str)
def test_activations_are_those_that_were_measured(policy):
    recompute, loss_chunk, ffn_chunk = policy
    arranged = Arrangement(recompute=recompute, loss_chunk=loss_chunk, ffn_chunk=ffn_chunk)
    memory = predict(SMALL, make_plan("ring", seq_len=8192, size=1), arranged, COMPUTE).memory
    activations = (
        sum(size for part, size in memory.items() if not part.startswith("weights")) / 2**20
    )
    assert activations == pytest.approx(MEASURED[policy], rel=0.075)


WHOLE = 2 * GPT_7B.vocab * GPT_7B.hidden
"""Weights of the embedding and the output."""


def states(work, strategy, **options):
    plan, arranged = (
        make_plan("zigzag", seq_len=65536, size=8),
        Arrangement(strategy=strategy, **options),
    )
    return predict(work, plan, arranged, NETWORK).memory["weights, gradients, optimizer"]


def test_what_is_divided_takes_less():
    work = replace(GPT_7B, micro_batches=2, parameters=GPT_7B.matrix_weights + WHOLE // 2)
    count = work.parameters
    together = WHOLE + (count - WHOLE) / 32  # what is in no layer, and one layer
    assert states(work, "ddp") == pytest.approx((16 + 2) * count)
    assert states(work, "zero1") == pytest.approx((12 / 8 + 4 + 2) * count)  # gradients are whole
    assert states(work, "zero2") == pytest.approx((2 + 2) * count)
    assert states(work, "zero3") == pytest.approx(2 * count + 2 * together)
    assert states(work, "zero3", dp=2) == pytest.approx(count + 2 * together)
    assert states(work, "zero3", dp=2, copies=2) == states(work, "zero3")
    one_batch = replace(work, micro_batches=1)
    assert states(one_batch, "ddp") < 16 * count, "gradients come layer by layer, as activations go"


def test_frozen_weights_lie_in_their_type_without_gradients_or_moments():
    trained, count = 40_000_000, GPT_7B.matrix_weights + WHOLE // 2
    full = replace(GPT_7B, micro_batches=2, parameters=count)
    lora, frozen = replace(full, trained=trained), count - trained
    for strategy, copies in (
        ("ddp", count),
        ("zero2", count),
        ("zero3", WHOLE + (count - WHOLE) / 32),
    ):
        state_bytes = (16 * trained + 2 * frozen) / (1 if strategy == "ddp" else 8)
        assert states(lora, strategy) == pytest.approx(state_bytes + 2 * copies)
    plan = make_plan("zigzag", seq_len=65536, size=8)
    share, whole = trained / count, predict(full, plan, Arrangement(), COMPUTE).seconds["linear"]
    assert predict(lora, plan, Arrangement(), COMPUTE).seconds["linear"] == pytest.approx(
        whole * (2 + share) / 3
    )
    assert predict(replace(full, trained=count), plan, Arrangement(), NETWORK) == predict(
        full, plan, Arrangement(), NETWORK
    )


def test_pipelines_and_tensor_parallelism_divide_compute_and_cost_what_they_send():
    plan = make_plan("zigzag", seq_len=65536, size=8)
    whole = predict(GPT_7B, plan, Arrangement(), COMPUTE)
    half = predict(GPT_7B, plan, Arrangement(tp=2), COMPUTE)
    assert half.seconds["linear"] == pytest.approx(whole.seconds["linear"] / 2)
    assert half.seconds["attention"] == pytest.approx(whole.seconds["attention"] / 2)
    assert predict(GPT_7B, plan, Arrangement(tp=2), NETWORK).seconds["tensor parallel"] > 0
    batches = replace(GPT_7B, micro_batches=4)
    stages = predict(batches, plan, Arrangement(pp=2), COMPUTE)
    prediction = predict(batches, plan, Arrangement(), COMPUTE)
    assert stages.seconds["attention"] == pytest.approx(
        prediction.seconds["attention"] / 2 * 5 / 4
    )  # the bubble
    again = predict(GPT_7B, plan, Arrangement(recompute="full"), COMPUTE)
    assert (
        again.seconds["recompute"]
        > predict(GPT_7B, plan, Arrangement(recompute="selective"), COMPUTE).time * 0.1
    )


def test_layers_with_a_window_cost_what_they_see():
    plan, window = make_plan("zigzag", seq_len=16384, size=8), (1023, 0)
    whole = predict(GPT_7B, plan, Arrangement(), COMPUTE).seconds["attention"]
    every = predict(
        replace(GPT_7B, window=window, windowed_layers=32), plan, Arrangement(), COMPUTE
    )
    assert (
        every.seconds["attention"]
        == predict(GPT_7B, plan.windowed(window), Arrangement(), COMPUTE).seconds["attention"]
    )
    assert every.seconds["attention"] < 0.3 * whole
    some = predict(replace(GPT_7B, window=window, windowed_layers=24), plan, Arrangement(), COMPUTE)
    assert some.seconds["attention"] == pytest.approx(
        0.75 * every.seconds["attention"] + 0.25 * whole
    )
    assert some.seconds["linear"] == every.seconds["linear"]


def test_copies_to_host_memory_count_where_they_outlast_what_is_computed_beside_them():
    shape, moved = replace(GPT_7B, layers=4, vocab=0), Arrangement(recompute="full", offload=True)
    size = 4 * 4096 * 2 / 1e9  # GB of a token's inputs of all layers

    def seconds(tokens, rate, cluster=COMPUTE):
        plan = make_plan("zigzag", seq_len=8 * tokens, size=8)
        return predict(
            shape, plan, moved, replace(cluster, host_gb_per_s=rate, host_memory_gb=1)
        ).seconds

    run_seconds = seconds(8192, FREE)
    busy = run_seconds["attention"] + run_seconds["linear"] + run_seconds["recompute"]
    assert run_seconds["offload"] == 0
    assert seconds(8192, 8192 * size / busy)["offload"] == pytest.approx(
        busy
    )  # each way takes as long as all of it
    # A layer of 17 GB is fetched when it is asked for, though all of it could be hidden.
    run_seconds = seconds(2**21, 2**21 * size)
    assert run_seconds["attention"] > 100
    assert run_seconds["offload"] == pytest.approx(1)


def test_of_host_memory_slabs_of_powers_of_two_are_pinned():
    plan = make_plan("zigzag", seq_len=8 * 2**17 * 3, size=8)
    layer_bytes, lse, gib = 2**17 * 3 * 4096 * 2, 2**17 * 3 * 32 * 4, 2**30  # 3 GiB and 48 MiB
    for policy, rank_bytes, pins in (
        ("full", layer_bytes, 4 + 4 + 8 + 6 * 16),
        ("attention_boundary", 2 * layer_bytes + lse, 208),
    ):
        moved = Arrangement(recompute=policy, offload=True)
        assert offloaded(GPT_7B, plan, moved) == 32 * rank_bytes
        assert pinned(GPT_7B, plan, moved) == pins * gib
        several, staged = replace(GPT_7B, micro_batches=4), replace(moved, pp=2)
        assert pinned(several, plan, staged) == pins * gib, (
            "half of the layers, of two micro-batches"
        )
    only = Arrangement(moments_on_host=True)
    assert pinned(GPT_7B, plan, only) == moments(GPT_7B, plan, only) == GPT_7B.parameters
