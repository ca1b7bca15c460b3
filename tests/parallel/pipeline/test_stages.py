"""Stages of a pipeline hold every layer once, and what cannot run is refused with what can."""

import re

import pytest

from parallel.pipeline.stages import PipelineConfig, stage_layers


@pytest.mark.parametrize(
    ("layers", "ranks", "virtual"), [(1, 1, 1), (4, 2, 1), (5, 2, 1), (7, 4, 1), (9, 2, 3)]
)
def test_every_layer_lies_in_one_stage_and_every_stage_on_one_rank(layers, ranks, virtual):
    schedule = "1F1B" if virtual == 1 else "Interleaved1F1B"
    config = PipelineConfig(
        num_virtual_stages_per_pipeline_rank=virtual, pipeline_schedule=schedule
    )
    stages = stage_layers(config, layers, ranks)
    assert [layer for stage in stages for layer in stage] == list(range(layers))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1
    assert sorted(
        stage for rank in range(ranks) for stage in config.stages_of(rank, ranks)
    ) == list(range(len(stages)))


def test_what_does_not_divide_goes_to_the_middle():
    assert [len(stage) for stage in stage_layers(PipelineConfig(), 6, 4)] == [1, 2, 2, 1]


def test_layers_can_be_named():
    assert stage_layers(PipelineConfig(pipeline_layers=(1, 3)), 4, 2) == [range(1), range(1, 4)]
    with pytest.raises(
        ValueError, match=r"pipeline_layers is \[1, 3\], 4 layers for 2 stages, but there are 5"
    ):
        stage_layers(PipelineConfig(pipeline_layers=(1, 3)), 5, 2)


def check(config=None, **changes):
    fits = {
        "layers": 4,
        "ranks": 2,
        "micro_batches": 4,
        "strategy": "zero1",
        "tp": 1,
        "recompute": False,
    }
    (config or PipelineConfig()).check(**{**fits, **changes})


ZERO_BUBBLE = PipelineConfig(pipeline_schedule="InterleavedZeroBubble")
INTERLEAVED = PipelineConfig(
    pipeline_schedule="Interleaved1F1B", num_virtual_stages_per_pipeline_rank=2
)


def test_what_fits_passes():
    for config in (
        PipelineConfig(),
        PipelineConfig(pipeline_schedule="GPipe"),
        INTERLEAVED,
        ZERO_BUBBLE,
    ):
        check(config)
    check(ranks=1, micro_batches=1)
    check(INTERLEAVED, strategy="zero3", tp=2, recompute=True)


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (
            None,
            {"layers": 1},
            ("num_layers is 1", "2 pipeline stages", "at most 1 processes", "num_layers 2"),
        ),
        (
            INTERLEAVED,
            {"layers": 3},
            ("num_layers is 3", "4 pipeline stages", "virtual_stages_per_pipeline_rank 1"),
        ),
        (
            None,
            {"micro_batches": 1, "batch": 3},
            ("at least 2 micro-batches", "size 3 gives 1", "size 6, or"),
        ),
        (
            INTERLEAVED,
            {"micro_batches": 5},
            ("Interleaved1F1B", "equal rounds", "gives 5", "size 4 or 6"),
        ),
        (
            INTERLEAVED,
            {"ranks": 4, "layers": 8, "micro_batches": 9},
            ("gives 9", "global_batch_size 8 or 10"),
        ),
        (ZERO_BUBBLE, {"strategy": "zero3"}, ("InterleavedZeroBubble", "zero3", "zero1")),
        (ZERO_BUBBLE, {"strategy": "zero2"}, ("InterleavedZeroBubble", "zero2", "zero1")),
        (
            ZERO_BUBBLE,
            {"tp": 2},
            ("InterleavedZeroBubble", "tensor_model_parallel_size 2", "Interleaved1F1B"),
        ),
        (
            ZERO_BUBBLE,
            {"recompute": True},
            ("InterleavedZeroBubble", "recompute_granularity", "Interleaved1F1B"),
        ),
        (
            ZERO_BUBBLE,
            {"ranks": 1},
            ("pipeline_schedule is Inter", "no pipeline", "--pipeline-model-parallel-size"),
        ),
    ],
)
def test_what_does_not_fit_is_refused(config, changes, words):
    with pytest.raises(ValueError, match=".*".join(map(re.escape, words))):
        check(config, **changes)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_virtual_stages_per_pipeline_rank": 0}, "it must be 1 or more"),
        ({"num_virtual_stages_per_pipeline_rank": 2}, "to Interleaved1F1B"),
        ({"pipeline_layers": (2, 0)}, "each stage needs a layer"),
    ],
)
def test_a_contradiction_in_itself_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        PipelineConfig(**fields)


def test_a_rank_holds_as_many_micro_batches_as_its_schedule_warms_up_with():
    assert [PipelineConfig().in_flight(rank, 4, 8) for rank in range(4)] == [4, 3, 2, 1]
    assert PipelineConfig().in_flight(0, 4, 2) == 2
    assert PipelineConfig(pipeline_schedule="GPipe").in_flight(3, 4, 8) == 8
    assert [INTERLEAVED.in_flight(rank, 4, 8) for rank in range(4)] == [5.5, 4.5, 3.5, 2.5]
