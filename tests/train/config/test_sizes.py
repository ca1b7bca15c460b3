"""Flags that speak of layers of softmax attention: those of a hybrid, windows, sinks."""

import pytest

from train.config.flags import ConfigError
from train.config.language import parse_args, validate

HYBRID = (
    "--data-path x --tokenizer-model x --model-type transnormer --softmax-every 2 --context-parallel-method lasp "
    "--context-parallel-size 4"
)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            "--softmax-every none --hybrid-softmax-method ulysses",
            "hybrid_softmax_method is ulysses and softmax_every is",
        ),
        ("--softmax-every none --hybrid-softmax-layout zigzag", "hybrid_softmax_layout is zigzag and softmax_every is"),
        (
            "--hybrid-softmax-method ulysses --hybrid-softmax-layout zigzag",
            "zigzag .* same work in any layout; use con",
        ),
        (
            "--hybrid-softmax-method ulysses --num-attention-heads 2",
            "hybrid_softmax_method is ulysses: ulysses_degree is 4 with 2 query .* degrees that fit 4 ranks: 1, 2",
        ),
        ("--context-parallel-method zigzag", "context_parallel_method is zigzag .* use one of lasp, lasp2, ulysses"),
        ("--attention-backend aten", "attention_backend is aten, which is softmax attention"),
    ],
)
def test_what_softmax_layers_cannot_be_is_refused(argv: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(parse_args([*HYBRID.split(), *argv.split()]), 4)


@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses"])
def test_every_method_goes_with_a_hybrid(method: str) -> None:
    validate(parse_args([*HYBRID.split(), "--hybrid-softmax-method", method]), 4)
    validate(parse_args([*HYBRID.split(), "--hybrid-softmax-method", method, "--context-parallel-size", "1"]), 4)


def test_learned_sinks_are_refused_where_a_backward_is_taken_in_two_parts() -> None:
    flags = "--data-path x --tokenizer-model x --pipeline-model-parallel-size 2 --global-batch-size 4".split()  # noqa: SIM905
    split = ["--pipeline-schedule", "InterleavedZeroBubble", "--data-parallel-sharding-strategy", "zero1"]
    learned = ["--softmax-type", "learnable"]
    with pytest.raises(
        ConfigError, match=r"pipeline_schedule is InterleavedZeroBubble, .* softmax_type is learnable, .*"
    ):
        validate(parse_args([*flags, *split, *learned]), 2)
    validate(parse_args([*flags, *split, "--softmax-type", "off-by-one"]), 2)
    validate(parse_args([*flags, *learned, "--pipeline-schedule", "Interleaved1F1B"]), 2)
