"""Shared helpers for files, errors that all ranks raise, and processes."""

__version__ = (
    "0.2.0"  # the only copy: pyproject.toml, --version, checkpoints and the written package read it
)
