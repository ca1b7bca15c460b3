"""Other packages beside ours: the same shapes and tokens, whose losses can be compared.

The rest has a reason.
"""

import math
from pathlib import Path

import pytest

from bench import peers
from bench.harness import check_same, clocked, measured
from bench.peers import steps_of
from bench.processes import Contestants
from bench.shapes import MaskedShape
from data.tokenizer import load_tokenizer
from runtime.ranks import run_ranks

SMALL = (
    "--num-layers",
    "1",
    "--seq-length",
    "64",
    "--global-batch-size",
    "2",
    "--micro-batch-size",
    "1",
)


def two_steps(rank, world_size, data):
    pytest.importorskip("transformers", reason="measures Hugging Face's models")
    with steps_of(
        ["transformers"], Path("configs/models/llama_tiny.toml"), Path(data), SMALL
    ) as steps:
        losses = {name: [step() for _ in range(3)] for name, step in steps.items()}
        return losses, measured({name: clocked(step) for name, step in steps.items()}, 2)


@pytest.mark.slow
def test_both_learn_the_same_tokens(default_data):
    vocab_size = load_tokenizer(f"{default_data}.model").vocab_size
    ((losses, seconds),) = run_ranks(two_steps, 1, str(default_data))
    assert losses.keys() == seconds.keys() == {"longmesh", "transformers"}
    assert {len(times) for times in seconds.values()} == {2}
    for first, *_, last in losses.values():
        assert abs(first - math.log(vocab_size)) < 0.2
        assert last < first


def test_a_line_names_the_ratio_of_the_best():
    seconds = {"zigzag": [1.0, 2.0, 3.0], "striped": [4.0, 4.0, 4.0], "ring@other": [6.0, 6.0, 9.0]}
    row = peers.row(seconds, ("zigzag", "striped"), ["ring@other"])
    assert row["against_best"] == 3.0
    line = peers.line_of(row | {"length": 64})
    assert line.startswith("64: zigzag 2.000 s (1.500 to 2.500), ")
    assert line.endswith("Longmesh's best is 3.00 times as fast as the best other")


@pytest.mark.slow
def test_ring_attention_pytorch_computes_the_same_with_its_last_pass_mended():
    pytest.importorskip("ring_attention_pytorch", reason="make peers installs it")
    work = MaskedShape(seq_length=256)
    with Contestants(work, ("ring@ring-attention-pytorch",), [0, 1]) as contestants:
        check_same(
            "theirs",
            contestants.fingerprint("ring@ring-attention-pytorch"),
            contestants.fingerprint("one_process"),
            work.dtype,
        )
