"""Triton kernels. This package does not import Triton until a kernel is needed."""

import os
from functools import cache
from importlib.util import find_spec


@cache
def has_triton() -> bool:
    """Return True if Triton is installed; torch builds for the CPU come without it."""
    return find_spec("triton") is not None


def interpreted() -> bool:
    """Return True if Triton interprets kernels on the CPU.

    Triton does so if TRITON_INTERPRET was 1 when it was imported.
    """
    return os.environ.get("TRITON_INTERPRET") == "1"
