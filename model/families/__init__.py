"""Families of language models, one file each, and the registry that loads them."""

from importlib import import_module

from model.families.family import ModelFamily

NAMES = (
    "llama",
    "gpt",
    "transnormer",
    "linear_transformer",
    "gemma3",
    "olmo3",
    "qwen3_5",
    "olmo_hybrid",
    "smollm3",
    "granite",
)
"""Names of the files in this folder, which are the values of model_type; the first is the
default."""
DEFAULT = NAMES[0]


def _load_family(name: str) -> ModelFamily:
    family: ModelFamily = import_module(f"{__name__}.{name}").FAMILY
    missing = sorted(family.config.__abstractmethods__)
    if missing:
        raise TypeError(
            f"model/families/{name}.py: {family.config.__name__} lacks {', '.join(missing)}; "
            "define them there"
        )
    return family


FAMILIES = {name: _load_family(name) for name in NAMES}
