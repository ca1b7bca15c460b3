"""What to change so that a run fits: the flags lead to what does."""

from dataclasses import replace

import pytest

from planner.fits import changes
from planner.search import bytes_needed, leanest, rank
from tests.planner.test_search import A100, config
from train.config.language import Config


def asked(size: int, method: str) -> Config:
    """Return a small model's run on long sequences, whose heads are wide."""
    one = config(size, heads=32, groups=32)
    context = replace(one.context, context_parallel_method=method)
    return replace(
        one,
        train=replace(one.train, seq_length=2**18),
        model=replace(one.model, kv_channels=128, num_layers=2),
        context=context,
    )


def test_the_last_change_fits_with_heads_in_stages() -> None:
    one = asked(2, "ulysses")
    least = min(found.prediction.bytes for found in rank([one], 2, A100, vary=leanest).candidates)
    short = replace(A100, memory_gb=0.999 * least / 1e9)
    found, seconds = changes(one, 2, short, None)
    assert seconds
    assert any("--ulysses-head-chunks" in change.flag for change in found)
    assert found[-1].bytes <= 1e9 * short.memory_gb


@pytest.mark.parametrize("method", ["none", "zigzag"])
def test_one_process_keeps_its_method(method: str) -> None:
    one = asked(1, method)
    whole = bytes_needed(one, 1, A100, None)
    assert whole == bytes_needed(asked(1, "striped"), 1, A100, None)
    short = replace(A100, memory_gb=0.7 * whole / 1e9)
    found, _ = changes(one, 1, short, None)
    assert found
    assert not any("method" in change.flag for change in found)
    assert found[-1].bytes <= 1e9 * short.memory_gb
