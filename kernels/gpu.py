"""This process's GPU and its cuDNN, detected in one place."""

import re
from functools import cache
from importlib import metadata
from typing import Literal, NamedTuple

import torch

from runtime.machine import cudnn_number, loaded_cudnn

HOPPER, BLACKWELL = 9, 10
"""Major compute capabilities of H100, H200 and H20, and of B200 and B300."""
Family = Literal["", "hopper", "h20", "blackwell"]
"""GPUs of which attention reaches one share of the peak; empty: any other."""


class Gpu(NamedTuple):
    """This process's GPU and its cuDNN: the one loaded, and the one that came with torch, 0 if
    none; torch's name.
    """

    capability: tuple[int, int] = (0, 0)
    cudnn: int = 0
    bundled: int = 0
    name: str = ""

    @property
    def family(self) -> Family:
        """Return the family; an H20, a Hopper of a seventh of the peak, is one of its own."""
        if self.capability[0] == HOPPER:
            return "h20" if family_of(self.name) == "h20" else "hopper"
        return "blackwell" if self.capability[0] == BLACKWELL else ""


@cache
def gpu() -> Gpu:
    """Detect this process's GPU; once, as it cannot change."""
    if not torch.cuda.is_available():
        return Gpu()
    return Gpu(
        torch.cuda.get_device_capability(),
        loaded_cudnn(),
        bundled_cudnn(),
        torch.cuda.get_device_name(),
    )


def bundled_cudnn() -> int:
    """Return the version of the cuDNN package that torch asks for, as it is installed; 0 if there
    is none.
    """
    try:
        asked = [re.match(r"nvidia-cudnn-cu\d+", line) for line in metadata.requires("torch") or ()]
        found = [metadata.version(name[0]) for name in asked if name]
    except metadata.PackageNotFoundError:
        return 0
    return cudnn_number(found[0]) if found else 0


def version_of(number: int) -> str:
    """Format a number of cuDNN's, such as 91501, as a version."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def family_of(name: str) -> Family:
    """Return the family of a GPU by the words of its name."""
    words = re.split(r"[^A-Z0-9]+", name.upper())
    if "H20" in words:
        return "h20"
    if any(re.fullmatch(r"H[128]00", word) for word in words):
        return "hopper"
    return "blackwell" if any(re.fullmatch(r"G?B[23]00", word) for word in words) else ""
