"""Predicted steps on clips: by method, with adapters, sharded, and the largest clip that fits."""

from collections import Counter
from dataclasses import replace

import pytest

from parallel.context.config import FullContextConfig
from parallel.context.layout import ContextError
from planner.cluster import load_cluster
from planner.diffusion.clip import Clip, load_transformer
from planner.diffusion.run import ClipRun, plan_of
from planner.diffusion.search import (
    Choices,
    contexts_of,
    full_methods,
    largest_clips,
    rank_clip,
    runs_of,
)
from planner.diffusion.step import predict_clip
from planner.search import ROOM

H100 = load_cluster("h100")
IDEAL = replace(
    H100,
    launch_us=0.0,
    inside_latency_us=0.0,
    inside_gb_per_s=1e9,
    exposed_share=0.0,
    posted_overlap=1.0,
)
"""Links that cost nothing."""
SMALL = Clip(frames=81, height=480, width=832)
LARGE = Clip(frames=81, height=720, width=1280)
WAN_14B = load_transformer("wan2.1_14b")[0]
WAN_1B = load_transformer("wan2.1_1.3b")[0]
FLUX = load_transformer("flux_dev")[0]
ALL = WAN_14B.num_blocks


def full(name, **options):
    return FullContextConfig(
        context_parallel_method=name, context_parallel_layout="contiguous", **options
    )


def run_of(context=1, method="ring", **settings):
    return ClipRun(**{"gpus": 8, "batch": 8, "context": context, "method": full(method)} | settings)


@pytest.mark.parametrize("method", ["ring", "ulysses", "allgather", "exchange"])
def test_without_the_cost_of_links_sharing_a_clip_changes_no_time(method):
    """The ranks compute the same in all, but what each does for all tokens and the whole text."""
    alone = predict_clip(WAN_14B, LARGE, run_of(), IDEAL)
    shared = predict_clip(WAN_14B, LARGE, run_of(8, method), IDEAL)
    assert alone.flops == shared.flops
    assert shared.seconds["attention"] == pytest.approx(alone.seconds["attention"], rel=2e-3)
    assert alone.time < shared.time < 1.01 * alone.time


@pytest.mark.parametrize("method", ["ring", "ulysses", "allgather", "exchange"])
def test_activations_are_shared(method):
    """Weights are not: a group's second micro-batch finds gradients of the first."""
    alone = predict_clip(WAN_14B, LARGE, run_of(recomputed=ALL), H100)
    shared = predict_clip(WAN_14B, LARGE, run_of(8, method, recomputed=ALL), H100)
    ratio = alone.memory["activations"] / shared.memory["activations"]
    assert 7 < ratio < 8
    assert shared.links.inside > 0
    assert shared.links.between == 0


def test_seconds_are_the_counted_operations_over_the_rates():
    """One clip on one GPU: attention has 14 FLOPs a pair and channel with its backward."""
    run = run_of(gpus=1, batch=1, strategy="ddp")
    prediction = predict_clip(WAN_14B, LARGE, run, IDEAL)
    tokens, text, layers, width = 75_600, 512, 40, 5120
    pairs = tokens * (tokens + text)
    attention = 14 * layers * width * pairs / (1e12 * 989 * 0.53)
    assert prediction.seconds["attention"] == pytest.approx(attention, rel=1e-6)

    weights = 6 * width**2 + 2 * width * 13824
    products = 3 * 2 * layers * (tokens * weights + 2 * text * width**2)
    seconds = products / (1e12 * 989 * 0.8)
    moved = 3 * layers * tokens * (270 * width + 4 * 13824) / 3350e9  # bytes of a token and block
    assert prediction.seconds["linear"] == pytest.approx(seconds + moved, rel=1e-3)
    assert prediction.forward < prediction.time / 3


def test_blocks_computed_again_cost_their_forward():
    nothing = predict_clip(WAN_14B, SMALL, run_of(), H100)
    everything = predict_clip(WAN_14B, SMALL, run_of(recomputed=ALL), H100)
    some = predict_clip(WAN_14B, SMALL, run_of(recomputed=8), H100)
    cost = everything.time - nothing.time
    assert cost == pytest.approx(everything.forward, rel=0.01)
    assert some.time - nothing.time == pytest.approx(cost / 5)
    assert everything.bytes < some.bytes < nothing.bytes


