"""The time, memory and lever of a layer that takes its sequence slice by slice."""

from collections import Counter
from dataclasses import replace

import pytest

from bench.memory import configured, measured
from parallel.context import make_plan
from planner.cluster import CLUSTERS, default_cluster, load_cluster
from planner.extremes import changes, limit_of_longest
from planner.layers.memory import backward_bytes, slice_cost
from planner.levers import ORDER, SLICES, ladder, settings
from planner.rehearsal import rehearse
from planner.search import candidates_of, contexts, weigh
from planner.step_cost import step_seconds
from planner.step_shape import Arrangement
from planner.workload import workload_of
from runtime.ranks import run_ranks
from tests.planner.test_step_cost import COMPUTE, GPT_7B, LATENCY
from train.config.language import load_config, parse_args

H100 = load_cluster(CLUSTERS / "h100_pod.toml")
LLAMA_8B = load_config("configs/models/llama3_8b.toml").updated(
    bf16=True, micro_batch_size=1, global_batch_size=1
)
WHOLE = Arrangement(recompute="full", offload=True, loss_chunk=2048)
PROFILED = (
    "--device cpu --mock-data --model-type llama --num-layers 2 --hidden-size 64 "
    "--num-attention-heads 2 --num-query-groups 1 --vocab-size 128 --micro-batch-size 1 "
    "--global-batch-size 1 --loss-chunk-size 256 --recompute-granularity full "
    "--layer-chunk-size 512 --context-parallel-method ulysses "
    "--data-parallel-sharding-strategy ddp --seq-length "
)


def seconds(cluster, tokens=8192, chunk=0, size=1, work=GPT_7B):
    plan = make_plan("ulysses", seq_len=tokens, size=size)
    return step_seconds(work, plan, replace(WHOLE, layer_chunk=chunk), cluster)[0]


def test_keys_are_computed_once_more():
    """Two projections of width 4096: 4 FLOPs a token and weight."""
    whole = seconds(COMPUTE)
    in_slices = seconds(COMPUTE, chunk=1024)
    again = in_slices.pop("slices")
    assert in_slices == whole
    assert again == pytest.approx(32 * 8192 * 4 * 4096**2 / 1e12)


def test_every_slice_launches_what_computing_does_not_hide():
    """110 launches of 1 us a slice, and tiles of 4 us of each slice but the first.

    Forward there are 2 tiles a slice, twice; backward 2 to 8, which are 35. The 3 tiles
    of a whole layer hide as many launches.
    """
    idle = replace(COMPUTE, peak_tflops=1e15, launch_us=4)
    assert seconds(idle, chunk=1024)["slices"] == pytest.approx(
        32 * (8 * 110 - 3 * 4 + (7 * 4 + 35) * 4) * 1e-6, rel=1e-3
    )
    busy = replace(COMPUTE, launch_us=4)
    on_cpu = replace(busy, device="cpu")
    tiles = 32 * (7 * 4 + 35) * 4e-6
    keys = seconds(COMPUTE, chunk=1024)["slices"]
    assert seconds(busy, chunk=1024)["slices"] == pytest.approx(keys + tiles)
    assert seconds(on_cpu, chunk=1024)["slices"] == pytest.approx(keys + tiles + 32 * 8 * 110e-6)


def test_exchanges_of_every_slice_wait_and_sums_of_keys_are_read_and_written():
    waits = seconds(LATENCY, chunk=1024, size=2)["slices"]
    assert waits == pytest.approx(32 * 12 * 3)
    slow = replace(COMPUTE, peak_tflops=1e15, memory_gb_per_s=1.0)
    plan = make_plan("ulysses", seq_len=8192, size=1)
    cost = slice_cost(GPT_7B, plan, replace(WHOLE, layer_chunk=1024))
    # On average 4096.5 + 512 keys; 2 writes and reads in 2 and in 4 bytes for each of 2 x 4096.
    # In 36 tiles, as many for each of 1024 x 4096 of the queries.
    keys = 8 * (4096.5 + 512) * 2 * 4096
    queries = 36 * 1024 * 4096
    moved = (keys + queries) * 2 * (2 + 4)
    assert cost.sum_seconds(slow) == pytest.approx(moved / 1e9, rel=1e-4)
    assert cost.sum_seconds(COMPUTE) == 0


