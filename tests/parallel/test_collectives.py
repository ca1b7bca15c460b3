"""Tensors compared between ranks."""

import pytest
import torch
import torch.distributed as dist

from parallel.collectives import checksum, find_difference
from runtime.ranks import run_ranks

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checksum_sees_values_order_shape_and_dtype(dtype):
    x = torch.tensor([[0, 1, 0], [1, 1, 0]]).to(dtype)
    other = x.clone()
    other[0, 0] = 1
    changed = [other, x.flip(0), x.reshape(3, 2), x.to(torch.int16), x[:, :2]]
    assert checksum(x) == checksum(x.clone())
    assert not any(checksum(x) == checksum(y) for y in changed)


def test_a_checksum_of_a_view_a_scalar_no_elements_and_nan():
    x = torch.randn(6, 4, dtype=torch.complex64)
    assert checksum(x.T) == checksum(x.T.contiguous())
    assert checksum(torch.tensor(1.5)) != checksum(torch.tensor(2.5))
    assert checksum(torch.zeros(0)) != checksum(torch.zeros(0, 2))
    nan = torch.tensor([torch.nan])
    assert checksum(nan) == checksum(nan.clone())


def differences(rank, world_size):
    """Differences that ranks 1 and 2, a group without rank 0, find."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    same = {"x": torch.ones(3), "y": torch.full((2,), torch.nan)}
    only_last = {"z": torch.ones(1)} if rank == 2 else {}
    return [
        find_difference(same, group),
        find_difference({**same, "x": torch.full((3,), float(rank))}, group),
        find_difference({**same, **only_last}, group),
        find_difference({"x": torch.ones(rank)}, None),
    ]


def test_ranks_name_what_differs():
    _, first, second = run_ranks(differences, 3)
    assert first == second
    assert first == [None, (["x"], [1]), (["z"], [1]), None]
