"""Kernels written in Triton. Nothing here imports Triton before it is needed."""

import os


def interpreted() -> bool:
    """Whether Triton's interpreter runs its kernels on the CPU: TRITON_INTERPRET=1 before Triton is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"
