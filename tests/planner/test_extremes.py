"""The longest sequence and the fewest processes: what fits, and that the next does not.

Flags that make a run fit.
"""

from dataclasses import replace

import pytest

from parallel.recompute import RecomputeConfig
from planner import levers
from planner.cluster import CLUSTERS, load_cluster
from planner.extremes import PRECISION, STEP, changes, fewest, fits, last_good, longest, of_length
from planner.levers import ever_leaner, least_memory, settings
from planner.limits import nothing_left
from planner.search import ROOM, arrangements, rank, weigh
from runtime.errors import UserError
from tests.planner.test_search import A100
from tests.planner.test_search import config as small
from train.config.language import load_config

H100 = load_cluster(CLUSTERS / "h100_pod.toml")
SMALL = replace(H100, memory_gb=12, gpus_per_node=4)
CONFIG = load_config("configs/models/llama3_8b.toml")


@pytest.fixture
def config():
    """Half a billion parameters."""
    return replace(
        CONFIG, model=replace(CONFIG.model, num_layers=4, hidden_size=2048, ffn_hidden_size=4096)
    )


def test_the_longest_sequence_fits_and_a_longer_one_does_not(config):
    length = longest(config, 4, SMALL)
    assert length % STEP == 0
    assert fits(of_length(config, length), 4, SMALL)
    assert not fits(of_length(config, length + length // PRECISION + STEP), 4, SMALL)


def test_moments_go_to_host_memory_where_nothing_else_fits(config, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(
            "planner.levers.MOMENTS", replace(levers.MOMENTS, values=lambda *_: [(False,)])
        )
        longest_kept = longest(config, 4, SMALL)
    moved = longest(config, 4, SMALL)
    assert moved > 1.02 * longest_kept
    candidates = rank(
        list(arrangements(of_length(config, longest_kept), 4)), 4, SMALL, vary=settings
    ).candidates
    assert not all(candidate.config.optimizer.optimizer_cpu_offload for candidate in candidates)
    for candidate in rank(
        list(arrangements(of_length(config, moved), 4)), 4, SMALL, vary=settings
    ).candidates:
        assert candidate.config.optimizer.optimizer_cpu_offload
        assert candidate.prediction.seconds["optimizer offload"] > 0


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_moments_in_fewer_bits_are_proposed_last_and_only_by_fits(dtype, config):
    """If bf16 fits, int8 is not proposed."""
    config = config.updated(context_parallel_size=1, seq_length=16384)
    cluster = replace(SMALL, host_gb_per_s=0.0)
    *_, exact, leanest = ever_leaner(config, cluster, exact=False)
    half = leanest.updated(exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    fp32_size, bf16_size, int8_size = (
        weigh(lean, 1, cluster, None).device for lean in (exact, half, leanest)
    )
    assert int8_size < bf16_size < fp32_size
    smallest, too_large = (bf16_size, fp32_size) if dtype == "bf16" else (int8_size, bf16_size)
    memory = (smallest / ROOM + too_large) / 2  # fits with room to spare
    cluster = replace(cluster, memory_gb=memory / 1e9)
    needed, seconds = changes(config, 1, cluster, None)
    assert needed[-1].flag == f"--exp-avg-dtype {dtype} --exp-avg-sq-dtype {dtype}"
    assert [change.exact for change in needed] == [True] * (len(needed) - 1) + [False]
    assert needed[-1].bytes < 1e9 * cluster.memory_gb < needed[-2].bytes
    assert seconds is not None
    assert not fits(config, 1, cluster)


def test_the_fewest_processes_hold_it_and_fewer_do_not(config):
    for tokens in (16 * STEP, 4096 * STEP):
        fitted_config = of_length(config, tokens)
        processes = fewest(fitted_config, SMALL)
        assert fits(fitted_config, processes, SMALL)
        less = (
            processes - SMALL.gpus_per_node if processes > SMALL.gpus_per_node else processes // 2
        )
        assert not less or not fits(fitted_config, less, SMALL)


@pytest.mark.parametrize("last", [1, 2, 3, 63, 64, 100, 1000])
def test_the_last_number_is_found(last):
    assert last_good(lambda n: n <= last, 5000, exact=True) == last
    assert last - last // PRECISION <= last_good(lambda n: n <= last, 5000) <= last
    assert last_good(lambda n: True, 700, exact=True) == 700


def test_what_fits_nowhere_is_refused(config, monkeypatch):
    with pytest.raises(UserError, match="memory_gb of H100 80GB pod is 1, but the smallest of"):
        longest(config, 2, replace(SMALL, memory_gb=1))
    monkeypatch.setattr("planner.extremes.MAX_PROCESSES", 64)
    with pytest.raises(UserError, match="seq_length is 1048576, too long for 64 processes"):
        fewest(of_length(config, 1 << 20), replace(SMALL, memory_gb=0.01))


def test_every_policy_is_tried_with_chunks_and_in_host_memory():
    base_config = replace(CONFIG, recompute=RecomputeConfig(ffn_chunk_size=100))
    policies = [
        candidate.recompute
        for candidate in settings(base_config, H100)
        if candidate.data_parallel == base_config.data_parallel
    ]
    assert (
        len(policies) == len(set(policies)) == 2 * 3 + 2 * 2
    )  # loss in chunks or not; what none keeps is not moved
    assert all(candidate.ffn_chunk_size == 100 for candidate in policies)
    assert not any(
        candidate.recompute.recompute_offload
        for candidate in settings(base_config, replace(H100, host_gb_per_s=0.0))
    )
    assert {candidate.data_parallel.strategy for candidate in settings(base_config, H100)} == {
        "zero1",
        "zero2",
        "zero3",
    }
    assert all(
        candidate.recompute.ffn_chunk_size and candidate.recompute.loss_chunk_size
        for candidate in least_memory(CONFIG, H100)
    )


def test_what_the_host_cannot_hold_is_told_as_that(config):
    long_config = of_length(
        replace(config, mesh=replace(config.mesh, context_parallel_size=4)), 1024 * STEP
    )
    *_, moved = least_memory(long_config, SMALL)
    assert moved.recompute.recompute_offload
    small = replace(SMALL, memory_gb=80, host_memory_gb=1)
    assert weigh(moved, 4, small, None).fits(replace(small, host_memory_gb=SMALL.host_memory_gb))
    assert not weigh(moved, 4, small, None).fits(small)
    ranking = rank([moved], 4, small)
    assert not ranking.candidates
    assert not ranking.over_memory
    assert min(ranking.over_host_memory) > 1e9
    assert "host_memory_gb of H100 80GB pod is 1, but the smallest of" in nothing_left(
        ranking, small
    )


def run_of(size, method):
    """Return a small model's run on long sequences, whose heads are wide."""
    base_config = small(size, heads=32, groups=32)
    context = replace(base_config.context, context_parallel_method=method)
    return replace(
        base_config,
        train=replace(base_config.train, seq_length=2**18),
        model=replace(base_config.model, kv_channels=128, num_layers=2),
        context=context,
    )


def test_the_last_change_fits_with_heads_in_stages():
    ulysses_config = run_of(2, "ulysses")
    min_bytes = min(
        change_list.prediction.bytes
        for change_list in rank([ulysses_config], 2, A100, vary=least_memory).candidates
    )
    short = replace(A100, memory_gb=0.999 * min_bytes / 1e9)
    change_list, seconds = changes(ulysses_config, 2, short, None)
    assert seconds
    assert any("--ulysses-head-chunks" in change.flag for change in change_list)
    assert change_list[-1].bytes <= 1e9 * short.memory_gb


def test_one_process_keeps_its_method():
    zigzag_config = run_of(1, "zigzag")
    whole = weigh(zigzag_config, 1, A100, None).device
    assert whole == weigh(run_of(1, "striped"), 1, A100, None).device
    short = replace(A100, memory_gb=0.7 * whole / 1e9)
    change_list, _ = changes(zigzag_config, 1, short, None)
    assert change_list
    assert not any("method" in change.flag for change in change_list)
    assert change_list[-1].bytes <= 1e9 * short.memory_gb


LARGER, AGAIN = (
    "--context-parallel-size 16 --global-batch-size 2",
    "--recompute-granularity attention_boundary",
)


@pytest.mark.parametrize(
    ("size", "memory_gb", "flags"),
    [
        (8, 80, [LARGER, AGAIN]),  # not recomputation and offload on 8 ranks, which fit too
        (16, 80, [AGAIN]),
        (16, 50, ["--recompute-granularity full"]),
        (16, 30, [AGAIN, "--recompute-offload"]),
    ],
)
def test_levers_are_pulled_in_the_order_of_the_page(size, memory_gb, flags):
    """LLaMA 2 13B on 524,288 tokens and 16 A100."""
    lever_config, cluster = (
        load_config("configs/models/llama2_13b.toml"),
        load_cluster(CLUSTERS / "a100_pod.toml"),
    )
    lever_config = replace(
        lever_config, train=replace(lever_config.train, seq_length=1 << 19, bf16=True)
    )
    lever_config = replace(
        lever_config, mesh=replace(lever_config.mesh, context_parallel_size=size)
    )
    change_list, seconds = changes(lever_config, 16, replace(cluster, memory_gb=memory_gb), None)
    assert [change.flag for change in change_list] == flags
    assert seconds
    counts = [
        weigh(lever_config, 16, cluster, None).device,
        *(change.bytes for change in change_list),
    ]
    assert counts[-1] <= 1e9 * memory_gb
    assert min(counts[:-1]) > 0.9e9 * memory_gb
