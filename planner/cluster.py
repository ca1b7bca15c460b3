"""Clusters: compute and link rates, read from configs/clusters/*.toml."""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from kernels.backends import BACKENDS, RATED
from kernels.gpu import family_of
from runtime.errors import UserError
from runtime.machine import card_of

MICRO = 1e-6
GB = 1e9
CLUSTERS = Path(__file__).resolve().parents[1] / "configs" / "clusters"
OPTIONAL = (
    "host_gb_per_s",
    "host_memory_gb",
    "reserved_gb",
    "memory_gb_per_s",
    "public_error",
    "delta_fraction",
    "float32_tflops",
    "mask_overhead",
)
"""Fields of a cluster that may be 0."""
KERNEL_FRACTIONS = {f"{kernel}_fraction": kernel for kernel in sorted(RATED)}
"""Names of kernels, keyed by the key of their rate in a cluster file, such as cudnn_fraction."""
DELTA = 1 / 6
"""Default rate of a delta rule relative to attention's: the published ratio to cuDNN on H200."""

FLOAT32 = 1 / 15
"""Default rate of a GPU in float32 relative to bfloat16, without TF32: the H100's and A100's.

In data sheets it is 67 of 989 TFLOP/s for H100 and H200, and 19.5 of 312 for A100.
"""