def test_slices_on_several_ranks_have_the_same_tiles():
    """With four times the tokens, each rank's slice sees as large a share of all keys."""
    arrangement = replace(WHOLE, layer_chunk=1024)
    on_one_rank = slice_cost(GPT_7B, make_plan("ulysses", seq_len=8192, size=1), arrangement)
    slow = replace(COMPUTE, memory_gb_per_s=1.0)
    seconds_by_team = {}
    for degree in (4, 2, 1):
        plan = make_plan("allgather_q", seq_len=4 * 8192, size=4, ulysses_degree=degree)
        cost = slice_cost(GPT_7B, plan, arrangement)
        assert cost.tile_seconds(H100) == pytest.approx(on_one_rank.tile_seconds(H100), rel=1e-3)
        seconds_by_team[cost.team] = cost.sum_seconds(slow)

    assert seconds_by_team[1] == pytest.approx(on_one_rank.sum_seconds(slow), rel=1e-3)
    # The sums of queries grow with the team, those of keys do not: 36 tiles of 1024 x 4096.
    queries = 36 * 1024 * 4096 * 2 * (2 + 4) / 1e9
    for team in (2, 4):
        added = seconds_by_team[team] - seconds_by_team[1]
        assert added == pytest.approx((team - 1) * queries, rel=1e-2)


def test_blocks_of_a_slice_are_as_fast_as_zigzag():
    """Blocks of the whole sequence would have unequal work, but all ranks share every slice."""
    times = []
    for layout in ("auto", "contiguous"):
        run = LLAMA_8B.updated(
            seq_length=1 << 20,
            context_parallel_size=16,
            context_parallel_method="allgather_q",
            context_parallel_layout=layout,
            recompute_granularity="full",
            layer_chunk_size=4096,
        )
        times.append(weigh(run, 16, H100, None).predicted(H100).time)
    assert times[0] == times[1]


def test_a_search_refuses_slices_that_the_ranks_cannot_share():
    odd = LLAMA_8B.updated(
        seq_length=1 << 16,
        context_parallel_size=16,
        context_parallel_method="auto",
        recompute_granularity="full",
        layer_chunk_size=1023,
    )
    refused = Counter()
    contexts_left = [run.context for run in candidates_of([odd], 16, H100, refused)]
    degrees = {context.ulysses_degree for context in contexts_left}
    assert degrees == {1, 2, 4, 8}
    gathered = {(c.context_parallel_method, c.ulysses_degree) for c in contexts_left}
    assert ("allgather_q", 1) not in gathered
    assert ("ulysses", 1) in gathered
    (reason,) = refused
    assert "it must be a multiple of 2" in reason


def test_the_method_of_slices_is_part_of_their_step():
    run = LLAMA_8B.updated(
        seq_length=1 << 23,
        context_parallel_size=64,
        context_parallel_method="allgather",
        lora_rank=16,
    )
    steps, _ = changes(run, 64, H100, None)
    flags = [step.flag for step in steps]
    with_method = [flag for flag in flags if "allgather_q" in flag]
    assert with_method
    assert all("--layer-chunk-size" in flag for flag in with_method)
    sizes = [step.bytes for step in steps]
    assert sizes == sorted(sizes, reverse=True)


def test_gathers_of_every_slice_wait():
    """12 exchanges of heads and 11 collectives of queries, of each slice but the first."""
    plan = make_plan("allgather_q", seq_len=16384, size=4, ulysses_degree=2)
    cost = slice_cost(GPT_7B, plan, replace(WHOLE, layer_chunk=1024))
    nodes = replace(LATENCY, inside_latency_us=1e6, between_latency_us=2e6)
    assert cost.latency_seconds(replace(nodes, gpus_per_node=4), 1) == (12 + 11) * 3
    assert cost.latency_seconds(replace(nodes, gpus_per_node=2), 1) == (12 + 22) * 3
    assert cost.latency_seconds(replace(nodes, gpus_per_node=2), 2) == (24 + 22) * 3


@pytest.mark.parametrize(
    ("size", "degree", "chunk", "settings"),
    [
        (2, 1, 1024, ""),
        (4, 1, 1024, ""),
        (4, 2, 1024, ""),
        (4, 1, 1024, "--bf16 --kv-channels 128 "),
        (4, 1, 2048, "--bf16 --kv-channels 128 --micro-batch-size 2 --global-batch-size 2 "),
    ],
)
def test_memory_of_gathered_queries_is_that_of_the_code(size, degree, chunk, settings):
    """A dry run allocates what the code does, without memory; twice the slice adds as much."""
    flags = PROFILED.replace("ulysses", f"allgather_q --ulysses-degree {degree} {settings}")
    flags = f"--context-parallel-size {size} {flags}{size * 8192}"
    predicted = []
    allocated = []
    for tokens in (chunk, 2 * chunk):
        config, task = configured(f"{flags} --layer-chunk-size {tokens}")
        predicted.append(weigh(config, size, default_cluster("cpu"), None).device)
        allocated.append(rehearse(config, task, 0, size, per_node=size).bytes)
    assert predicted[1] == pytest.approx(allocated[1], rel=0.05)
    added = predicted[1] - predicted[0]
    assert added == pytest.approx(allocated[1] - allocated[0], rel=0.06)


