"""Ring Attention's tables.

Minimal blocks as printed, FLOPs by the registry's count, every longest context.
"""

import pytest

from model.registry import flops_per_token
from papers import ring
from tests.model.models import model_config


def test_minimal_blocks_are_as_printed_but_one():
    rows_by_device = {str(row.labels["device"]): row for row in ring.minimal_blocks()}
    assert len(rows_by_device) == 5
    wrong = [name for name, row in rows_by_device.items() if row.published != row.analytic]
    assert wrong == [
        "A100 InfiniBand"
    ]  # 312 TF / 12.5 GB/s is 24.96 thousand tokens, where 24.5 is printed
    assert rows_by_device[wrong[0]].analytic == {"block": 25.0, "sequence": 149.8}
    assert max(rows_by_device[wrong[0]].difference.values()) < 0.021


def test_a_ring_holds_the_papers_six_blocks():
    *others, ours_row = ring.activations()
    assert ours_row.published["bytes"] == 6 * 8192 * 4096
    assert ours_row.difference == {"bytes": 1.0}  # six blocks of two bytes an element
    assert all(row.analytic["bytes"] is None for row in others)


def test_flops_grow_as_printed_and_as_the_registry_counts():
    stated = [row for row in ring.flops() if row.published["ratio"]]
    assert [(row.published["ratio"], row.analytic["ratio"]) for row in stated] == [(162.6, 162.6)]
    model = model_config(
        model_type="gpt",
        num_layers=1,
        hidden_size=4096,
        num_attention_heads=32,
        vocab_size=8,
        max_position_embeddings=8,
    )
    ratio = flops_per_token(model, 1 << 20) / flops_per_token(model, 4096)
    assert ratio == pytest.approx(ring.flops_ratio(4096, 1 << 20, share=0.5), rel=1e-3)


def test_every_longest_context_is_within_a_factor_of_two():
    rows = list(ring.max_context())
    assert len(rows) == 13
    for column in ("ring_attention", "blockwise_attention_and_ffn"):
        assert [row.labels for row in rows if not -0.5 <= row.difference[column] <= 1] == []
    assert ring.longest("7B", "ring_attention", 8, 40.0) < ring.longest(
        "7B", "ring_attention", 8, 80.0
    )
    assert ring.longest("13B", "ring_attention", 8, 16.0) == 0  # not even its weights


def test_longer_contexts_of_trajectories_need_the_ring():
    rows = list(ring.reinforcement())
    *tasks, average = (row.published for row in rows if row.hardware == "not stated")
    assert len(tasks) == 6
    for column, mean in average.items():
        if mean != "oom":
            assert sum(row[column] for row in tasks) / 6 == pytest.approx(mean, abs=0.0051)
    seconds, memory, fits = (row.analytic for row in rows[7:10])
    assert (
        memory["AT + RA 128"]
        < memory["AT + BPT 32"]
        < memory["AT + ME 32"]
        < memory["AT + BPT 128"]
    )
    assert fits == {"AT + ME 32": 24, "AT + BPT 32": 24, "AT + BPT 128": 80, "AT + RA 128": 16}
    assert seconds["AT + ME 32"] == seconds["AT + BPT 32"] < seconds["AT + RA 128"]
