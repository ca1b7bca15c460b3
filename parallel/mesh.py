"""Arrange a run's processes in a device mesh: pipeline (pp) x data (dp) x context (cp) x tensor
parallel (tp).
"""

import math
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from runtime.errors import UserError, at_least, require
from runtime.processes import launched_world_size, process_group, set_timeout
from runtime.together import gather_results


class MeshError(UserError):
    """Processes that cannot form the mesh."""


SHORTEST_TIMEOUT, LONGEST_TIMEOUT = 0.02, 10080  # minutes
SIZES = ("pipeline_model_parallel_size", "context_parallel_size", "tensor_model_parallel_size")


GPU_ENVIRONMENT = {
    # of 8, two streams may share one, and a transfer wait behind a product
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # the few blocks of a transfer start before the next of a product
    "TORCH_NCCL_HIGH_PRIORITY": "1",
    # lengths that change leave gaps in segments of fixed sizes
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}
"""Variables for CUDA, NCCL and torch's allocator, set before they start where the environment has
none.
"""
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
"""Folder of NVIDIA's driver with an entry for each GPU of the machine."""


def check_cuda() -> None:
    """Raise MeshError, which says whether torch or the machine is the reason, if torch finds no
    GPU.
    """
    if torch.cuda.is_available():
        return
    built = f"torch {torch.__version__} on {socket.gethostname()}"
    if torch.version.cuda is None and torch.version.hip is None:
        reason = f"{built} is built for CPUs: make venv TORCH=torch==2.13.0 installs PyTorch's build for GPUs"
    else:
        reason = f"{built} is built for GPUs: look at nvidia-smi there, and at CUDA_VISIBLE_DEVICES"
    raise MeshError(
        f"device is cuda and torch finds no CUDA device; use --device cpu or auto ({reason})"
    )


