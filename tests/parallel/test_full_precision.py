"""Under bfloat16 modules that ask for it compute in float32, and their gradients are summed as all others are."""

from functools import cache, partial
from typing import get_args

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from model.config import ModelConfig
from model.linear.attention import LRPE
from parallel.data import Strategy, finish_gradients, set_gradient_sync
from runtime.ranks import run_ranks
from tests.parallel.unequal import difference, loss_sum, sharded
from tests.parallel.whole import gradients_of

CONFIG = ModelConfig(model_type="transnormer", num_layers=2, hidden_size=24, num_attention_heads=2, vocab_size=37)
ANGLES = "layers.0.attention.lrpe.theta"


def gradients(rank, world_size, strategy, granularity="none", data_rank=None):
    """Gradients of a TransNormer in bfloat16 over two micro-batches; its angles are seen in float32."""
    seen = []
    forward = LRPE.forward
    LRPE.forward = lambda self, *inputs: seen.append(self.theta.dtype) or forward(self, *inputs)
    model = sharded(world_size, True, strategy, config=CONFIG, granularity=granularity)
    for micro in range(2):
        set_gradient_sync(model, micro == 1, strategy)
        loss_sum(model, rank if data_rank is None else data_rank, micro).backward()
    finish_gradients(model, init_device_mesh("cpu", (world_size,)), strategy)
    assert set(seen) == {torch.float32}
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}
    return gradients_of(model)


@cache
def sum_of_two():
    """The same of either rank's tokens by one process each, added up."""
    one, two = (run_ranks(partial(gradients, data_rank=rank), 1, "zero3")[0] for rank in range(2))
    assert one[ANGLES].norm() > 0
    return {name: one[name] + two[name] for name in one}


@pytest.mark.parametrize("granularity", ["none", "full"])
@pytest.mark.parametrize("strategy", get_args(Strategy))
def test_angles_stay_in_float32_and_gradients_are_summed(strategy, granularity):
    for got in run_ranks(gradients, 2, strategy, granularity):
        assert difference(got, sum_of_two()) <= 1e-5
