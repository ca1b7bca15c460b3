"""Convert between published formats, such as Hugging Face's, and ours; the families' tables are in
model/families.

The names below are those of api.py, imported when one of them is read: it reads the families'
tables, which are made of what family.py has.
"""

from importlib import import_module
from typing import Any

__all__ = ["config_from_hf", "config_to_hf", "from_hf", "load_hf", "save_hf", "to_hf"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.api"), name)
