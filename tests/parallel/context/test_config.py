"""Flags of context parallelism.

What cannot work is refused before any process joins, naming flag and fix.
"""

import pytest

from parallel.context import ContextConfig, ContextError
from parallel.context.config import HybridConfig


def check(size, launched=None, **fields):
    named = {
        name if name.startswith("ulysses_") else f"context_parallel_{name}": fields[name]
        for name in fields
    }
    ContextConfig(**named).check(
        seq_len=64, size=size, heads=8, kv_heads=2, ranks_per_node=launched
    )


@pytest.mark.parametrize(
    ("size", "fields", "message"),
    [
        (2, {"team_size": 2}, "striped has no teams, but context_parallel_team_size is 2"),
        (8, {"ulysses_degree": 0}, "ulysses_degree is 0; it must be 1 or more"),
        (
            6,
            {"ulysses_degree": 3},
            "ulysses_degree is 3 with 8 query and 2 key heads.*fit 6 ranks: 1, 2$",
        ),
        (
            3,
            {"method": "ulysses"},
            "ulysses_degree is 3 with 8 query and 2 key heads.*fit 3 ranks: 1$",
        ),
        (
            8,
            {"ulysses_head_chunks": 2},
            "ulysses_head_chunks is 2, but no ranks exchange heads; leave out",
        ),
        (
            8,
            {"ulysses_degree": 2, "ulysses_head_chunks": 0},
            "ulysses_head_chunks is 0; it must be 1 or more",
        ),
        (
            8,
            {"ulysses_degree": 2, "ulysses_head_chunks": 3},
            "is 3, .* the 4 query heads .* 2 ranks .*one of 1, 2, 4$",
        ),
        (
            1,
            {"method": "auto", "ulysses_head_chunks": 2},
            "is auto, .* it chooses by itself.*leave these options out",
        ),
        (8, {"method": "double_ring", "ranks_per_node": 0}, "context_parallel_ranks_per_node is 0"),
        (1, {"method": "none", "ulysses_degree": 2}, "method is none.*leave these options out"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(size, fields, message):
    with pytest.raises(ContextError, match=message):
        check(size, **fields)


def test_what_works_passes():
    check(1, method="none")
    check(
        8,
        method="wallfacer",
        team_size=2,
        placement="p2p_intra",
        layout="striped",
        ulysses_degree=2,
    )
    check(8, method="ulysses")


@pytest.mark.parametrize("method", ["striped", "zigzag"])
def test_layouts_for_causal_masks_run_under_full_attention_only_where_forced(method):
    def check_full(method, **fields):
        full = {
            "seq_len": 64,
            "size": 8,
            "heads": 8,
            "kv_heads": 8,
            "ranks_per_node": None,
            "causal": False,
        }
        ContextConfig(context_parallel_method=method, **fields).check(**full)

    for degree in (1, 2):
        with pytest.raises(
            ContextError, match=f"is {method}, .* causal mask, .*use ring.*_layout {method}$"
        ):
            check_full(method, ulysses_degree=degree)
        check_full(method, ulysses_degree=degree, context_parallel_layout=method)
    for other in ("ring", "wallfacer", "double_ring", "allgather", "ulysses", "none", "auto"):
        check_full(other)
    check_full("wallfacer", context_parallel_layout=method)
    for linear in ("lasp", "lasp2"):
        with pytest.raises(ContextError, match="does not support a full mask"):
            check_full(linear)
    with pytest.raises(ContextError, match="delta_rule_schedule is tree"):
        check_full("ring", delta_rule_schedule="tree")


def test_nodes_are_as_launched_unless_said_otherwise():
    with pytest.raises(ContextError, match="nodes of 3"):
        check(8, launched=3, method="double_ring")
    assert ContextConfig(context_parallel_ranks_per_node=4).plan_arguments(3)["ranks_per_node"] == 4
    assert ContextConfig().plan_arguments(3)["ranks_per_node"] == 3


def test_zigzag_under_an_exchange_of_heads_is_refused():
    ulysses, shared = (
        HybridConfig(hybrid_softmax_method="ulysses"),
        {"seq_len": 16, "size": 2, "heads": 4, "kv_heads": 4},
    )
    assert ulysses.layouts("auto") == ("contiguous",)
    assert HybridConfig().layouts("zigzag") == ("zigzag",)
    with pytest.raises(ContextError, match="hybrid_softmax_layout is zigzag"):
        HybridConfig(hybrid_softmax_method="ulysses", hybrid_softmax_layout="zigzag").check(
            "auto", **shared
        )
    for beside in (ulysses, HybridConfig(hybrid_softmax_layout="contiguous")):
        with pytest.raises(
            ContextError, match=r"context_parallel_layout is zigzag .* hybrid_softmax_layout is"
        ):
            beside.check("zigzag", **shared)
