"""A step of the models with linear attention over ranks of any dimension is that of one process; what they send."""

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from model.attention import linear
from model.config import ModelConfig
from model.registry import build_model
from parallel.context import context_parallel
from parallel.context.transport import Transport
from parallel.data import DataParallelConfig, Strategy
from parallel.mesh import distributed_mesh
from parallel.recompute import RecomputeConfig
from parallel.tensor import split as tensor
from parallel.tensor import styles as tensor_styles
from runtime.ranks import run_ranks
from tests.parallel.split import (
    PLAIN,
    Step,
    config,
    difference,
    mesh_config,
    plain,
    split_step,
    train_and_save,
    whole_step,
)
from tests.parallel.tiny import equal

LOSS, GRADIENT = 2e-6, 1e-7
LINEAR = ("transnormer", "linear_transformer")
Case = tuple[str, str, int, int, Strategy, str]
"""Kind of model, method, tp, cp, data-parallel strategy, recompute policy; the rest of the ranks is data parallel."""
# Ranks to cases: every strategy with either way of passing states on, tp and Ulysses alone and with others.
CASES: dict[int, list[Case]] = {
    2: [
        ("transnormer", "lasp", 1, 2, "zero3", "attention_boundary"),
        ("linear_transformer", "lasp", 1, 2, "legacy_ddp", "full"),
        ("linear_transformer", "lasp2", 1, 2, "zero2", "selective"),
        ("transnormer", "ulysses", 1, 2, "zero3", "attention_boundary"),
        ("transnormer", "lasp", 2, 1, "zero3", "attention_boundary"),
        ("linear_transformer", "lasp", 2, 1, "ddp", "full"),
        ("linear_transformer", "lasp", 2, 1, "zero1", "none"),
    ],
    4: [
        ("transnormer", "lasp", 1, 4, "ddp", "none"),
        ("linear_transformer", "lasp2", 1, 4, "zero3", "none"),
        ("transnormer", "lasp2", 1, 4, "zero3", "full"),
        *(("transnormer", "lasp", 1, 2, strategy, "none") for strategy in ("ddp", "zero1", "zero3")),
        *(("linear_transformer", "lasp2", 1, 2, strategy, "none") for strategy in ("legacy_ddp", "zero2")),
        *((kind, "ulysses", 1, 4, "zero3", "none") for kind in LINEAR),
        *((kind, "lasp", 4, 1, "zero3", "none") for kind in LINEAR),
        *((kind, "lasp", 2, 2, "zero3", "full") for kind in LINEAR),
        *((kind, "lasp2", 2, 2, "zero1", "none") for kind in LINEAR),
        *((kind, "ulysses", 2, 2, "zero3", "none") for kind in LINEAR),
        *(("transnormer", "lasp", 2, 1, strategy, "none") for strategy in ("zero3", "zero2", "legacy_ddp", "ddp")),
        ("linear_transformer", "lasp", 2, 1, "zero1", "selective"),
    ],
}


def shape(kind: str) -> ModelConfig:
    return config(model_type=kind, num_query_groups=None)


@cache
def one_process(kind: str) -> Step:
    return whole_step(shape(kind), plain(shape(kind), linear))


def steps(rank: int, world_size: int, cases: list[Case]) -> list[tuple[Step, int]]:
    """The step of every case and how many states this rank sent in it to its neighbours."""
    found = []
    sent: list[int] = []
    post = Transport.isend_irecv

    def counted(self: Transport, sends: list[tuple[int, Any]], *rest: Any, **more: Any) -> Any:
        sent.extend(peer for peer, _ in sends)
        return post(self, sends, *rest, **more)

    Transport.isend_irecv = counted  # type: ignore[method-assign]
    for kind, method, tp, cp, strategy, policy in cases:
        sent.clear()
        recompute = PLAIN if policy == "none" else RecomputeConfig(recompute_granularity=policy)  # type: ignore[arg-type]
        with distributed_mesh(mesh_config(tp, cp)) as mesh:
            sharding = DataParallelConfig(data_parallel_sharding_strategy=strategy)
            found.append((split_step(mesh, shape(kind), recompute, sharding, method=method)[1], len(sent)))
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_step_over_ranks_is_that_of_one_process(ranks: int) -> None:
    for result in run_ranks(steps, ranks, CASES[ranks]):
        for case, (got, _) in zip(CASES[ranks], result, strict=True):
            want = one_process(case[0])
            assert abs(got.loss - want.loss) < LOSS, case
            assert difference(got, want) < GRADIENT, case
            assert got.weights.keys() == want.weights.keys()
            assert all(torch.equal(got.weights[name], want.weights[name]) for name in want.weights), case


def test_a_kept_state_is_not_passed_on_again() -> None:
    """Rank 0 of 2 sends one state per layer forward; a policy that computes the attention again sends it again."""
    cases: list[Case] = [
        ("transnormer", "lasp", 1, 2, "ddp", policy) for policy in ("none", "attention_boundary", "full", "selective")
    ]
    first, last = run_ranks(steps, 2, cases)
    assert [count for _, count in first] == [2, 2, 4, 4]
    assert [count for _, count in last] == [2, 2, 2, 2]


def undecayed(rank: int, world_size: int, cases: list[Case]) -> list[tuple[Step, int]]:
    from parallel.context.linear import state

    state.passed_on = lambda carried, *_: carried
    return steps(rank, world_size, cases)


