"""A step of a hybrid, linear and softmax layers, over ranks of any dimension is that of one process; the layouts' cost.

Layers of linear attention go by lasp, lasp2 or ulysses, those of softmax attention by another method and layout.
"""

from dataclasses import replace
from functools import cache
from typing import Literal

import pytest
import torch

from model.attention import HybridAttention, linear, sdpa
from model.config import ModelConfig
from parallel.context import ContextError
from parallel.context.config import HybridConfig
from parallel.context.linear import relayout
from parallel.data import DataParallelConfig, Strategy
from parallel.mesh import MeshConfig, distributed_mesh
from parallel.pipeline.stages import PipelineConfig
from parallel.recompute import RecomputeConfig
from planner.cluster import CLUSTERS, load_cluster
from planner.workload import fastest, layout_costs
from runtime.ranks import run_ranks
from tests.parallel.pipeline import test_schedule as test_pipeline
from tests.parallel.split import PLAIN, Step, config, difference, mesh_config, plain, split_step, whole_step
from train.config.entries import Config, TrainConfig

LOSS, GRADIENT = 2e-6, 1e-7
SHAPE: ModelConfig = config(model_type="transnormer", num_query_groups=None, num_layers=3, softmax_every=2)
Case = tuple[str, str, str, int, int, Strategy, str]
"""Linear method, softmax method, its layout, tp, cp, data-parallel strategy, recompute policy; the rest is dp."""
CASES: dict[int, list[Case]] = {
    2: [
        ("lasp", "ring", "contiguous", 1, 2, "zero3", "none"),
        ("lasp", "ring", "zigzag", 1, 2, "zero3", "attention_boundary"),
        ("lasp2", "allgather", "contiguous", 1, 2, "ddp", "none"),
        ("lasp2", "allgather", "zigzag", 1, 2, "zero1", "full"),
        ("ulysses", "ulysses", "contiguous", 1, 2, "zero2", "none"),
        ("lasp", "ring", "auto", 2, 1, "zero3", "selective"),
        ("lasp", "ring", "auto", 1, 1, "zero3", "none"),
    ],
    4: [
        ("lasp", "ring", "zigzag", 1, 4, "zero3", "none"),
        ("lasp2", "allgather", "zigzag", 1, 4, "ddp", "selective"),
        ("ulysses", "ulysses", "auto", 1, 4, "zero3", "none"),
        ("lasp", "ring", "contiguous", 1, 4, "zero2", "none"),
        ("lasp", "ring", "zigzag", 1, 2, "zero3", "none"),
        ("ulysses", "allgather", "zigzag", 1, 2, "zero1", "none"),
        ("lasp2", "ring", "zigzag", 2, 2, "zero3", "full"),
        ("lasp", "ulysses", "contiguous", 2, 2, "ddp", "attention_boundary"),
        ("lasp", "ring", "auto", 4, 1, "zero3", "none"),
    ],
}


@cache
def one_process(shape: ModelConfig = SHAPE) -> Step:
    return whole_step(shape, plain(shape, HybridAttention(linear, sdpa)))


def steps(rank: int, world_size: int, cases: list[Case]) -> list[Step]:
    found = []
    for method, softmax, layout, tp, cp, strategy, policy in cases:
        recompute = PLAIN if policy == "none" else RecomputeConfig(recompute_granularity=policy)  # type: ignore[arg-type]
        hybrid = HybridConfig(hybrid_softmax_method=softmax, hybrid_softmax_layout=layout)  # type: ignore[arg-type]
        with distributed_mesh(mesh_config(tp, cp)) as mesh:
            sharding = DataParallelConfig(data_parallel_sharding_strategy=strategy)
            found.append(split_step(mesh, SHAPE, recompute, sharding, method=method, hybrid=hybrid)[1])
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_step_over_ranks_is_that_of_one_process(ranks: int) -> None:
    want = one_process()
    assert "layers.1.attention.wu.weight" not in want.gradients
    assert want.gradients["layers.1.attention.wk.weight"].abs().max() > 100 * GRADIENT
    for result in run_ranks(steps, ranks, CASES[ranks]):
        for case, got in zip(CASES[ranks], result, strict=True):
            assert abs(got.loss - want.loss) < LOSS, case
            assert difference(got, want) < GRADIENT, case
            assert got.weights.keys() == want.weights.keys()
            assert all(torch.equal(got.weights[name], want.weights[name]) for name in want.weights), case


