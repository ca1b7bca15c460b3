"""Launches of one and of two nodes with stubbed GPUs.

Each process has one of its own, or the run is refused.
"""

import os
import re
import socket
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend

from parallel import mesh
from parallel.mesh import MeshConfig, MeshError, distributed_mesh
from runtime.processes import join, launched_world_size

Environment = dict[str, str]


def by_torchrun(node, local, nodes, each):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    values = (node * each + local, nodes * each, local, each, nodes)
    return dict(zip(names, map(str, values), strict=True))


def by_srun(node, local, nodes, each):
    names = (
        "JOB_ID",
        "STEP_ID",
        "STEP_NUM_TASKS",
        "PROCID",
        "LOCALID",
        "NODEID",
        "STEP_TASKS_PER_NODE",
    )
    values = (7, 0, nodes * each, node * each + local, local, node, f"{each}(x{nodes})")
    variables = {f"SLURM_{name}": str(value) for name, value in zip(names, values, strict=True)}
    return variables | {"SLURM_STEP_NODELIST": f"node[0-{nodes - 1}]"}


def own(local):
    """One GPU a task, as srun --gpus-per-task 1 has it."""
    return {"CUDA_VISIBLE_DEVICES": str(local)}


LAUNCHERS = {
    "torchrun": by_torchrun,
    "torchrun, listed": lambda *place: (
        by_torchrun(*place) | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(place[3])))}
    ),
    "torchrun, one a process": lambda *place: by_torchrun(*place) | own(place[1]),
    "torchrun, NCCL told otherwise": lambda *place: (
        by_torchrun(*place) | {"TORCH_NCCL_HIGH_PRIORITY": "0"}
    ),
    "srun": by_srun,
    "srun, one a task": lambda *place: by_srun(*place) | own(place[1]),
}


def gpu_of(patch, environment, node, gpus, device="auto"):
    """Join as one process of a launch.

    Return its host and GPU, as ``_check_apart`` compares them, or None.
    """
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    visible = [int(x) for x in listed.split(",")] if listed else [*range(gpus)]
    devices, reported = list[torch.device](), list[tuple[str, str]]()

    @contextmanager
    def joined(backend, timeout):
        expected = ("cpu:gloo,cuda:nccl", 1) if gpus else ("gloo", 0)
        assert (backend, len(devices)) == expected, "NCCL is told of no other device later"
        assert not gpus or mesh.GPU_ENVIRONMENT.keys() <= os.environ.keys(), (
            "told before NCCL starts"
        )
        assert not gpus or os.environ["TORCH_NCCL_HIGH_PRIORITY"] == environment.get(
            "TORCH_NCCL_HIGH_PRIORITY", "1"
        )
        size = launched_world_size()
        join(
            dist.Backend.FAKE,
            store=dist.HashStore(),
            rank=int(os.environ.get("RANK", 0)),
            world_size=size,
        )
        try:
            yield
        finally:
            dist.destroy_process_group()

    for name in [
        name for name in os.environ if re.match("SLURM|RANK|WORLD|LOCAL|GROUP|CUDA|MASTER", name)
    ]:
        patch.delenv(name)
    patch.setattr(os, "environ", os.environ | environment)  # what the launch adds goes with it
    patch.setattr(
        torch.cuda,
        "is_available",
        lambda: mesh.GPU_ENVIRONMENT.keys() <= os.environ.keys() and bool(gpus),
    )
    patch.setattr(torch.cuda, "device_count", lambda: len(visible))
    patch.setattr(torch.cuda, "set_device", devices.append)
    patch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda argument: SimpleNamespace(uuid=visible[argument.index]),
    )
    patch.setattr(socket, "gethostname", lambda: f"node{node}")
    patch.setattr(mesh, "gather_results", lambda argument: reported.append(argument()) or reported)
    patch.setattr(mesh, "process_group", joined)
    with distributed_mesh(MeshConfig(device=device)) as arranged:
        assert devices == ([arranged.device] if gpus else [])
        assert arranged.device.type == ("cuda" if gpus else "cpu")
    return reported[0] if gpus else None


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_process_has_a_gpu_of_its_own(launcher, monkeypatch):
    for nodes, each in ((1, 2), (2, 1), (2, 4)):
        pairs = []
        for rank in range(nodes * each):
            node, local = divmod(rank, each)
            with monkeypatch.context() as patch:
                pairs.append(
                    gpu_of(patch, LAUNCHERS[launcher](node, local, nodes, each), node, each)
                )
        assert pairs == [(f"node{node}", str(gpu)) for node in range(nodes) for gpu in range(each)]


def test_a_process_that_nothing_launched_takes_the_first_gpu(monkeypatch):
    for environment, gpus in (({}, 1), ({}, 8), ({"CUDA_VISIBLE_DEVICES": "5"}, 8)):
        with monkeypatch.context() as patch:
            assert gpu_of(patch, environment, 0, gpus) == (
                "node0",
                environment.get("CUDA_VISIBLE_DEVICES", "0"),
            )


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_where_no_gpu_is_the_cpu_is_taken_and_cuda_refused(launcher, monkeypatch):
    for nodes, each in ((1, 1), (2, 2)):
        for rank in range(nodes * each):
            node, local = divmod(rank, each)
            with monkeypatch.context() as patch:
                environment = LAUNCHERS[launcher](node, local, nodes, each)
                with pytest.raises(
                    MeshError,
                    match="device is cuda, but torch finds no CUDA device; use --device cpu",
                ):
                    gpu_of(patch, environment, node, 0, "cuda")
                assert gpu_of(patch, environment, node, 0) is None


def test_a_gpu_that_is_not_there_is_refused_before_the_processes_join_with_the_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for cuda, reason in (
        (None, "built for CPUs: run `make venv TORCH="),
        ("13.0", "built for GPUs: run nvidia-smi"),
    ):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        with pytest.raises(MeshError, match=f"on {socket.gethostname()} is {reason}"):
            _ = MeshConfig(device="cuda").backend  # what --allow-resize joins by
    assert MeshConfig(device="cpu").backend == "gloo"


def test_gpus_that_auto_passes_over_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(mesh, "NVIDIA_GPUS", tmp_path / "gpus")
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    auto, cpu = MeshConfig(), MeshConfig(device="cpu")
    assert mesh.idle_gpus(auto) == ""
    (tmp_path / "gpus" / "0000:1b:00.0").mkdir(parents=True)
    assert "WARNING: device auto selects the CPU, but " in mesh.idle_gpus(auto)
    assert mesh.idle_gpus(cpu) == "", "asked for"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert mesh.idle_gpus(auto) == "", "hidden on purpose"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(mesh, "NVIDIA_GPUS", tmp_path / "none")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    assert "has GPUs" in mesh.idle_gpus(auto)


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_a_process_more_than_gpus_is_refused(launcher, monkeypatch):
    """Before it joins; also where it sees a single GPU, that no launcher gave it."""
    for gpus in (1, 2):
        with (
            monkeypatch.context() as patch,
            pytest.raises(
                MeshError,
                match=f"process 3 on its machine finds only {gpus} GPUs; start at most {gpus}",
            ),
        ):
            gpu_of(patch, LAUNCHERS[launcher](0, 2, 1, 4), 0, gpus)
        assert not dist.is_initialized()


def test_all_tasks_on_one_gpu_are_not_apart(monkeypatch):
    """Negative control: where every task sees the same GPU alone, what is compared is the same."""
    pairs = set()
    for local in range(2):
        with monkeypatch.context() as patch:
            pairs.add(gpu_of(patch, by_srun(0, local, 1, 2) | own(0), 0, 2))
    assert len(pairs) == 1