class ClusterError(UserError):
    """An invalid cluster file; the message names the file, the key and the fix."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of equal processors (GPUs or CPU processes), with their rates and memory.

    Bandwidths are in one direction, in 10^9 bytes per second.
    """

    name: str
    """Short description of the cluster."""
    gpus_per_node: int
    """Number of processors, and so of ranks, per node."""
    peak_tflops: float
    """Dense bfloat16 rate of one processor (data sheet), in 10^12 operations per second."""
    matmul_fraction: float
    """Fraction of ``peak_tflops`` that a layer's matmuls reach; without ``memory_gb_per_s`` it
    includes the pointwise work between them.
    """
    attention_fraction: float
    """Fraction of ``peak_tflops`` that the attention kernel chosen by ``auto`` reaches, forward and
    backward together.
    """
    launch_us: float
    """Fixed time of each attention kernel, in microseconds, to start it and merge its result."""
    memory_gb: float
    """Memory of one processor available to a run, in 10^9 bytes: the total that torch reports,
    less ``reserved_gb``.
    """
    inside_gb_per_s: float
    """Bandwidth from one rank to other ranks of its node."""
    inside_latency_us: float
    """Microseconds until a message inside a node begins to arrive."""
    between_gb_per_s: float
    """Bandwidth of one link out of a node."""
    between_latency_us: float
    """Microseconds until a message between nodes begins to arrive."""
    between_link: Literal["node", "rank"]
    """``node`` if a node's ranks share one link to other nodes, ``rank`` if each has its own."""
    float32_tflops: float = 0.0
    """Float32 rate of one processor without tensor cores (data sheet), in 10^12 operations per
    second; 0 if unknown, in which case it is assumed to be a share of ``peak_tflops``."""
    memory_gb_per_s: float = 0.0
    """Bandwidth of a processor's own memory (data sheet), for the pointwise work; 0 if unknown, in
    which case ``matmul_fraction`` includes that work.
    """
    exposed_share: float = 0.0
    """Share of the exchange of weights and gradients that is never hidden by computing."""
    attention_kernel: str = ""
    """Kernel that reaches ``attention_fraction``, a name in ``kernels.backends.RATED``; empty if
    unknown.
    """
    kernel_fractions: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Fraction of ``peak_tflops`` that each attention kernel reaches, keyed by its name; a file has
    a key for each, such as ``cudnn_fraction``.
    """
    delta_fraction: float = 0.0
    """Fraction of ``peak_tflops`` that the chunked gated delta rule reaches, forward and backward
    together; 0 if unknown, in which case it is assumed to be a share of ``attention_fraction``."""
    reserved_gb: float = 0.0
    """Memory that the driver, CUDA's libraries and NCCL take, in 10^9 bytes; ``memory_gb`` excludes
    it.
    """
    masked_share: float = 0.0
    """Share of a causal tile's masked pairs that the kernel computes although they are masked."""
    block_queries: int = 1
    """Number of queries in a block of pairs that the attention kernel computes whole: it skips a
    block only if all of its pairs are masked."""
    block_keys: int = 1
    """Number of keys in such a block."""
    mask_overhead: float = 0.0
    """Additional time of a tile with a mask, as a share of the time of its computed pairs."""
    posted_overlap: float = 1.0
    """Overlap of computing with a transfer that was posted before it, as a share of the shorter of
    the two times.
    """
    shared_overlap: float = 0.0
    """Overlap of transfers that a rank waits for with the computing of other ranks on the same
    processor, as a share of the shorter of the two times; 0 if ranks do not share processors.
    """
    host_gb_per_s: float = 0.0
    """Bandwidth of one processor's copies to host memory and back; 0 if unknown, in which case
    offload is not tried.
    """
    host_memory_gb: float = 0.0
    """Host memory per processor that is available to a run, in 10^9 bytes."""
    public_error: float = 0.0
    """Largest relative error of predictions for published runs with ``attention_kernel`` that were
    not used for fitting; 0 if there are none."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Kind of processor, for planning a run on another machine."""

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            value = getattr(self, name)
            if get_origin(kind) is Literal and value not in get_args(kind):
                raise ClusterError(
                    f"{name} is {value!r}; it must be one of {', '.join(get_args(kind))}"
                )
            if kind is int and (type(value) is not int or value < 1):
                raise ClusterError(f"{name} is {value!r}; it must be an integer of 1 or more")
            if kind is float:
                _check_number(name, value)
        for kernel, value in self.kernel_fractions.items():
            _check_number(f"{kernel}_fraction", value)
        if self.attention_kernel not in ("", *RATED):
            names = ", ".join(("", *sorted(RATED)))
            raise ClusterError(
                f"attention_kernel is {self.attention_kernel!r}; it must be one of ''{names}"
            )
        if self.host_gb_per_s and not self.host_memory_gb:
            raise ClusterError(
                f"host_gb_per_s is {self.host_gb_per_s:g}, but host_memory_gb is not set; "
                "set both or neither"
            )
        if type(self.name) is not str:
            raise ClusterError(f"name is {self.name!r}; it must be text")

    def running(self, backend: str, is_packed: bool = False) -> "Cluster":
        """Return the cluster with the attention kernel that will run, and that kernel's rate.

        If it is not the file's ``attention_kernel``, the file's ``public_error`` does not apply.

        Args:
            backend: a value of --attention-backend; ``auto`` does not choose cuDNN for packed
                documents.
            is_packed: True for packed documents.
        """
        kernel = backend
        if backend == "auto" and is_packed and self.attention_kernel == "cudnn":
            kernel = "aten"
        if kernel in BACKENDS:
            kernel = BACKENDS[kernel].rate_name or kernel
        if kernel in ("auto", self.attention_kernel):
            return self
        rate = self.kernel_fractions.get(kernel, 0.0)
        if not rate and self.attention_kernel and kernel in RATED:
            rate = RATED[kernel].shares.get(family_of(self.name), 0.0)
        if not rate:
            return _running(self, "", self.attention_fraction)
        return _running(self, kernel, rate)

    def entries(self) -> dict[str, Any]:
        """Return the values of the fields, keyed as in a cluster file."""
        entries: dict[str, Any] = {}
        for name, value in asdict(self).items():
            if name == "kernel_fractions":
                entries |= {key: value.get(kernel, 0.0) for key, kernel in KERNEL_FRACTIONS.items()}
            else:
                entries[name] = value
        return entries

    @property
    def delta_share(self) -> float:
        """Return ``delta_fraction``, by default a fixed share of attention's fraction."""
        return self.delta_fraction or DELTA * self.attention_fraction

    @property
    def products_flops_per_s(self) -> float:
        """FLOP/s that matmuls reach."""
        return 1e12 * self.peak_tflops * self.matmul_fraction

    @property
    def float32_flops_per_s(self) -> float:
        """FLOP/s that matmuls reach in float32, assuming the same share of the rate."""
        if self.float32_tflops:
            return 1e12 * self.float32_tflops * self.matmul_fraction
        if self.device == "cpu":
            return self.products_flops_per_s
        return FLOAT32 * self.products_flops_per_s

    @property
    def attention_flops_per_s(self) -> float:
        """FLOP/s that the attention kernel reaches."""
        return 1e12 * self.peak_tflops * self.attention_fraction

    @property
    def inside_bytes_per_s(self) -> float:
        """Bytes per second from one rank to others of its node."""
        return self.inside_gb_per_s * GB

    @property
    def between_bytes_per_s(self) -> float:
        """Bytes per second of one link out of a node."""
        return self.between_gb_per_s * GB

    @property
    def memory_bytes_per_s(self) -> float:
        """Bytes per second of a processor's own memory; 0 if unknown."""
        return self.memory_gb_per_s * GB

    @property
    def host_bytes_per_s(self) -> float:
        """Bytes per second of a processor's copies to host memory; 0 if unknown."""
        return self.host_gb_per_s * GB

    @property
    def node_bytes_per_s(self) -> float:
        """Bytes per second of all links out of a node."""
        return self.node_gb_per_s * GB

    @property
    def node_gb_per_s(self) -> float:
        """Return the total bandwidth of all links out of a node."""
        num_links = 1 if self.between_link == "node" else self.gpus_per_node
        return self.between_gb_per_s * num_links


