"""Convert models between published formats, such as Hugging Face's, and Longmesh's.

The tables that describe Hugging Face's models are in model/families. The names below are imported
from api.py on first use. An import at the top would be circular, since api.py imports the families,
and their tables import family.py from this folder.
"""

from importlib import import_module
from typing import Any

__all__ = ["config_from_hf", "config_to_hf", "from_hf", "load_hf", "save_hf", "to_hf"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.api"), name)