def idle_gpus(config: "MeshConfig") -> str:
    """Warn of GPUs that ``device`` auto passes over, since torch cannot use them; empty if there
    are none.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if config.device != "auto" or config.device_type == "cuda" or hidden:
        return ""
    allocated = os.environ.get("SLURM_GPUS_ON_NODE", "0") != "0"
    if not allocated and not any(NVIDIA_GPUS.glob("*")):
        return ""
    return (
        f"WARNING: device is auto and takes the CPU, though {socket.gethostname()} has GPUs: torch {torch.__version__} "
        "finds none; --device cuda says why, --device cpu is meant so"
    )


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Arrangement of the processes: pipeline (pp) x data (dp, what is left over) x context (cp) x
    tensor parallel.
    """

    tensor_model_parallel_size: int = 1
    """Processes that share each layer's matrices, the vocabulary and, between the matrices, their
    tokens.
    """
    pipeline_model_parallel_size: int = 1
    """Processes that share the layers, each a run of them."""
    context_parallel_size: int = 1
    """Processes that share each sequence."""
    balance_over: Literal["cp", "dp_cp"] = "cp"
    """Over whom the tokens of packed documents are shared and balanced: the context-parallel
    processes of each micro-batch, or, as one micro-batch, all data-parallel ones too; dp_cp needs
    reset_attention_mask or pack_samples."""
    allow_resize: bool = field(default=False, compare=False)
    """Go on with other processes than full_world_size: the planner chooses the sizes above and the
    micro-batch, and the global batch and the order of the samples stay."""
    full_world_size: int | None = field(default=None, compare=False)
    """Processes that the sizes above are for, where allow_resize is set; by default those that the
    run's config.toml has: of its last start without allow_resize, or of its first."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device that every process computes on; auto takes cuda where it is available."""
    distributed_backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Collective library; auto takes nccl on cuda and gloo on cpu."""
    distributed_timeout_minutes: float = 10.0
    """Time that a collective may wait for its peers before the run fails."""

    def __post_init__(self) -> None:
        at_least(self, 1, *SIZES, "full_world_size")
        fits = SHORTEST_TIMEOUT <= self.distributed_timeout_minutes <= LONGEST_TIMEOUT
        must = (
            f"it must be from {SHORTEST_TIMEOUT} (a second or so) to {LONGEST_TIMEOUT:,} (a week)"
        )
        require(self, fits, "distributed_timeout_minutes", must)
        if self.device == "cpu" and self.distributed_backend == "nccl":
            raise UserError("distributed_backend is nccl and device is cpu; use gloo or auto")

    @property
    def device_type(self) -> str:
        """``cpu`` or ``cuda``, with ``auto`` resolved."""
        if self.device != "cpu":
            for (
                name,
                value,
            ) in GPU_ENVIRONMENT.items():  # before torch asks for a device, which starts CUDA
                if (
                    name != "PYTORCH_ALLOC_CONF" or "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
                ):  # its older name
                    os.environ.setdefault(name, value)
        return (
            ("cuda" if torch.cuda.is_available() else "cpu")
            if self.device == "auto"
            else self.device
        )

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The sizes of pp, cp and tp."""
        return (
            self.pipeline_model_parallel_size,
            self.context_parallel_size,
            self.tensor_model_parallel_size,
        )

    def data_parallel_size(self, world_size: int) -> int:
        """Return ``world_size`` divided by the sizes of pp, cp and tp."""
        return world_size // math.prod(self.sizes)

    def joined(self, world_size: int) -> "MeshConfig":
        """Return the arrangement that ``balance_over`` asks for: dp_cp puts the data-parallel ranks
        among those of cp.

        Sizes that do not divide ``world_size`` stay as they are.
        """
        dp, rest = divmod(world_size, math.prod(self.sizes))
        if self.balance_over == "cp" or rest:
            return self
        return replace(self, context_parallel_size=dp * self.context_parallel_size)

    @property
    def context_ranks_per_node(self) -> int | None:
        """Context-parallel ranks per node: the launcher's LOCAL_WORLD_SIZE divided by tp; None if
        it is not set.
        """
        launched = os.environ.get("LOCAL_WORLD_SIZE")
        return (
            None if launched is None else max(1, int(launched) // self.tensor_model_parallel_size)
        )

    @property
    def backend(self) -> str:
        """Process-group backend per device type; tensors on the CPU always travel by gloo.

        Raises MeshError if it is for a GPU that this machine or this torch lacks.
        """
        if self.device_type == "cuda":
            check_cuda()
        gpu = {"auto": "nccl"}.get(self.distributed_backend, self.distributed_backend)
        return "gloo" if self.device_type == "cpu" else f"cpu:gloo,cuda:{gpu}"


@dataclass(frozen=True)
class Mesh:
    """A run's device, and the dimensions of its device mesh.

    ``dp_cp`` flattens dp and cp: its ranks hold different tokens and the same part of the model,
    which FSDP shards over them. Along tp and pp, ranks hold different parts and the same tokens.
    """

    device: torch.device
    pp: DeviceMesh
    dp: DeviceMesh
    cp: DeviceMesh
    tp: DeviceMesh
    dp_cp: DeviceMesh


@contextmanager
def joined_processes(config: MeshConfig) -> Iterator[torch.device]:
    """Join the launched processes and yield this one's device; leave at the end of the block if it
    ends cleanly.

    A process group that is initialized already is used and kept.

    Raises:
        LaunchError: the processes cannot join (see ``runtime.processes.meet``).
        MeshError: there is no GPU, or two processes have the same.
    """
    device = torch.device(config.device_type)
    if device.type == "cuda":
        check_cuda()
        device = _own_gpu()
        torch.cuda.set_device(device)
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    with nullcontext() if dist.is_initialized() else process_group(config.backend, timeout):
        if device.type == "cuda":
            _check_apart(device)
        yield device


@contextmanager
def distributed_mesh(config: MeshConfig) -> Iterator[Mesh]:
    """Join the launched processes as ``joined_processes`` does, and yield their mesh.

    The world size must be a multiple of pp * cp * tp. tp communicates most and is the innermost
    dimension, then cp: their ranks are neighbours. pp communicates least and is the outermost.
    """
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    with joined_processes(config) as device:
        config = config.joined(dist.get_world_size())
        pp, cp, tp = config.sizes
        sizes = {"pp": pp, "dp": dist.get_world_size() // (pp * cp * tp), "cp": cp, "tp": tp}
        mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        parts = {name: mesh[name] for name in sizes} | {"dp_cp": mesh["dp", "cp"]._flatten("dp_cp")}
        for part in parts.values():
            # a mesh's groups do not inherit the timeout: they would wait for 30 minutes
            set_timeout(part.get_group(), timeout)
        yield Mesh(device=device, **parts)


def _own_gpu() -> torch.device:
    """Return the GPU of this process: the LOCAL_RANK-th of its machine, or the only one that a
    launcher lets it see.
    """
    launched_world_size()  # a task of srun has its LOCAL_RANK from here on
    local, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if gpus == 1 and "CUDA_VISIBLE_DEVICES" in os.environ:
        return torch.device("cuda", 0)  # srun --gpus-per-task 1 and the like
    if local >= gpus:
        raise MeshError(
            f"device is cuda, and process {local + 1} of a machine finds {gpus} GPUs there; start at most "
            f"{gpus} processes per machine, or give --device cpu; if {socket.gethostname()} has more, look at "
            "nvidia-smi there and leave this machine out"
        )
    return torch.device("cuda", local)


def _check_apart(device: torch.device) -> None:
    """Raise MeshError on all ranks if two of them have one GPU."""
    mine = socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)
    owners: dict[tuple[str, str], int] = {}
    for rank, gpu in enumerate(gather_results(lambda: mine)):
        if (other := owners.setdefault(gpu, rank)) != rank:
            raise MeshError(
                f"ranks {other} and {rank} have the same GPU of {gpu[0]} (CUDA_VISIBLE_DEVICES is "
                f"{os.environ.get('CUDA_VISIBLE_DEVICES')} here); start one process per GPU, or let each see its own"
            )