def _check_number(name: str, value: Any) -> None:
    """Raise ClusterError unless ``value`` is a valid number for the field ``name``."""
    is_fraction = name.endswith("_fraction")
    is_share = name.endswith(("_overlap", "_share"))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    may_be_zero = name.endswith("_us") or is_share or name in (*OPTIONAL, *KERNEL_FRACTIONS)
    minimum = "a number of 0 or more" if may_be_zero else "a number above 0"
    if not is_number or not math.isfinite(value) or value < 0 or (value == 0 and not may_be_zero):
        raise ClusterError(f"{name} is {value!r}; it must be {minimum}")
    if is_fraction and value > 1:
        raise ClusterError(
            f"{name} is {value}; it must be a fraction of peak_tflops, above 0 and at most 1"
        )
    if is_share and value > 1:
        raise ClusterError(f"{name} is {value}; it must be a share, from 0 to 1")


@lru_cache(maxsize=64)
def _running(cluster: Cluster, kernel: str, rate: float) -> Cluster:
    return replace(cluster, attention_kernel=kernel, attention_fraction=rate, public_error=0.0)


def cluster_file(name: str | Path) -> Path:
    """Return a cluster's file; ``name`` is a path, or a name in configs/clusters such as h100."""
    path = Path(name)
    if path.exists() and not path.is_dir():
        return path
    for ending in ("", "_pod", "_nvl72"):
        file = CLUSTERS / f"{name}{ending}.toml"
        if file.is_file():
            return file
    return path


def load_cluster(path: str | Path) -> Cluster:
    """Load a cluster from a TOML file, given its path or a name as in ``cluster_file``.

    Raises ClusterError if the file cannot be read, or if a key is unknown, missing or invalid.
    """
    path = cluster_file(path)
    if path.exists() and not path.is_file():  # a named pipe would block
        raise ClusterError(f"{path}: not a file; name a file, such as those of configs/clusters")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        names = ", ".join(sorted(file.stem for file in CLUSTERS.glob("*.toml")))
        raise ClusterError(
            f"{path}: cannot be read ({error.strerror}); "
            f"name a file, or one of configs/clusters: {names}"
        ) from error
    except ValueError as error:
        raise ClusterError(f"{path}: not valid TOML: {error}") from error

    values.pop("slurm", None)  # slurm/submit.py reads this section
    is_required = {entry.name: entry.default is MISSING for entry in fields(Cluster)}
    del is_required["kernel_fractions"]
    is_required |= dict.fromkeys(KERNEL_FRACTIONS, False)
    for name in values:
        if name not in is_required:
            raise ClusterError(f"{path}: unknown key {name}; use one of {', '.join(is_required)}")
    for name, required in is_required.items():
        if required and name not in values:
            raise ClusterError(
                f"{path}: {name} is missing; add it, as in configs/clusters/a100_pod.toml"
            )

    fractions = {}
    for key, kernel in KERNEL_FRACTIONS.items():
        if key in values:
            fractions[kernel] = values.pop(key)
    try:
        return Cluster(**values, kernel_fractions=fractions)
    except ClusterError as error:
        raise ClusterError(f"{path}: {error}") from None


def largest_public_error() -> float:
    """Return the largest ``public_error`` of all cluster files."""
    return max(load_cluster(str(path)).public_error for path in sorted(CLUSTERS.glob("*.toml")))


def default_cluster(device_type: str) -> Cluster:
    """Load the cluster file that describes this machine's GPU, or the one for CPUs.

    Raises ClusterError if no file describes this GPU.
    """
    if device_type == "cpu":
        return load_cluster(CLUSTERS / "cpu.toml")
    try:
        device_name = torch.cuda.get_device_name()
    except (AssertionError, RuntimeError):  # torch without CUDA, or without a GPU
        device_name = "this machine, on which torch finds no GPU"
    card = card_of(device_name)
    if card and card.cluster:
        return load_cluster(CLUSTERS / f"{card.cluster}.toml")
    raise ClusterError(
        f"cluster is not set, and no file in configs/clusters describes {device_name}; "
        "give --cluster FILE"
    )


def endless(cluster: Cluster) -> Cluster:
    """Return the cluster with unlimited memory, so that no configuration is refused for it."""
    return replace(cluster, memory_gb=1e9, host_memory_gb=1e9)
