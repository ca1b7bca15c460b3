"""Attention kernels of a GPU: what is here, detected in one place, and what ``auto`` takes of it.

FlashAttention 3 and 4 come through torch's own registry, which puts a version in the place of FlashAttention 2 behind
aten's operators, for the whole process. So every call of a backend sees to it that its version is in place.
"""

import re
from functools import cache
from importlib import metadata
from typing import NamedTuple

import torch
from torch.nn import attention

from runtime.machine import cudnn_number, loaded_cudnn

HOPPER, BLACKWELL = 9, 10
"""Major compute capabilities of H100, H200 and H20, and of B200 and B300."""
FAST_CUDNN = 91501
"""The first cuDNN whose attention torch itself prefers (check_prefer_cudnn_attention in sdp_utils.cpp): an older one is
wrong at some lengths that 128 does not divide."""
SHARES = {
    HOPPER: {"aten": 0.31, "cudnn": 0.53, "flash_attn_3": 0.66},
    BLACKWELL: {"aten": 0.15, "cudnn": 0.6, "flash_attn_4": 0.6},
}
"""Share of the peak that attention reaches by a backend, forward and backward together.

Those of configs/clusters/*.toml, which name their sources."""
H20_SHARES = {"aten": 0.6, "cudnn": 0.8, "flash_attn_3": 0.8}
"""The same of an H20, a Hopper of a seventh of the peak."""


class Version(NamedTuple):
    """A version of FlashAttention that torch can put in place: its name there, and what it takes."""

    title: str
    impl: str
    package: str
    capabilities: tuple[int, ...]
    widest: int
    """Channels of a head."""
    install: str


VERSIONS = {
    "flash_attn_3": Version(
        *("FlashAttention 3", "FA3", "flash_attn_interface", (HOPPER,), 256),
        "python setup.py install in hopper/ of github.com/Dao-AILab/flash-attention",
    ),
    "flash_attn_4": Version(
        *("FlashAttention 4", "FA4", "flash_attn", (HOPPER, BLACKWELL), 128), "pip install flash-attn-4"
    ),
}
ABSENT = "it is not installed"
OWN = {HOPPER: "flash_attn_3", BLACKWELL: "flash_attn_4"}
"""The version that was written for a GPU."""
TITLES = {"aten": "FlashAttention 2", **{name: version.title for name, version in VERSIONS.items()}}


class Gpu(NamedTuple):
    """This process's GPU and its cuDNN: the one loaded, and the one that came with torch, 0 if none; torch's name."""

    capability: tuple[int, int] = (0, 0)
    cudnn: int = 0
    bundled: int = 0
    name: str = ""

    @property
    def is_h20(self) -> bool:
        return "H20" in re.split(r"[^A-Z0-9]+", self.name)


@cache
def gpu() -> Gpu:
    """Detect this process's GPU; once, as it cannot change."""
    if not torch.cuda.is_available():
        return Gpu()
    return Gpu(torch.cuda.get_device_capability(), loaded_cudnn(), bundled_cudnn(), torch.cuda.get_device_name())


def bundled_cudnn() -> int:
    """Return the version of the cuDNN package that torch asks for, as it is installed; 0 if there is none."""
    try:
        asked = [re.match(r"nvidia-cudnn-cu\d+", line) for line in metadata.requires("torch") or ()]
        found = [metadata.version(name[0]) for name in asked if name]
    except metadata.PackageNotFoundError:
        return 0
    return cudnn_number(found[0]) if found else 0


def version_of(number: int) -> str:
    """Format a number of cuDNN's, such as 91501, as a version."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def prefers_cudnn(here: Gpu) -> bool:
    """Return whether cuDNN's attention is right and the fastest on this GPU, as torch itself has it."""
    return here.capability[0] in OWN and here.cudnn >= FAST_CUDNN


def fastest(here: Gpu, documents: bool) -> str:
    """Return the backend that ``auto`` takes on a GPU.

    With ``documents``, tiles have other shapes in each micro-batch, and cuDNN is passed over: torch has it build a
    graph for every new shape, forward and backward, and keeps them all.
    """
    if prefers_cudnn(here) and not documents:
        return "cudnn"
    own = OWN.get(here.capability[0])
    return own if own and problem(own) is None else "aten"


