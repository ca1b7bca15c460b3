"""A step laid out in time: spans tile the predicted step, on every rank of every mesh."""

from dataclasses import replace
from itertools import pairwise

import pytest

from parallel.pipeline.stages import PipelineConfig
from planner.cluster import load_cluster
from planner.page.elements import FILLS
from planner.page.origins import FORMULAS
from planner.page.passes import SENDS, SLOWER, Step
from planner.page.pipeline import pass_starts
from planner.page.spans import BUBBLE, drawn_timeline, step_timeline
from planner.search import candidates_of, weigh
from planner.workload import typical_documents
from tools.fit import parsed

H100 = load_cluster("h100")
LLAMA = "--config llama2_7b --bf16 --vocab-size 32000 --seq-length 65536"
RUNS = {
    "pipeline 4 x context 8": (
        f"{LLAMA} --pipeline-model-parallel-size 4 --context-parallel-size 8 "
        "--global-batch-size 8 --context-parallel-method zigzag",
        32,
    ),
    "gpipe, data parallel": (
        f"{LLAMA} --pipeline-model-parallel-size 2 --context-parallel-size 2 "
        "--pipeline-schedule GPipe --global-batch-size 6 --context-parallel-method ring",
        8,
    ),
    "interleaved": (
        f"{LLAMA} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--pipeline-schedule Interleaved1F1B --global-batch-size 4 --context-parallel-size 2 "
        "--context-parallel-method zigzag",
        4,
    ),
    "tensor, offload": (
        f"{LLAMA} --tensor-model-parallel-size 2 --context-parallel-size 4 "
        "--recompute-granularity full --recompute-offload --context-parallel-method striped",
        8,
    ),
    "pipeline and offload": (
        f"{LLAMA} --pipeline-model-parallel-size 2 --context-parallel-size 2 --global-batch-size 2 "
        "--recompute-granularity full --recompute-offload --context-parallel-method ulysses",
        4,
    ),
    "host moments, muon": (
        f"{LLAMA} --context-parallel-size 4 --context-parallel-method allgather --optimizer muon",
        8,
    ),
    "slices": (
        f"{LLAMA} --pipeline-model-parallel-size 2 --context-parallel-size 4 "
        "--global-batch-size 2 --context-parallel-method ulysses --recompute-granularity full "
        "--layer-chunk-size 4096",
        8,
    ),
    "windows": (
        "--config gemma3_1b --bf16 --seq-length 65536 --vocab-size 262144 "
        "--context-parallel-size 4 --context-parallel-method ring",
        4,
    ),
    "delta rule": (
        "--config qwen3_5_0.8b --bf16 --seq-length 65536 --vocab-size 32000 "
        "--context-parallel-size 4 --context-parallel-method zigzag",
        4,
    ),
    "linear attention": (
        "--config transnormer_0.4b --bf16 --seq-length 65536 --vocab-size 32000 "
        "--context-parallel-size 4 --context-parallel-method lasp",
        4,
    ),
    "packed": (
        f"{LLAMA} --reset-attention-mask --context-parallel-size 4 --context-parallel-method ring",
        4,
    ),
    "video": ("--config wallfacer_dit_1b --context-parallel-size 4", 4),
}
CAUSES_OF_PASSES = {
    "attention",
    "linear",
    "recompute",
    "slices",
    "tensor parallel",
    "pipeline",
}
"""Causes of time in the passes of a micro-batch; the others come once in a step."""


def run_of(name, cluster=H100):
    flags, world_size = RUNS[name]
    config = parsed(flags.split()).updated(device="cuda")
    if config.context.context_parallel_method == "auto":
        config = next(candidates_of([config], world_size, cluster, {}))
    lengths = (900, 60000, 4000) if config.packed else ()
    return weigh(config, world_size, cluster, typical_documents(config, lengths)), world_size


def check_tiles(spans, total):
    """Assert that the spans follow each other from 0 to the total, without gap or overlap."""
    assert spans[0].start == 0
    for span, following in pairwise(spans):
        assert span.end == following.start
    assert all(span.seconds > 0 for span in spans)
    assert spans[-1].end == pytest.approx(total, rel=1e-9)
    assert sum(span.seconds for span in spans) == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize("name", RUNS)