def without_the_way_back(rank: int, world_size: int, cases: list[Case]) -> list[Step]:
    relayout.Relayout.outward = lambda self, x: x  # type: ignore[method-assign]
    return steps(rank, world_size, cases)


def test_outputs_left_in_the_other_layout_would_be_seen() -> None:
    case: Case = ("lasp", "ring", "zigzag", 1, 2, "ddp", "none")
    (got,) = run_ranks(without_the_way_back, 2, [case])[0]
    assert difference(got, one_process()) > 100 * GRADIENT


@pytest.mark.parametrize("inner", ["context", "tensor_model"])
def test_a_pipeline_of_context_or_tensor_parallel_ranks(inner: str) -> None:
    shape = replace(SHAPE, num_layers=4)
    sizes = {"pipeline_model_parallel_size": 2, f"{inner}_parallel_size": 2}
    results = run_ranks(test_pipeline.step, 4, shape, PipelineConfig(), "zero2", sizes)
    assert test_pipeline.compare(results, shape) < GRADIENT


def run(length: int, size: int, method: Literal["ring", "allgather"] = "ring") -> Config:
    return Config(
        model=ModelConfig(model_type="transnormer", hidden_size=2048, num_attention_heads=16, softmax_every=2),
        mesh=MeshConfig(context_parallel_size=size),
        train=TrainConfig(seq_length=length, micro_batch_size=1, bf16=True),
        hybrid=HybridConfig(hybrid_softmax_method=method),
    )


@pytest.mark.parametrize("method", ["ring", "allgather"])
@pytest.mark.parametrize("size", [2, 8])
def test_layouts_are_weighed_by_pairs_and_bytes(method: Literal["ring", "allgather"], size: int) -> None:
    """Contiguous gives the last rank (2 P - 1) / P of the mean; an exchange sends at most all tokens."""
    length = 1024 * size
    cluster = load_cluster(CLUSTERS / "h100_pod.toml")
    plain_, zigzag = layout_costs(run(length, size, method), cluster)
    mean = length * (length + 1) / 2 / size
    assert plain_.pairs / mean == pytest.approx((2 * size - 1) / size, rel=1e-3)
    assert zigzag.pairs == mean
    moved = length // size // (2 if size == 2 else 1)  # of two ranks each keeps half
    assert (plain_.exchanged, zigzag.exchanged) == (0, 2 * (2 * 16 + 2 * 16) * 128 * 2 * moved)


def test_auto_takes_the_faster_layout() -> None:
    """What the balance saves grows with the square of the length, the exchange with the length."""
    chosen = {}
    for length in (1024, 1 << 20):
        for fast in ("h100_pod", "cpu"):
            cluster = load_cluster(CLUSTERS / f"{fast}.toml")
            costs = layout_costs(run(length, 4), cluster)
            chosen[length, fast] = fastest(costs).layout
            assert chosen[length, fast] == min(costs, key=lambda cost: cost.seconds).layout
    assert chosen[1024, "h100_pod"] == "contiguous"
    assert {chosen[1 << 20, fast] for fast in ("h100_pod", "cpu")} == {"zigzag"}


def test_zigzag_under_an_exchange_of_heads_is_refused() -> None:
    hybrid = HybridConfig(hybrid_softmax_method="ulysses", hybrid_softmax_layout="zigzag")
    with pytest.raises(ContextError, match=r"hybrid_softmax_layout is zigzag .* same work in any layout"):
        hybrid.check(seq_len=16, size=2, heads=4, kv_heads=4)
    assert HybridConfig(hybrid_softmax_method="ulysses").layouts == ("contiguous",)
