"""Detect this process's GPU and its cuDNN, in one place."""

import re
from functools import cache
from importlib import metadata
from typing import Literal, NamedTuple

import torch

from runtime.machine import cudnn_number, loaded_cudnn

HOPPER = 9
"""Major compute capability of H100, H200 and H20."""
BLACKWELL = 10
"""Major compute capability of B200 and B300."""
Family = Literal["", "hopper", "h20", "blackwell"]
"""Families of GPUs on which attention reaches the same share of the peak; "" is any other GPU."""


class Gpu(NamedTuple):
    """This process's GPU, the loaded cuDNN, and the cuDNN that torch requires."""

    capability: tuple[int, int] = (0, 0)
    cudnn: int = 0
    """Version of the loaded cuDNN, such as 91501; 0 if there is none."""
    bundled: int = 0
    """Version of the cuDNN package that torch requires; 0 if there is none."""
    name: str = ""
    """Name that torch gives the GPU."""

    @property
    def family(self) -> Family:
        """The GPU's family; an H20, a Hopper with a seventh of the peak, has a separate one."""
        if self.capability[0] == HOPPER:
            return "h20" if family_of(self.name) == "h20" else "hopper"
        return "blackwell" if self.capability[0] == BLACKWELL else ""


@cache
def gpu() -> Gpu:
    """Detect this process's GPU once, since it cannot change."""
    if not torch.cuda.is_available():
        return Gpu()
    return Gpu(
        torch.cuda.get_device_capability(),
        loaded_cudnn(),
        bundled_cudnn(),
        torch.cuda.get_device_name(),
    )


def bundled_cudnn() -> int:
    """Return the installed version of the cuDNN package that torch requires; 0 if there is none."""
    versions = []
    try:
        for requirement in metadata.requires("torch") or ():
            package = re.match(r"nvidia-cudnn-cu\d+", requirement)
            if package:
                versions.append(metadata.version(package[0]))
    except metadata.PackageNotFoundError:
        return 0
    return cudnn_number(versions[0]) if versions else 0


def version_of(number: int) -> str:
    """Format cuDNN's version number, such as 91501, as a version string."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def family_of(name: str) -> Family:
    """Return the family of a GPU from the words in its name."""
    words = re.split(r"[^A-Z0-9]+", name.upper())
    if "H20" in words:
        return "h20"
    if any(re.fullmatch(r"H[128]00", word) for word in words):
        return "hopper"
    if any(re.fullmatch(r"G?B[23]00", word) for word in words):
        return "blackwell"
    return ""
