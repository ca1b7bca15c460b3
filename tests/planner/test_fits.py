"""Flags that make a run fit: in the order of docs/tasks/long_context.md, and none that is not needed."""

from dataclasses import replace

import pytest

from planner.cluster import CLUSTERS, load_cluster
from planner.fits import changes
from planner.levers import leanest
from planner.search import bytes_needed, rank
from tests.planner.test_search import A100, config
from train.config.entries import Config
from train.config.language import load_config


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


LARGER, AGAIN = "--context-parallel-size 16 --global-batch-size 2", "--recompute-granularity attention_boundary"


@pytest.mark.parametrize(
    ("size", "memory_gb", "flags"),
    [
        (8, 80, [LARGER, AGAIN]),  # not recomputation and offload on 8 ranks, which fit too
        (16, 80, [AGAIN]),
        (16, 50, ["--recompute-granularity full"]),
        (16, 30, [AGAIN, "--recompute-offload"]),
    ],
)
def test_levers_are_pulled_in_the_order_of_the_page(size: int, memory_gb: float, flags: list[str]) -> None:
    """LLaMA 2 13B on 524,288 tokens and 16 A100."""
    one, cluster = load_config("configs/llama2_13b.toml"), load_cluster(CLUSTERS / "a100_pod.toml")
    one = replace(one, train=replace(one.train, seq_length=1 << 19, bf16=True))
    one = replace(one, mesh=replace(one.mesh, context_parallel_size=size))
    found, seconds = changes(one, 16, replace(cluster, memory_gb=memory_gb), None)
    assert [change.flag for change in found] == flags
    assert seconds
    counts = [bytes_needed(one, 16, cluster, None), *(change.bytes for change in found)]
    assert counts[-1] <= 1e9 * memory_gb
    assert min(counts[:-1]) > 0.9e9 * memory_gb
