"""What a save by several ranks writes."""

import torch
from torch.distributed.tensor import DTensor

from checkpoint.shards import Shards
from checkpoint.tensors import tensors_of
from runtime.ranks import run_ranks
from runtime.together import gather_results
from tests.parallel.tiny import build, train


def _bytes(rank: int, size: int, sharded: bool) -> tuple[int, int]:
    model, optimizer = build(0, sharded=sharded)
    train(model, optimizer, range(1))
    state = tensors_of(model, optimizer)
    shards = Shards(None, None)
    needed = shards.agree(gather_results(lambda: shards.plan(state)))
    whole = [x for values in state.values() for x in values.values()]
    assert any(isinstance(x, DTensor) for x in whole) == sharded
    return needed, sum(x.numel() * x.element_size() for x in whole if isinstance(x, torch.Tensor))


def test_the_bytes_of_a_save_are_those_of_each_tensor_once() -> None:
    for sharded in (True, False):
        for needed, whole in run_ranks(_bytes, 2, sharded):
            assert needed == whole