def test_a_state_that_does_not_decay_on_its_way_would_be_seen() -> None:
    case: Case = ("transnormer", "lasp", 1, 4, "ddp", "none")
    ((got, _),) = run_ranks(undecayed, 4, [case])[0]
    assert difference(got, one_process("transnormer")) > 100 * GRADIENT


def with_parts_of_the_norm(rank: int, world_size: int, cases: list[Case]) -> list[tuple[Step, int]]:
    """What reaches the sum of squares is each rank's part, taken for the whole."""
    tensor_styles._Sum.backward = staticmethod(lambda ctx, *gradients: (gradients[0], None))  # type: ignore[method-assign]
    return steps(rank, world_size, cases)


def with_the_first_heads_decays(rank: int, world_size: int, cases: list[Case]) -> list[tuple[Step, int]]:
    def first(self: Any, module: Any, mesh: Any) -> Any:
        if hasattr(module, "log_decay"):
            module.log_decay = module.log_decay[: len(module.log_decay) // mesh.size()]
        return tensor_styles.AllTokens._apply(self, module, mesh)

    tensor_styles.OwnHeads._apply = first  # type: ignore[method-assign]
    return steps(rank, world_size, cases)


@pytest.mark.parametrize("wrong", [with_parts_of_the_norm, with_the_first_heads_decays])
def test_parts_of_a_norm_and_other_heads_decays_would_be_seen(wrong: Any) -> None:
    case: Case = ("transnormer", "lasp", 2, 1, "ddp", "none")
    ((got, _),) = run_ranks(wrong, 2, [case])[0]
    assert difference(got, one_process("transnormer")) > 100 * GRADIENT


@pytest.mark.parametrize("kind", LINEAR)
def test_a_checkpoint_goes_from_one_mesh_to_another_bit_for_bit(kind: str, tmp_path: Path) -> None:
    """From tp 2 x dp 2 over tp 1 x cp 2 to tp 4, moments and all: LRPE's angles are one vector of all heads."""
    folders = [tmp_path / name for name in "abc"]
    of_kind = partial(train_and_save, model_config=shape(kind), method="lasp")
    first = run_ranks(of_kind, 4, folders[0], 2, 1, None)[0]
    second = run_ranks(of_kind, 2, folders[1], 1, 2, folders[0] / "iter_0000001")[0]
    third = run_ranks(of_kind, 4, folders[2], 4, 1, folders[1] / "iter_0000001")
    assert equal(first, second)
    assert all(equal(first, result) for result in third)
    if kind == "transnormer":
        assert first["layers.0.attention.lrpe.theta/exp_avg"].all()


class Collectives(TorchDispatchMode):
    """Elements that this rank sends in collectives of ``size`` ranks: what a ring of them sends, its own part kept."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.matrices, self.numbers = size, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back as what it sends
        name = func.name()
        if "all_gather_into_tensor" in name:
            self.matrices += (self.size - 1) * args[0].numel()
        elif "reduce_scatter_tensor" in name:
            self.matrices += (self.size - 1) * args[0].numel() // self.size
        elif "allreduce_" in name:
            self.numbers += 2 * (self.size - 1) * args[0][0].numel() // self.size
        return func(*args, **(kwargs or {}))


def elements(rank: int, world_size: int, lengths: list[int]) -> dict[str, list[tuple[int, int]]]:
    """What a rank sends in a layer's forward and in its backward, by method and length; rank 1 has both neighbours."""
    found: dict[str, list[tuple[int, int]]] = {}
    wide = 4  # bytes
    for method in ("lasp", "ulysses", "megatron"):
        with distributed_mesh(mesh_config(world_size if method == "megatron" else 1)) as mesh:
            for length in lengths:
                group = None if method == "megatron" else dist.group.WORLD
                cp = context_parallel("lasp" if group is None else method, seq_len=length, group=group)
                layer = build_model(shape("transnormer"), cp.attend_linear).layers[1]  # the first doubles q and k
                if group is None:
                    model = torch.nn.Module()
                    model.layers = torch.nn.ModuleDict({"1": layer})
                    tensor.split_model(model, mesh.tp, head_dim=6, kv_heads=4)
                x = torch.ones(2, length // world_size, 24, requires_grad=True)
                counted, sent = [], Collectives(world_size)
                with sent:
                    entry = x if group is not None else DTensor.from_local(x, mesh.tp, [Shard(1)], run_check=False)
                    y = layer(entry, cp.positions)
                    counted.append((cp.transport.traffic.total // wide, sent.matrices, sent.numbers))
                    (y if group is not None else y.to_local()).sum().backward()
                    counted.append((cp.transport.traffic.total // wide, sent.matrices, sent.numbers))
                (a, b, c), (d, e, f) = counted
                assert c == f - c == (2 * 3 * 2 * length // 4 if method == "megatron" else 0), (
                    "the joint norm's squares"
                )
                found.setdefault(method, []).append((a + b, d + e - a - b))
    return found


def test_elements_sent_per_layer_and_direction_are_constant_for_lasp_alone() -> None:
    """LASP B d^2 / h; Ulysses (P - 1) / P of 4 B N d / P; Megatron-SP four times (P - 1) / P of B N d."""
    batch, width, heads, ranks, lengths = 2, 24, 4, 4, [16, 32, 64, 128]
    found = run_ranks(elements, ranks, lengths)[1]
    whole = [batch * length * width for length in lengths]
    assert found["lasp"] == [(batch * width**2 // heads,) * 2] * 4
    assert found["ulysses"] == [(4 * each * (ranks - 1) // ranks**2,) * 2 for each in whole]
    assert found["megatron"] == [(4 * each * (ranks - 1) // ranks,) * 2 for each in whole]