def test_adapters_need_no_gradients_of_the_weights():
    everything = predict_clip(WAN_14B, SMALL, run_of(recomputed=ALL), H100)
    adapters = predict_clip(WAN_14B, SMALL, run_of(recomputed=ALL, lora_rank=64), H100)
    assert adapters.time < everything.time
    frozen = 2 * 14_288_491_584
    trained = 64 * 8 * ALL * 2 * 5120
    causes = list(adapters.memory)
    whole = run_of(recomputed=ALL, lora_rank=64, strategy="ddp")
    in_ddp = predict_clip(WAN_14B, SMALL, whole, H100).memory[causes[0]]
    assert in_ddp == pytest.approx(frozen + 14 * trained, rel=0.01)
    assert frozen / 8 < adapters.memory[causes[0]] < frozen / 4
    all_in_ddp = predict_clip(WAN_14B, SMALL, run_of(strategy="ddp"), H100)
    assert all_in_ddp.memory[causes[0]] >= 14 * 14_288_491_584


def test_a_time_for_each_token_takes_memory():
    clip = replace(SMALL, has_time_per_token=True)
    once = predict_clip(WAN_14B, SMALL, run_of(), H100).memory["activations"]
    per_token = predict_clip(WAN_14B, clip, run_of(), H100).memory["activations"]
    assert per_token - once > 40 * 24 * 5120 * 32_760


def test_heads_bound_ulysses():
    """12 heads of the 1.3B are divided by 2 and 4 ranks, and not by 8; 40 of the 14B by 8."""
    refused = Counter()
    choices = Choices(contexts_of(8), ("ulysses",), (0,))
    runs = runs_of(WAN_1B, SMALL, run_of(), H100, choices, refused)
    assert [run.context for run in runs] == [1, 2, 4]
    (reason,) = refused
    assert "12 query" in reason
    with pytest.raises(ContextError, match="12 query"):
        plan_of(WAN_1B, SMALL, run_of(8, "ulysses"), H100)
    assert plan_of(WAN_14B, SMALL, run_of(8, "ulysses"), H100).size == 8


def test_every_method_of_full_attention_is_tried():
    assert set(full_methods()) == {
        "ring",
        "allgather",
        "ulysses",
        "double_ring",
        "wallfacer",
        "exchange",
    }
    refused = Counter()
    choices = Choices(contexts_of(16), full_methods(), (0,))
    base = run_of(gpus=16, batch=16)
    runs = list(runs_of(WAN_14B, SMALL, base, H100, choices, refused))
    assert {run.method.context_parallel_method for run in runs} == set(full_methods())
    assert {run.context for run in runs} == {1, 2, 4, 8, 16}
    assert len(runs) == len(set(runs))


def test_ranking_begins_with_the_fastest_that_fits():
    choices = Choices(contexts_of(8), ("ring", "ulysses"), (0, ALL))
    ranking = rank_clip(WAN_14B, LARGE, run_of(), H100, choices)
    times = [candidate.prediction.time for candidate in ranking.candidates]
    assert times == sorted(times)
    assert ranking.over_memory  # the whole clip on one GPU
    assert all(
        candidate.prediction.bytes <= 1e9 * H100.memory_gb for candidate in ranking.candidates
    )
    assert ranking.candidates[0].run.context == 2

    uneven = rank_clip(WAN_14B, LARGE, run_of(batch=4), H100, choices)
    assert all(candidate.run.context > 1 for candidate in uneven.candidates)
    assert any("batch is 4, but 8 groups of 1 ranks" in reason for reason in uneven.refused)


def test_the_largest_clip_fits_and_the_next_does_not():
    choices = Choices((8,), ("ulysses",), (0, ALL))
    ((context, longest, largest),) = largest_clips(WAN_14B, SMALL, run_of(), H100, choices)
    assert context == 8
    limit = ROOM * 1e9 * H100.memory_gb
    run = run_of(8, "ulysses", recomputed=ALL)

    def num_bytes(clip):
        return predict_clip(WAN_14B, clip, run, H100).bytes

    assert num_bytes(longest) <= limit < num_bytes(replace(longest, frames=longest.frames + 4))
    assert (longest.height, longest.width) == (480, 832)
    higher = replace(largest, height=largest.height + 16, width=largest.width + 32)
    assert num_bytes(largest) <= limit < num_bytes(higher)
    assert largest.frames == 81
    assert largest.width / largest.height == pytest.approx(832 / 480, rel=0.01)


def test_pictures_have_no_length():
    picture = Clip(frames=1, height=1024, width=1024)
    choices = Choices((1,), ("ring",), (0, FLUX.num_blocks))
    ((_, longest, largest),) = largest_clips(FLUX, picture, run_of(), H100, choices)
    assert longest is None
    assert largest.height > 2048
    alone = replace(run_of(strategy="ddp"), gpus=1, batch=1)
    assert largest_clips(FLUX, picture, alone, H100, choices) == [(1, None, None)]