@cache
def problem(name: str) -> str | None:
    """Say why this one of ``VERSIONS`` cannot run here, by putting it in place once; None if it can."""
    version, capability = VERSIONS[name], gpu().capability
    if capability[0] not in version.capabilities:
        known = " or ".join(f"{one}.x" for one in version.capabilities)
        return f"it takes a GPU of compute capability {known}, and this one has {capability[0]}.{capability[1]}"
    if not hasattr(attention, "activate_flash_attention_impl"):
        return f"torch {torch.__version__} cannot put it in place, and 2.11 and newer can"
    try:
        put(version.impl)
        put(None)
    except Exception as error:  # a build for another torch raises ImportError or OSError, a stub anything
        if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == version.package:
            return ABSENT
        return "its import fails ({})".format(" ".join(f"{type(error).__name__}: {error}".split()))
    return None


def put(impl: str | None) -> None:
    """Put a version in place by its name in torch's registry; None is torch's own FlashAttention 2."""
    if getattr(attention, "current_flash_attention_impl", lambda: None)() == impl:
        return
    if impl is None:
        attention.restore_flash_attention_impl()
    else:
        attention.activate_flash_attention_impl(impl)


def describe_kernel(kernel: str, here: Gpu) -> str:
    """Name a backend of a GPU and its cuDNN in a few words."""
    brings = f", where torch brings {version_of(here.bundled)}" if here.bundled not in (0, here.cudnn) else ""
    loaded = f"cuDNN {version_of(here.cudnn)} loaded{brings}" if here.cudnn else "no cuDNN loaded"
    title = f" ({TITLES[kernel]})" if kernel in TITLES else ""
    return f"{kernel}{title}, {loaded}"


def warning(
    kernel: str, here: Gpu, asked: str = "auto", *, documents: bool = False, width: int = 128, why_not: str | None
) -> str | None:
    """Warn of a kernel that is slower than another on this GPU, with the factor and the fix, or of a shadowed cuDNN.

    Args:
        kernel: the backend that runs; ``asked`` is the one that was asked for.
        documents, width: packed documents, and channels of a head.
        why_not: why the version of FlashAttention that was written for this GPU cannot run; None if it can.
    """
    major = here.capability[0]
    own = OWN.get(major)
    if own is None or kernel not in ("aten", "cudnn") or (width > 128 and major == BLACKWELL):
        return None  # heads as wide as that FlashAttention 2 alone takes there
    title, shadowed = VERSIONS[own].title, 0 < here.cudnn < here.bundled
    loaded = f"cuDNN {version_of(here.cudnn)} is loaded" if here.cudnn else "no cuDNN is loaded"
    newer = (
        f"{loaded} in the place of torch's own {version_of(here.bundled)}: take its folder out of "
        "LD_LIBRARY_PATH, or put nvidia/cudnn/lib of torch's environment before it"
        if shadowed
        else f"{loaded}: install {version_of(FAST_CUDNN)} or newer, as torch for CUDA 13 brings"
    )
    if kernel == "cudnn":
        right = prefers_cudnn(here)
        wrong = (
            "" if right else f"; before {version_of(FAST_CUDNN)} lengths that 128 does not divide can come out wrong"
        )
        return None if right and not shadowed else newer + wrong
    install = f"install {title} ({VERSIONS[own].install})" + ("" if why_not in (None, ABSENT) else f": {why_not}")
    fix = f"packed documents pass cuDNN over: {install}" if documents else f"{newer}, or {install}"
    if why_not is None or asked == "aten":
        fix = "leave --attention-backend out" if asked == "aten" else newer
    shares = H20_SHARES if here.is_h20 else SHARES[major]
    slow, *fast = (shares[name] for name in ("aten", "cudnn", own))
    seen = " (published, on H100: 606 s a step in place of 373 s)" if major == HOPPER and not here.is_h20 else ""
    return (
        f"attention runs by FlashAttention 2, at about {slow} of this GPU's peak, where cuDNN reaches {fast[0]} and "
        f"{title} {fast[1]}, and takes at least {min(fast) / slow:.1f} times as long{seen}. {fix}"
    )