def test_spans_of_every_rank_tile_the_predicted_step(name):
    estimate, world_size = run_of(name)
    prediction = estimate.predicted(H100)
    timeline = step_timeline(estimate, H100, tolerance=0)
    assert timeline.prediction == prediction
    causes = {cause for cause, seconds in prediction.seconds.items() if seconds}
    assert causes <= FORMULAS.keys(), "each has its formula on the page"
    assert causes <= FILLS.keys()
    for row in timeline.rows:
        check_tiles(row.spans, prediction.time)
        for span in row.hidden:
            assert -1e-9 <= span.start < span.end <= prediction.time * (1 + 1e-9)

    ranks = [rank for row in timeline.rows for rank in row.ranks]
    assert sorted(ranks) == list(range(world_size))


def test_the_check_of_tiles_sees_a_gap_and_an_overlap():
    estimate, _ = run_of("tensor, offload")
    spans = step_timeline(estimate, H100).rows[0].spans
    total = estimate.predicted(H100).time
    check_tiles(spans, total)
    for wrong in (
        spans[1:],
        spans[:-1],
        (*spans[:1], replace(spans[1], end=spans[1].end * 1.001), *spans[2:]),
    ):
        with pytest.raises(AssertionError):
            check_tiles(wrong, total)


@pytest.mark.parametrize("name", RUNS)
def test_the_spans_of_a_cause_have_its_predicted_seconds(name):
    """In a pipeline, without the turns in which a stage waits: those count as a cause of waits."""
    estimate, _ = run_of(name)
    timeline = step_timeline(estimate, H100, tolerance=0)
    predicted = timeline.prediction.seconds
    turns = timeline.micro_batches + timeline.stages - 1
    working = timeline.micro_batches / turns
    expected = {}
    for cause, total in predicted.items():
        expected[cause] = working * total if cause in CAUSES_OF_PASSES else total
    expected[BUBBLE] = sum(predicted.values()) - sum(expected.values())
    for row in timeline.rows:
        seconds = dict.fromkeys(expected, 0.0)
        for span in row.spans:
            cause = "attention" if span.cause in (SENDS, SLOWER) else span.cause
            seconds[cause] += span.seconds
        assert seconds == pytest.approx(expected, rel=1e-8, abs=1e-8 * timeline.prediction.time)


@pytest.mark.parametrize("name", ["pipeline 4 x context 8", "packed"])
def test_seconds_that_no_part_stands_for_are_refused_instead_of_drawn_as_waits(name, monkeypatch):
    estimate, _ = run_of(name)
    passes = Step.passes

    def without_linear(step, computing):
        complete = passes(step, computing)
        parts = tuple(part for part in complete.forward if part.cause != "linear")
        return replace(complete, forward=parts)

    monkeypatch.setattr(Step, "passes", without_linear)
    with pytest.raises(ArithmeticError, match=r"leave .* lacks a part"):
        step_timeline(estimate, H100)


def test_every_stage_of_a_pipeline_waits_for_the_bubble():
    estimate, _ = run_of("pipeline 4 x context 8")
    timeline = step_timeline(estimate, H100)
    assert [row.stage for row in timeline.rows] == [0, 1, 2, 3]
    assert [row.ranks for row in timeline.rows] == [
        tuple(range(8 * stage, 8 * stage + 8)) for stage in range(4)
    ]
    # 8 micro-batches take 8 + 4 - 1 turns, and the rest of the step is the data parallel exchange.
    seconds = timeline.prediction.seconds
    turns = timeline.prediction.time - seconds["data parallel"] - seconds.get("optimizer", 0.0)
    assert timeline.bubble == pytest.approx(3 / 11 * turns, rel=1e-8)
    for row in timeline.rows:
        waits = sum(span.seconds for span in row.spans if span.cause == BUBBLE)
        assert waits == pytest.approx(timeline.bubble, rel=1e-9)
        passes = {(span.direction, span.micro_batch) for span in row.spans if span.direction}
        assert len(passes) == 2 * 8
    first_waits = [row.spans[0].cause == BUBBLE for row in timeline.rows]
    assert first_waits == [False, True, True, True]


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 2), (3, 7), (4, 4), (4, 13)])
def test_passes_wait_for_their_inputs_and_hold_the_activations_of_the_schedule(
    schedule, stages, micro_batches
):
    seconds = {"forward": 3.0, "backward": 7.0}
    all_starts = pass_starts(stages, micro_batches, *seconds.values(), schedule == "GPipe")
    ends = {}
    for stage, starts in enumerate(all_starts):
        for start, direction, number in starts:
            ends[direction, number, stage] = start + seconds[direction]
    assert len(ends) == 2 * stages * micro_batches
    assert max(ends.values()) == (micro_batches + stages - 1) * 10

    config = PipelineConfig(pipeline_schedule=schedule)
    for stage, starts in enumerate(all_starts):
        for before, after in pairwise(starts):
            assert before.start + seconds[before.direction] <= after.start
        in_flight = most_in_flight = 0
        for start, direction, number in starts:
            if direction == "forward":
                in_flight += 1
                ready = ends["forward", number, stage - 1] if stage else 0.0
            else:
                in_flight -= 1
                ready = ends["forward", number, stage]
                if stage < stages - 1:
                    ready = ends["backward", number, stage + 1]
            assert start >= ready
            most_in_flight = max(most_in_flight, in_flight)
        if stages > 1:
            assert most_in_flight == config.in_flight(stage, stages, micro_batches)


