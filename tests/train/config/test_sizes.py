"""What a hybrid's flags may say of its softmax layers."""

import pytest

from train.config.language import ConfigError, parse_args, validate

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
        (
            "--context-parallel-method auto",
            "context_parallel_method is auto and softmax_every is 2; .* choose one of lasp",
        ),
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
