"""Triton kernels. This package does not import Triton until a kernel is needed."""

import os


def interpreted() -> bool:
    """Return whether Triton interprets kernels on the CPU (TRITON_INTERPRET=1 before Triton is imported)."""
    return os.environ.get("TRITON_INTERPRET") == "1"
