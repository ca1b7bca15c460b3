"""Read and set the attention that transformers stores by name in a model's configurations."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from torch import nn


def configured(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose configuration names an attention function; the model comes first."""
    modules = []
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_attn_implementation"):
            modules.append(module)
    return modules


def configs(model: nn.Module) -> list[Any]:
    """Return the distinct configurations of a model and its modules, the model's own first."""
    by_id: dict[int, Any] = {}
    for module in configured(model):
        by_id[id(module.config)] = module.config
    return list(by_id.values())


def attentions(model: nn.Module) -> dict[int, str]:
    """Return the name of each module's attention function, keyed by the module's id."""
    names: dict[int, str] = {}
    for module in configured(model):
        config: Any = module.config
        names[id(module)] = str(config._attn_implementation)
    return names


def set_attentions(model: nn.Module, names: Mapping[int, str], otherwise: str) -> None:
    """Set each module's attention to its entry in ``names``, keyed by id, or to ``otherwise``."""
    for module in configured(model):
        config: Any = module.config
        config._attn_implementation = names.get(id(module), otherwise)


@contextmanager
def attention_named(model: nn.Module, name: str) -> Iterator[None]:
    """Use one attention function for all modules until the block ends."""
    previous = attentions(model)
    set_attentions(model, {}, name)
    try:
        yield
    finally:
        set_attentions(model, previous, name)


def separate(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Copy the model's configurations, so that it shares none with another model.

    Models made from one configuration share it, so an attention set there would apply to all of
    them. Returns the replaced attributes, for ``restore``.
    """
    copies: dict[int, Any] = {}
    shared = configs(model)
    # Copied in one call: a configuration inside another one must remain the same object.
    deepcopy(shared, copies)

    replaced = []
    for module in model.modules():
        for name, value in vars(module).items():
            if any(value is config for config in shared):
                replaced.append((module, name, value))

    for module, name, value in replaced:
        setattr(module, name, copies[id(value)])
    return replaced


def restore(replaced: list[tuple[nn.Module, str, Any]]) -> None:
    """Undo ``separate`` by restoring the replaced attributes."""
    for module, name, value in replaced:
        setattr(module, name, value)