def test_a_rank_with_fewer_pairs_waits_for_the_slower_ranks():
    cluster = replace(H100, launch_us=0, masked_share=0)
    estimate, _ = run_of("packed", cluster)
    timeline = step_timeline(estimate, cluster, tolerance=0)
    assert len(timeline.rows) > 1, "documents give ranks unequal work"
    work, plan, _ = estimate.inputs
    running = cluster.running(estimate.config.context.attention_backend, is_packed=True)
    shape = {
        "batch": work.micro_batch,
        "heads": work.heads,
        "kv_heads": work.kv_heads,
        "head_dim": work.head_dim,
        "element_size": work.element_size,
    }
    for row in timeline.rows:
        computing = sum(span.seconds for span in row.spans if span.cause == "attention")
        waits = sum(span.seconds for span in row.spans if span.cause == SLOWER)
        sends = sum(span.seconds for span in row.spans if span.cause == SENDS)
        # 4 FLOPs forward and 10 backward for each pair and channel, counted rank by rank.
        pairs = sum(plan.cost(row.ranks[0], **shape).pairs)
        flops = 14 * pairs * work.heads * work.head_dim * work.layers * work.micro_batches
        assert computing == pytest.approx(flops / running.attention_flops_per_s)
        assert computing + waits + sends == pytest.approx(timeline.prediction.seconds["attention"])
    all_waits = [
        sum(span.seconds for span in row.spans if span.cause == SLOWER) for row in timeline.rows
    ]
    assert max(all_waits) > 0.01 * timeline.prediction.time


def test_ranks_that_differ_little_are_one_row_with_the_busiest_rank():
    estimate, _ = run_of("packed")
    apart = step_timeline(estimate, H100, tolerance=0).rows
    together = step_timeline(estimate, H100, tolerance=1.0).rows
    assert len(apart) > len(together) == 1
    computing = [
        [span.seconds for span in row.spans if span.cause == "attention"]
        for row in (*apart, *together)
    ]
    assert computing[-1] == max(computing[:-1], key=sum)


def test_a_picture_has_few_rows_even_if_all_ranks_differ():
    flags, _ = RUNS["packed"]
    config = parsed(
        flags.replace("--context-parallel-size 4", "--context-parallel-size 64").split()
    )
    config = config.updated(device="cuda")
    estimate = weigh(config, 64, H100, typical_documents(config, (900, 60000, 4000)))
    assert len(step_timeline(estimate, H100, tolerance=0).rows) > 32
    timeline = drawn_timeline(estimate, H100)
    assert 1 < len(timeline.rows) <= 32
    assert timeline.tolerance in (1e-3, 1e-2, 1e-1)
    for row in timeline.rows:
        check_tiles(row.spans, timeline.prediction.time)


def test_hidden_and_exposed_sends_are_all_transfers():
    estimate, _ = run_of("pipeline 4 x context 8")
    step = Step(estimate, H100)
    timeline = step_timeline(estimate, H100)
    row = timeline.rows[0]
    for direction, sending in (
        ("forward", step.sending_layer.attention),
        ("backward", step.sending_layer.attention_backward),
    ):
        spans = [
            span
            for span in (*row.spans, *row.hidden)
            if (span.cause, span.direction, span.micro_batch) == (SENDS, direction, 0)
        ]
        total = sum(span.seconds for span in spans)
        assert total == pytest.approx(step.layers * sending, rel=1e-6)


def test_without_links_there_are_no_sends_of_attention():
    fast = replace(
        H100,
        inside_gb_per_s=1e15,
        between_gb_per_s=1e15,
        inside_latency_us=0,
        between_latency_us=0,
    )
    estimate, _ = run_of("pipeline 4 x context 8", fast)
    for row in step_timeline(estimate, fast).rows:
        assert SENDS not in {span.cause for span in (*row.spans, *row.hidden)}
