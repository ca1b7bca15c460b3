"""Averages of sharded weights equal those of whole ones, and take their place for a while."""

import pytest
import torch
from torch import nn

from parallel.data import DataParallelConfig, shard_model, sharding_mesh
from parallel.mesh import MeshConfig, distributed_mesh
from runtime.ranks import run_ranks
from tests.parallel.tiny import full, weights_of
from train.ema import Ema, EmaConfig

DECAY = 0.75
INPUT = torch.linspace(-1, 1, 10).view(2, 5)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x) + 0


def built():
    torch.manual_seed(0)
    return Net()


def step(model, optimizer):
    model(INPUT).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def averaged(rank, world_size, strategy):
    """Two steps, outputs before, with and after the averages, and a third step.

    Return both weights and averages.
    """
    config = DataParallelConfig(data_parallel_sharding_strategy=strategy)
    with distributed_mesh(MeshConfig(device="cpu")) as mesh:
        model = built()
        shard_model(
            model, model.layers, sharding_mesh(mesh.dp_cp, config), bf16=False, strategy=strategy
        )
        ema, optimizer = Ema(DECAY, [model]), torch.optim.SGD(model.parameters(), lr=1e-2)
        outputs = []
        for _ in range(2):
            step(model, optimizer)
            ema.update()
        with torch.no_grad():
            outputs.append(full(model(INPUT)))
            with ema.in_place():
                outputs.append(full(model(INPUT)))
            outputs.append(full(model(INPUT)))
        step(model, optimizer)
        weights = weights_of(model)
        return {
            "outputs": outputs,
            "ema": {n: full(a) for n, a in ema.weights.items()},
            "weights": weights,
        }


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_averages_of_shards_equal_those_of_whole_weights(strategy):
    model, optimizer = built(), None
    # Each of two ranks computes the same loss, and gradients are summed.
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-2)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(2):
        step(model, optimizer)
        average = {
            n: DECAY * average[n] + (1 - DECAY) * p.detach() for n, p in model.named_parameters()
        }
    usual = model(INPUT).detach()
    with_averages = torch.func.functional_call(model, average, INPUT)
    step(model, optimizer)
    for result in run_ranks(averaged, 2, strategy):
        before, within, after = result["outputs"]
        assert torch.equal(before, after)
        torch.testing.assert_close(before, usual)
        torch.testing.assert_close(within, with_averages)
        assert (within - before).abs().max() > 1e-4
        assert all(
            torch.allclose(result["ema"][name], average[name], atol=1e-6) for name in average
        )
        assert all(
            torch.allclose(result["weights"][name], p, atol=1e-6)
            for name, p in model.named_parameters()
        )


def test_parts_that_hold_the_same_parameter_share_its_average():
    first, second = built(), built()
    ema = Ema(0.5, [first, second])
    with torch.no_grad():
        for parameter in (*first.parameters(), *second.parameters()):
            parameter += 1
    ema.update()
    weight = first.head.weight.detach().clone()
    with ema.in_place():
        assert torch.equal(first.head.weight, second.head.weight)
        torch.testing.assert_close(first.head.weight, weight - 0.5)
    assert torch.equal(first.head.weight, weight)
    assert torch.equal(second.head.weight, weight)
    ema.restart()
    assert torch.equal(ema.weights["head.weight"], weight)


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_a_decay_that_averages_nothing_is_refused(decay):
    with pytest.raises(ValueError, match="ema_decay is"):
        EmaConfig(ema_decay=decay)