def test_slices_of_short_documents_have_fewer_tiles():
    plan = make_plan("ulysses", seq_len=8192, size=1)
    packed = make_plan("ulysses", seq_len=8192, size=1, documents=(0, 1024, 4096, 8192))
    arrangement = replace(WHOLE, layer_chunk=512)
    whole, short = (slice_cost(GPT_7B, each, arrangement) for each in (plan, packed))
    assert whole.attention_bytes() == short.attention_bytes() == 512 * 4096 * (4 + 2 + 2 * 2)
    assert short.tile_seconds(H100) < whole.tile_seconds(H100)
    assert short.sum_seconds(H100) < whole.sum_seconds(H100)


def test_bytes_of_a_token_are_those_of_what_exists_of_all_tokens():
    """LLaMA 3 8B in bfloat16 with inputs on the host, in KB: x, dout and dx 24, K and V 4, their
    sums 8, rotary tables 0.5.
    """
    arrangement = replace(WHOLE, layer_chunk=16384)
    work = workload_of(LLAMA_8B, 1, "cuda")
    sizes = []
    for length in (1 << 19, 1 << 20):
        plan = make_plan("ulysses", seq_len=length, size=1)
        sizes.append(backward_bytes(work, plan, arrangement))
    assert sizes[1] - sizes[0] == 36.5 * 1024 * (1 << 19)
    assert sizes[1] < 0.65 * backward_bytes(work, plan, replace(WHOLE, ffn_chunk=8192))


@pytest.mark.slow
@pytest.mark.parametrize("length", [3072, 4096, 6144, 8192])
def test_memory_is_within_5_percent_of_the_profilers_peak(length):
    flags = f"{PROFILED}{length}"
    config, _ = configured(flags)
    (real,) = run_ranks(measured, 1, flags)
    device_bytes = weigh(config, 1, default_cluster("cpu"), None).device
    assert device_bytes == pytest.approx(real["bytes"], rel=0.05)


def test_slices_are_a_lever_where_keys_stay_on_their_rank():
    long = LLAMA_8B.updated(
        seq_length=1 << 20,
        context_parallel_size=4,
        context_parallel_method="ulysses",
        recompute_granularity="full",
        ulysses_head_chunks=2,
    )
    assert SLICES.further(long, H100) == [(16384, 1, "ulysses")]
    gathered = long.updated(context_parallel_method="allgather", ulysses_head_chunks=1)
    assert SLICES.further(gathered, H100) == [(4096, 1, "allgather_q")]
    for change in (
        {"context_parallel_method": "zigzag", "ulysses_head_chunks": 1},
        {"recompute_granularity": "attention_boundary"},
        {"compile": True},
        {"seq_length": 65536},
    ):
        assert SLICES.further(long.updated(**change), H100) == []
    several = long.updated(micro_batch_size=3, global_batch_size=3)
    assert SLICES.further(several, H100) == [(16383, 1, "ulysses")]

    tried = list(ladder([long], H100, moments=True))
    in_slices = [config for configs in tried[2:] for config in configs]
    assert {config.recompute.layer_chunk_size for config in in_slices} == {0, 16384}
    assert ORDER.index(SLICES) == len(ORDER) - 3
    methods = contexts(in_slices[0].updated(context_parallel_size=4), 8)
    names = {context.context_parallel_method for context in methods}
    assert names == {"ulysses", "allgather_q"}
    of_whole = contexts(long, 8)
    assert "allgather_q" not in {context.context_parallel_method for context in of_whole}


def test_a_linear_or_full_attention_is_not_cut_into_slices():
    lasp = parse_args(
        "--model-type transnormer --mock-data --seq-length 1048576 "
        "--recompute-granularity full".split()
    )
    assert SLICES.further(lasp, H100) == []
    assert all(config.recompute.layer_chunk_size == 0 for config in settings(lasp, H100))


def test_slices_make_a_run_fit_and_host_memory_is_named_where_it_is_too_small():
    adapters = LLAMA_8B.updated(lora_rank=16, context_parallel_method="ulysses")
    adapters = adapters.updated(seq_length=1 << 20, context_parallel_size=1)
    roomy = replace(H100, host_memory_gb=400)
    needed, _ = changes(adapters, 1, roomy, None)
    assert needed[-1].flag.endswith("--layer-chunk-size 16384")
    assert needed[-1].bytes < 1e9 * roomy.memory_gb
    assert changes(adapters, 1, H100, None) == ([], None)
    assert limit_of_longest(adapters, 1, H100) == "host memory"
    no_host = replace(H100, host_gb_per_s=0.0)
    assert limit_of_longest(adapters, 1, no_host) == "device memory"
