"""Arrange processes in a mesh: pipeline (pp) x data (dp) x context (cp) x tensor (tp)."""

import math
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from runtime.errors import UserError, at_least, require
from runtime.processes import launched_world_size, process_group, set_timeout
from runtime.together import gather_results


class MeshError(UserError):
    """The processes cannot form the mesh that the configuration asks for."""


MIN_TIMEOUT = 0.02  # minutes
MAX_TIMEOUT = 10080  # minutes
SIZES = ("pipeline_model_parallel_size", "context_parallel_size", "tensor_model_parallel_size")


GPU_ENVIRONMENT = {
    # With the default of 8 connections, two streams may share one, so a transfer may wait for a
    # matmul.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # A transfer has few blocks; with high priority they run before the next blocks of a matmul.
    "TORCH_NCCL_HIGH_PRIORITY": "1",
    # With segments of fixed sizes, memory would fragment if sequence lengths change.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}
"""Environment variables for CUDA, NCCL and torch's allocator, set unless the user has set them."""
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
"""Folder in which NVIDIA's driver has an entry for each GPU, even if torch cannot use it."""


def check_cuda() -> None:
    """Raise MeshError, with the likely cause, if torch finds no GPU."""
    if torch.cuda.is_available():
        return
    built = f"torch {torch.__version__} on {socket.gethostname()}"
    if torch.version.cuda is None and torch.version.hip is None:
        reason = (
            f"{built} is built for CPUs: run `make venv TORCH=torch==2.13.0` to install PyTorch's "
            "build for GPUs"
        )
    else:
        reason = f"{built} is built for GPUs: run nvidia-smi and check CUDA_VISIBLE_DEVICES there"
    raise MeshError(
        f"device is cuda, but torch finds no CUDA device; use --device cpu or auto ({reason})"
    )


def idle_gpus(config: "MeshConfig") -> str:
    """Return a warning if ``device`` is "auto" and torch cannot use the machine's GPUs, else ""."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if config.device != "auto" or config.device_type == "cuda" or hidden:
        return ""
    allocated = os.environ.get("SLURM_GPUS_ON_NODE", "0") != "0"
    if not allocated and not any(NVIDIA_GPUS.glob("*")):
        return ""
    return (
        f"WARNING: device auto selects the CPU, but {socket.gethostname()} has GPUs that torch "
        f"{torch.__version__} does not find; use --device cuda to see why, or --device cpu to "
        "silence this warning"
    )


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh of processes: pipeline (pp) x data (dp) x context (cp) x tensor (tp).

    dp has no setting: it is the number of processes divided by the other three sizes.
    """

    tensor_model_parallel_size: int = 1
    """Number of processes that split each layer's matrices and the vocabulary among themselves;
    between the matrices, they split the tokens instead.
    """
    pipeline_model_parallel_size: int = 1
    """Number of processes among which the layers are divided."""
    context_parallel_size: int = 1
    """Number of processes that share each sequence."""
    balance_over: Literal["cp", "dp_cp"] = "cp"
    """Processes over which the tokens of packed documents are balanced. cp balances each
    micro-batch over its context-parallel processes; dp_cp also balances over the data-parallel
    processes, which then share one micro-batch (needs reset_attention_mask or pack_samples)."""
    allow_resize: bool = field(default=False, compare=False)
    """Allow another number of processes than full_world_size: the planner then chooses the sizes
    above and micro_batch_size; the global batch and the order of the samples do not change."""
    full_world_size: int | None = field(default=None, compare=False)
    """Number of processes for which the sizes above are meant, if allow_resize is set. By default
    it is read from the run's config.toml: the run's last start without allow_resize wrote it there
    or, if there was none, its first start."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device that every process computes on; auto takes cuda if it is available."""
    distributed_backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Collective library; auto takes nccl on cuda and gloo on cpu."""
    distributed_timeout_minutes: float = 10.0
    """Number of minutes that a collective may wait for its peers before the run fails."""

    def __post_init__(self) -> None:
        at_least(self, 1, *SIZES, "full_world_size")
        fits = MIN_TIMEOUT <= self.distributed_timeout_minutes <= MAX_TIMEOUT
        must = f"it must be from {MIN_TIMEOUT} (about a second) to {MAX_TIMEOUT:,} (a week)"
        require(self, fits, "distributed_timeout_minutes", must)
        if self.device == "cpu" and self.distributed_backend == "nccl":
            raise UserError(
                "distributed_backend is nccl, but device is cpu; set distributed_backend to gloo "
                "or auto"
            )

    @property
    def device_type(self) -> str:
        """Device type, ``cpu`` or ``cuda``, with ``auto`` resolved.

        Sets the variables of GPU_ENVIRONMENT first, because asking torch for a device starts CUDA,
        which reads them.
        """
        if self.device != "cpu":
            for name, value in GPU_ENVIRONMENT.items():
                old_name = "PYTORCH_CUDA_ALLOC_CONF"  # PYTORCH_ALLOC_CONF in older torch
                if name != "PYTORCH_ALLOC_CONF" or old_name not in os.environ:
                    os.environ.setdefault(name, value)
        if self.device != "auto":
            return self.device
        return "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Sizes of the dimensions pp, cp and tp."""
        return (
            self.pipeline_model_parallel_size,
            self.context_parallel_size,
            self.tensor_model_parallel_size,
        )

    def data_parallel_size(self, world_size: int) -> int:
        """Return the size of dp: ``world_size`` divided by the sizes of pp, cp and tp."""
        return world_size // math.prod(self.sizes)

    def joined(self, world_size: int) -> "MeshConfig":
        """Return these sizes, with dp merged into cp if ``balance_over`` is "dp_cp".

        Sizes that do not divide ``world_size`` are returned as they are.
        """
        dp, rest = divmod(world_size, math.prod(self.sizes))
        if self.balance_over == "cp" or rest:
            return self
        return replace(self, context_parallel_size=dp * self.context_parallel_size)

    @property
    def context_ranks_per_node(self) -> int | None:
        """Number of context-parallel ranks per node; None if LOCAL_WORLD_SIZE is not set."""
        local_world_size = os.environ.get("LOCAL_WORLD_SIZE")
        if local_world_size is None:
            return None
        return max(1, int(local_world_size) // self.tensor_model_parallel_size)

    @property
    def backend(self) -> str:
        """Process-group backend per device type; tensors on the CPU always use gloo.

        Raises MeshError if ``device`` is "cuda" but torch finds no GPU.
        """
        if self.device_type == "cpu":
            return "gloo"
        check_cuda()
        gpu_backend = self.distributed_backend
        if gpu_backend == "auto":
            gpu_backend = "nccl"
        return f"cpu:gloo,cuda:{gpu_backend}"


@dataclass(frozen=True)
class Mesh:
    """A run's device, and the dimensions of its device mesh.

    ``dp_cp`` flattens dp and cp: its ranks have different tokens but the same part of the model,
    so FSDP shards that part over them. Along tp and pp it is the other way round: ranks have
    different parts of the model but work on the same tokens.
    """

    device: torch.device
    pp: DeviceMesh
    dp: DeviceMesh
    cp: DeviceMesh
    tp: DeviceMesh
    dp_cp: DeviceMesh

    @cached_property
    def stage_group(self) -> dist.ProcessGroup:
        """Group of the ranks of this rank's pipeline stage: dp x cp x tp.

        The first use is collective, since it may create the group.
        """
        data_group: dist.ProcessGroup = self.dp_cp.get_group()
        if self.tp.size() == 1:
            return data_group
        if self.pp.size() == 1:
            return dist.distributed_c10d._get_default_group()
        root = self.tp._get_root_mesh()
        group: dist.ProcessGroup = root["dp", "cp", "tp"]._flatten("stage").get_group()
        if dist.get_backend(group) != dist.Backend.FAKE:
            backend: Any = data_group._get_backend(self.device)
            set_timeout(group, backend.options._timeout)
        return group


@contextmanager
def joined_processes(config: MeshConfig) -> Iterator[torch.device]:
    """Join the launched processes until the block ends; yield this process's device.

    If the block raises, a group of several processes is not destroyed, since other processes may
    be stuck in a collective. A process group that is already initialized is used, and never
    destroyed.

    Raises:
        LaunchError: the processes cannot join (see ``runtime.launch.rendezvous.meet``).
        MeshError: there is no GPU, or two processes have the same one.
    """
    device = torch.device(config.device_type)
    if device.type == "cuda":
        check_cuda()
        device = _local_gpu()
        torch.cuda.set_device(device)
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    with nullcontext() if dist.is_initialized() else process_group(config.backend, timeout):
        if device.type == "cuda":
            _check_distinct(device)
        yield device


@contextmanager
def distributed_mesh(config: MeshConfig) -> Iterator[Mesh]:
    """Join the launched processes as ``joined_processes`` does, and yield their mesh.

    The world size must be a multiple of pp * cp * tp. tp communicates most, so it is the innermost
    dimension, whose ranks are neighbours; cp comes next. pp communicates least, so it is the
    outermost.
    """
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    with joined_processes(config) as device:
        world_size = dist.get_world_size()
        config = config.joined(world_size)
        pp, cp, tp = config.sizes
        dp = world_size // (pp * cp * tp)
        mesh = init_device_mesh(
            device.type, (pp, dp, cp, tp), mesh_dim_names=("pp", "dp", "cp", "tp")
        )
        dimensions = {name: mesh[name] for name in ("pp", "dp", "cp", "tp")}
        dimensions["dp_cp"] = mesh["dp", "cp"]._flatten("dp_cp")
        for dimension in dimensions.values():
            # Groups of a mesh do not inherit the timeout: without this they would wait for 30
            # minutes.
            set_timeout(dimension.get_group(), timeout)
        yield Mesh(device=device, **dimensions)


def _local_gpu() -> torch.device:
    """Return this process's GPU: number LOCAL_RANK of its machine, or the only visible one."""
    launched_world_size()  # sets LOCAL_RANK if srun started this process
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    gpus = torch.cuda.device_count()
    if gpus == 1 and "CUDA_VISIBLE_DEVICES" in os.environ:
        return torch.device("cuda", 0)  # for example with srun --gpus-per-task 1
    if local_rank >= gpus:
        raise MeshError(
            f"device is cuda, but process {local_rank + 1} on its machine finds only {gpus} GPUs; "
            f"start at most {gpus} processes per machine, or use --device cpu; if "
            f"{socket.gethostname()} has more GPUs, look for a fault there with nvidia-smi, or "
            "avoid that machine"
        )
    return torch.device("cuda", local_rank)


def _check_distinct(device: torch.device) -> None:
    """Raise MeshError on all ranks if two of them use the same GPU."""
    local_gpu = (socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid))
    owners: dict[tuple[str, str], int] = {}
    for rank, gpu in enumerate(gather_results(lambda: local_gpu)):
        owner = owners.setdefault(gpu, rank)
        if owner != rank:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            raise MeshError(
                f"ranks {owner} and {rank} use the same GPU of {gpu[0]} (CUDA_VISIBLE_DEVICES is "
                f"{visible} on this rank); start one process per GPU, or let CUDA_VISIBLE_DEVICES "
                "give each process a GPU of its own"
            )
