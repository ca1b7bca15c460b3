"""Files, errors of all ranks and processes, for every folder."""

__version__ = (
    "0.1.0"  # the one place: pyproject.toml, --version, checkpoints and the written package take it
)
