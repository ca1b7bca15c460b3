"""Shared helpers for files, errors that all ranks raise, and processes."""

__version__ = (
    "0.1.0"  # The version is defined only here; pyproject.toml, --version and checkpoints read it.
)
