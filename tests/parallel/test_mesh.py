"""Processes and how they are arranged."""

import pytest
import torch
import torch.distributed as dist

from parallel.mesh import MeshConfig, MeshError, _check_apart, _own_gpu, distributed_mesh
from runtime.processes import join, launched_world_size
from runtime.ranks import run_ranks


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tensor_model_parallel_size": -1}, "tensor_model_parallel_size is -1; it must be 1 or more"),
        ({"context_parallel_size": 0}, "context_parallel_size is 0; it must be 1 or more"),
        ({"distributed_timeout_minutes": 1e-12}, "distributed_timeout_minutes is 1e-12; it must be from 0.02"),
        (
            {"distributed_timeout_minutes": 1e300},
            "distributed_timeout_minutes is 1e.300; it must be from 0.02 .* 10,080",
        ),
        ({"distributed_timeout_minutes": float("nan")}, "distributed_timeout_minutes is nan; it must be from 0.02"),
        ({"device": "cpu", "distributed_backend": "nccl"}, "distributed_backend is nccl and device is cpu"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict, words: str) -> None:
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
def test_auto_takes_what_is_there(
    gpu: bool, settings: dict, device: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    config = MeshConfig(**settings)
    assert (config.device_type, config.backend) == (device, backend)


def test_cuda_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with (
        pytest.raises(MeshError, match="device is cuda and torch finds no CUDA device; use --device cpu"),
        distributed_mesh(MeshConfig(device="cuda")),
    ):
        pass


def test_more_processes_than_gpus_are_refused_before_they_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(MeshError, match="process 3 of a machine finds 2 GPUs there; start at most 2"):
        distributed_mesh(MeshConfig(device="cuda")).__enter__()
    assert not dist.is_initialized()


def places(rank: int, world_size: int, cp: int) -> tuple[list[int], list[int], list[int], int, int]:
    """The ranks of this one's groups, and its place in dp and cp."""
    with distributed_mesh(MeshConfig(context_parallel_size=cp, device="cpu")) as mesh:
        groups = [dist.get_process_group_ranks(part.get_group()) for part in (mesh.dp, mesh.cp, mesh.dp_cp)]
        assert mesh.device == torch.device("cpu")
    assert dist.is_initialized(), "processes that had joined before stay so"
    return (*groups, mesh.dp.get_local_rank(), mesh.cp.get_local_rank())


def test_context_parallel_ranks_are_neighbours() -> None:
    everyone = [0, 1, 2, 3]
    assert run_ranks(places, 4, 2) == [
        ([0, 2], [0, 1], everyone, 0, 0),
        ([1, 3], [0, 1], everyone, 0, 1),
        ([0, 2], [2, 3], everyone, 1, 0),
        ([1, 3], [2, 3], everyone, 1, 1),
    ]
    assert run_ranks(places, 3, 3) == [([rank], [0, 1, 2], [0, 1, 2], 0, rank) for rank in range(3)]
    assert run_ranks(places, 1, 1) == [([0], [0], [0], 0, 0)]


def alone(rank: int, world_size: int, fails: bool) -> bool:
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


def test_a_process_started_alone_needs_no_launcher() -> None:
    assert run_ranks(alone, 1, False) == [False]


def test_an_error_of_a_process_alone_leaves_its_group_too() -> None:
    """Its threads would otherwise be cut off at exit, and now and then abort the process."""
    assert run_ranks(alone, 1, True) == [False]


def timeouts(rank: int, world_size: int) -> list[float]:
    with distributed_mesh(MeshConfig(device="cpu", context_parallel_size=2, distributed_timeout_minutes=0.2)) as mesh:
        groups = [part.get_group() for part in (mesh.dp, mesh.cp, mesh.tp, mesh.dp_cp)]
        return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def test_every_group_waits_no_longer_than_the_run_allows() -> None:
    assert run_ranks(timeouts, 4) == [[12.0] * 4] * 4


def tensor_places(rank: int, world_size: int, tp: int, cp: int) -> list[list[int]]:
    """The ranks of this one's groups: tp, cp, dp, both."""
    config = MeshConfig(tensor_model_parallel_size=tp, context_parallel_size=cp, device="cpu")
    with distributed_mesh(config) as mesh:
        return [dist.get_process_group_ranks(part.get_group()) for part in (mesh.tp, mesh.cp, mesh.dp, mesh.dp_cp)]


def test_tensor_parallel_ranks_are_the_nearest_neighbours() -> None:
    assert run_ranks(tensor_places, 4, 2, 2) == [
        [[0, 1], [0, 2], [0], [0, 2]],
        [[0, 1], [1, 3], [1], [1, 3]],
        [[2, 3], [0, 2], [2], [0, 2]],
        [[2, 3], [1, 3], [3], [1, 3]],
    ]
    assert run_ranks(tensor_places, 4, 2, 1)[3] == [[2, 3], [3], [1, 3], [1, 3]]


def joined_places(rank: int, world_size: int) -> list[list[int]]:
    """The ranks of this one's groups of pp, dp, cp and both."""
    config = MeshConfig(device="cpu", pipeline_model_parallel_size=2, context_parallel_size=2, balance_over="dp_cp")
    with distributed_mesh(config) as mesh:
        return [dist.get_process_group_ranks(part.get_group()) for part in (mesh.pp, mesh.dp, mesh.cp, mesh.dp_cp)]


def test_joined_data_parallel_ranks_are_context_parallel_ones() -> None:
    first, *_, last = run_ranks(joined_places, 8)
    assert first == [[0, 4], [0], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert last == [[3, 7], [7], [4, 5, 6, 7], [4, 5, 6, 7]]


def seeing(monkeypatch: pytest.MonkeyPatch, gpus: int, local: int, visible: str | None) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_RANK", str(local))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


@pytest.mark.parametrize(
    ("gpus", "local", "visible", "index"),
    [(8, 3, None, 3), (8, 3, "0,1,2,3,4,5,6,7", 3), (1, 3, "0", 0), (1, 3, "3", 0), (1, 0, None, 0)],
)
def test_a_process_has_the_gpu_of_its_place_or_the_only_one_it_sees(
    gpus: int, local: int, visible: str | None, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeing(monkeypatch, gpus, local, visible)
    assert _own_gpu() == torch.device("cuda", index)


@pytest.mark.parametrize(("gpus", "local", "visible"), [(1, 1, None), (2, 2, "0,1")])
def test_more_processes_than_gpus_are_refused(
    gpus: int, local: int, visible: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeing(monkeypatch, gpus, local, visible)
    with pytest.raises(MeshError, match=f"process {local + 1} of a machine finds {gpus} GPUs there"):
        _own_gpu()


class Properties:
    def __init__(self, uuid: int) -> None:
        self.uuid = uuid


def with_gpu(rank: int, world_size: int, uuids: list[int]) -> str:
    torch.cuda.get_device_properties = lambda _: Properties(uuids[rank])
    try:
        _check_apart(torch.device("cuda", 0))
    except MeshError as error:
        return str(error)
    return ""


def test_two_processes_on_one_gpu_are_named() -> None:
    assert run_ranks(with_gpu, 3, [7, 8, 9]) == [""] * 3
    said = run_ranks(with_gpu, 3, [7, 8, 7])
    assert all("ranks 0 and 2 have the same GPU of " in line for line in said)
