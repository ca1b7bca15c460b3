"""Sharded weights are the whole model's, and sharded gradients the sum over ranks."""

import math
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from kernels.loss import cross_entropy_sum
from model.base import initial_weight
from model.config import ModelConfig
from model.llama import Llama
from parallel.data import Strategy, fill, reduce_gradients, shard_model
from tests.ranks import run_ranks
from train.optim import gradient_norm

CONFIG = ModelConfig(num_layers=2, hidden_size=24, num_attention_heads=2, num_query_groups=1, vocab_size=37)
SEED, LENGTH = 7, 10
VALID = (LENGTH, 2, 5)
"""Tokens that carry loss on each rank."""


def whole_model() -> Llama:
    model = Llama(CONFIG)
    model.init_weights(SEED)
    return model


def sharded(world_size: int, bf16: bool = False, strategy: Strategy = "zero3") -> Llama:
    mesh = init_device_mesh("cpu", (world_size,))
    with torch.device("meta"):
        model = Llama(CONFIG)
    shard_model(model, model.layers, mesh, bf16=bf16, strategy=strategy)
    fill(model, torch.device("cpu"), lambda name, shape: initial_weight(CONFIG, name, shape, SEED))
    return model


def full(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def weights(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    model = sharded(world_size)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return {name: full(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_weights_are_the_whole_models_on_any_number_of_ranks(size: int) -> None:
    want = dict(whole_model().named_parameters())
    for got in run_ranks(weights, size):
        assert got.keys() == want.keys()
        for name in want:
            assert torch.equal(got[name], want[name]), name


def drawn_by_shards(rank: int, world_size: int) -> torch.Tensor:
    """What `fill` is there to avoid: the library's own way after to_empty."""
    model = sharded(world_size)
    torch.manual_seed(SEED)
    weight = model.layers[0].mlp.down.weight
    with torch.no_grad():
        weight.to_local().normal_()
    return full(weight)


def test_drawn_by_shards_the_weights_would_repeat_and_depend_on_the_ranks() -> None:
    one, two = run_ranks(drawn_by_shards, 1)[0], run_ranks(drawn_by_shards, 2)[0]
    assert not torch.equal(one, two)
    assert torch.equal(*two.chunk(2))
    assert not torch.equal(*dict(whole_model().named_parameters())["layers.0.mlp.down.weight"].chunk(2))


def batch(rank: int, micro: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels [1, S] of a rank, some without loss."""
    generator = torch.Generator().manual_seed(100 * micro + rank)
    tokens = torch.randint(CONFIG.vocabulary, (1, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[:, VALID[rank] :] = -100
    return tokens[:, :-1], labels


def loss_sum(model: Llama, rank: int, micro: int = 0) -> torch.Tensor:
    tokens, labels = batch(rank, micro)
    return cross_entropy_sum(model(tokens), labels)[0]


def gradients_of(model: Llama) -> dict[str, torch.Tensor]:
    return {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def gradients(rank: int, world_size: int, bf16: bool = False) -> dict[str, torch.Tensor]:
    model = sharded(world_size, bf16)
    (loss_sum(model, rank) / sum(VALID[:world_size])).backward()
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}
    return gradients_of(model)


def reference(world_size: int, weigh: Any) -> dict[str, torch.Tensor]:
    """One process' gradient of the ranks' loss sums, each weighed."""
    model = whole_model()
    sum(loss_sum(model, rank) * weigh(rank) for rank in range(world_size)).backward()  # type: ignore[union-attr]
    return gradients_of(model)


def gradient_norm_of(gradients: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients.values()))


def difference(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """Largest over the parameters, relative to the parameter's gradient."""
    assert got.keys() == want.keys()
    return max(((got[name] - want[name]).norm() / want[name].norm()).item() for name in want)


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_are_summed_over_ranks_with_unequal_numbers_of_tokens(size: int) -> None:
    tokens = sum(VALID[:size])
    mean_over_tokens = reference(size, lambda rank: 1 / tokens)
    mean_of_means = reference(size, lambda rank: 1 / VALID[rank] / size)
    for got in run_ranks(gradients, size):
        assert difference(got, mean_over_tokens) < 1e-5
        assert difference(got, mean_of_means) > 1e-2


def averaged(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """As FSDP does unless it is told otherwise."""
    model = sharded(world_size)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(float(world_size))
    (loss_sum(model, rank) / sum(VALID[:world_size])).backward()
    return gradients_of(model)


def test_an_average_over_ranks_would_be_seen() -> None:
    want = reference(2, lambda rank: 1 / sum(VALID[:2]))
    assert difference(run_ranks(averaged, 2)[0], want) == pytest.approx(0.5, rel=1e-3)


def test_bf16_computes_coarsely_and_keeps_float32_masters() -> None:
    want = reference(2, lambda rank: 1 / sum(VALID[:2]))
    assert 1e-4 < difference(run_ranks(gradients, 2, True)[0], want) < 0.1


STRATEGIES = get_args(Strategy)


SHARES = {"ddp": (2, 2, 2, 2), "zero1": (2, 2, 1, 1), "zero2": (2, 0, 1, 1), "zero3": (1, 1, 1, 1)}
"""Copies on two ranks of the weights and their gradients between micro-batches, then of both at the end of a step.

Between micro-batches of zero2 the gathered weights have no gradient: it has moved to the shards already.
"""


def elements(model: Llama, what: str) -> int:
    """How many of the weights', or their gradients', elements lie on this rank."""
    tensors = [parameter if what == "weights" else parameter.grad for parameter in model.parameters()]
    return sum((t.to_local() if isinstance(t, DTensor) else t).numel() for t in tensors if t is not None)


def accumulated(rank: int, world_size: int, strategy: Strategy) -> tuple[dict[str, torch.Tensor], list[int], float]:
    """Gradients of two micro-batches, what this rank held after the first and at the end, and their norm."""
    model = sharded(world_size, strategy=strategy)
    reduce_gradients(model, False, strategy)
    (loss_sum(model, rank, 0) / 10).backward()
    held = [elements(model, "weights"), elements(model, "gradients")]
    reduce_gradients(model, True, strategy)
    (loss_sum(model, rank, 1) / 10).backward()
    held += [elements(model, "weights"), elements(model, "gradients")]
    return gradients_of(model), held, gradient_norm(model.parameters())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_micro_batches_accumulate_and_each_strategy_divides_what_it_says(strategy: Strategy) -> None:
    model = whole_model()
    sum(loss_sum(model, rank, micro) / 10 for rank in range(2) for micro in range(2)).backward()  # type: ignore[union-attr]
    norm = gradient_norm_of(gradients_of(model))
    size = elements(model, "weights")
    results = run_ranks(accumulated, 2, strategy)
    for got, _, found in results:
        assert difference(got, gradients_of(model)) < 1e-5
        assert found == pytest.approx(norm, rel=1e-6)
    totals = [sum(held[index] for _, held, _ in results) for index in range(4)]
    assert totals == [share * size for share in SHARES[strategy]]


def a_plain_model(rank: int, world_size: int) -> bool:
    model = whole_model()
    reduce_gradients(model, False)  # for a model that nothing shards there is nothing to hold back
    loss_sum(model, rank).backward()
    return dist.is_initialized() and all(p.grad is not None for p in model.parameters())


def test_a_plain_model_is_left_alone() -> None:
    assert a_plain_model(0, 1) is False  # no process group here
    assert run_ranks(a_plain_model, 1) == [True]
