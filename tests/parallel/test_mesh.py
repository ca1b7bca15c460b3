"""Processes and how they are arranged; their GPUs are in test_launches.py."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from parallel.data import DataParallelConfig, sharding_mesh
from parallel.mesh import SIZES, MeshConfig, MeshError, _check_distinct, distributed_mesh
from runtime.processes import join, launched_world_size
from runtime.ranks import run_ranks


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tensor_model_parallel_size": -1}, "tensor_model_parallel_size is -1"),
        ({"context_parallel_size": 0}, "context_parallel_size is 0"),
        ({"distributed_timeout_minutes": 1e-12}, "distributed_timeout_minutes is 1e-12"),
        (
            {"distributed_timeout_minutes": 1e300},
            "distributed_timeout_minutes is 1e.300; .* 10,080",
        ),
        ({"distributed_timeout_minutes": float("nan")}, "distributed_timeout_minutes is nan"),
        (
            {"device": "cpu", "distributed_backend": "nccl"},
            "distributed_backend is nccl, but device is cpu",
        ),
    ],
)
def test_a_wrong_setting_is_named(settings, words):
    with pytest.raises(ValueError, match=words):
        MeshConfig(**settings)


@pytest.mark.parametrize(
    ("gpu", "settings", "device", "backend"),
    [
        (True, {}, "cuda", "cpu:gloo,cuda:nccl"),
        (True, {"distributed_backend": "gloo"}, "cuda", "cpu:gloo,cuda:gloo"),
        (True, {"device": "cpu"}, "cpu", "gloo"),
        (True, {"device": "cuda"}, "cuda", "cpu:gloo,cuda:nccl"),
        (False, {}, "cpu", "gloo"),
    ],
)
def test_auto_takes_what_is_there(gpu, settings, device, backend, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    config = MeshConfig(**settings)
    assert (config.device_type, config.backend) == (device, backend)


def places(rank, world_size, names, sizes, balance_over="cp"):
    """The ranks of this one's groups of each of these dimensions, on a mesh of [pp, cp, tp]."""
    config = MeshConfig(
        device="cpu", balance_over=balance_over, **dict(zip(SIZES, sizes, strict=True))
    )
    with distributed_mesh(config) as mesh:
        assert mesh.device == torch.device("cpu")
        coordinates = [
            dist.get_process_group_ranks(getattr(mesh, name).get_group()) for name in names.split()
        ]
    assert dist.is_initialized(), "processes that had joined before stay so"
    return coordinates


EVERYONE = [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("names", "sizes", "groups"),
    [
        (
            "dp cp dp_cp",
            (1, 2, 1),
            [[[0, 2], [0, 1], EVERYONE], [[1, 3], [0, 1], EVERYONE], [[0, 2], [2, 3], EVERYONE]],
        ),
        (
            "tp cp dp dp_cp",
            (1, 2, 2),
            [[[0, 1], [0, 2], [0], [0, 2]], [[0, 1], [1, 3], [1], [1, 3]]],
        ),
        ("tp cp dp dp_cp", (1, 1, 2), [[[0, 1], [0], [0, 2], [0, 2]]]),
    ],
)
def test_tensor_parallel_ranks_are_nearest_and_context_parallel_ones_next(names, sizes, groups):
    assert run_ranks(places, 4, names, sizes)[: len(groups)] == groups


def test_joined_data_parallel_ranks_are_context_parallel_ones():
    first, *_, last = run_ranks(places, 8, "pp dp cp dp_cp", (2, 2, 1), "dp_cp")
    assert first == [[0, 4], [0], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert last == [[3, 7], [7], [4, 5, 6, 7], [4, 5, 6, 7]]


def alone(rank, world_size, fails):
    """A process that no launcher started; returns whether its group is still there at the end."""
    dist.destroy_process_group()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
                patch.delenv(name)
            assert launched_world_size() == 1
            with distributed_mesh(MeshConfig(device="cpu")) as mesh:
                total = torch.ones(1)
                dist.all_reduce(total, group=mesh.dp_cp.get_group())
                assert (total.item(), mesh.dp_cp.size()) == (1, 1)
                if fails:
                    raise KeyError
    except KeyError:
        pass
    remains = dist.is_initialized()
    if not remains:
        join(store=dist.HashStore())  # for run_ranks to leave
    return remains


def test_a_process_started_alone_needs_no_launcher_and_leaves_its_group_after_an_error_too():
    """Its threads would otherwise be cut off at exit, and now and then abort the process."""
    assert [run_ranks(alone, 1, fails) for fails in (False, True)] == [[False], [False]]


def timeouts(rank, world_size):
    """The timeouts of the mesh's groups, and of those of two copies of the optimizer's shards."""
    copies = DataParallelConfig(num_distributed_optimizer_instances=2)
    with distributed_mesh(
        MeshConfig(device="cpu", context_parallel_size=2, distributed_timeout_minutes=0.2)
    ) as mesh:
        groups = [part.get_group() for part in (mesh.dp, mesh.cp, mesh.tp, mesh.dp_cp)]
        groups += sharding_mesh(mesh.dp_cp, copies).get_all_groups()
        return [
            group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
            for group in groups
        ]


def test_every_group_waits_no_longer_than_the_run_allows():
    assert run_ranks(timeouts, 4) == [[12.0] * 6] * 4


def with_gpu(rank, world_size, uuids):
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(uuid=uuids[rank])
    try:
        _check_distinct(torch.device("cuda", 0))
    except MeshError as error:
        return str(error)
    return ""


def test_two_processes_on_one_gpu_are_named():
    assert run_ranks(with_gpu, 3, [7, 8, 9]) == [""] * 3
    assert all(
        "ranks 0 and 2 use the same GPU of " in line for line in run_ranks(with_gpu, 3, [7, 8, 7])
    )
