"""Flags that speak of layers of softmax attention: those of a hybrid, windows, sinks."""

import pytest

from train.config.language import parse_args, validate

HYBRID = (
    "--data-path x --tokenizer-model x --model-type transnormer --softmax-every 2 --context-parallel-method lasp "
    "--context-parallel-size 4"
)


@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses"])
def test_every_method_goes_with_a_hybrid(method):
    validate(parse_args([*HYBRID.split(), "--hybrid-softmax-method", method]), 4)
    validate(parse_args([*HYBRID.split(), "--hybrid-softmax-method", method, "--context-parallel-size", "1"]), 4)


def test_learned_sinks_are_for_backwards_in_one_part_alone():
    """The refusal of the one that they are not for is in ``test_language.py``."""
    flags = "--data-path x --tokenizer-model x --pipeline-model-parallel-size 2 --global-batch-size 4"
    parts = "--pipeline-schedule InterleavedZeroBubble --data-parallel-sharding-strategy zero1"
    for more in (f"{parts} --softmax-type off-by-one", "--softmax-type learnable --pipeline-schedule Interleaved1F1B"):
        validate(parse_args([*flags.split(), *more.split()]), 2)
