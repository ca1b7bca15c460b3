"""Triton kernels. This package does not import Triton until a kernel is needed."""

import os
from functools import cache
from importlib.util import find_spec


@cache
def has_triton() -> bool:
    """Return whether Triton is installed; torch's builds for the CPU bring none."""
    return find_spec("triton") is not None


def interpreted() -> bool:
    """Return whether Triton interprets kernels on the CPU.

    It does if TRITON_INTERPRET was 1 when Triton was imported.
    """
    return os.environ.get("TRITON_INTERPRET") == "1"
