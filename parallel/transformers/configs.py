"""Configurations of a model's parts, in which transformers keeps the names of their attention."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from torch import nn


def configured(model: nn.Module) -> list[nn.Module]:
    """Return the modules that have a configuration with the name of an attention, the whole first."""
    modules = []
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_attn_implementation"):
            modules.append(module)
    return modules


def configs(model: nn.Module) -> list[Any]:
    """Return the configurations of a model and its parts, each once, the whole's first."""
    return list({id(module.config): module.config for module in configured(model)}.values())


def attentions(model: nn.Module) -> dict[int, str]:
    """Return the name of each module's attention, by the module's id."""
    return {id(module): str(module.config._attn_implementation) for module in configured(model)}  # type: ignore[union-attr]


def set_attentions(model: nn.Module, names: Mapping[int, str], otherwise: str) -> None:
    """Set the attention of each module, by its id, and another name where it has none there."""
    for module in configured(model):
        config: Any = module.config
        config._attn_implementation = names.get(id(module), otherwise)


@contextmanager
def attention_named(model: nn.Module, name: str) -> Iterator[None]:
    """Give all modules one attention for a while."""
    before = attentions(model)
    set_attentions(model, {}, name)
    try:
        yield
    finally:
        set_attentions(model, before, name)


def separate(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Give the model configurations that no other model has; return what ``restore`` takes.

    Models that are made from one configuration share it, and an attention set there would be that
    of all.
    """
    memo: dict[int, Any] = {}
    shared = configs(model)
    deepcopy(shared, memo)  # in one call, so that a configuration within another stays the same one

    replaced = []
    for module in model.modules():
        for name, value in vars(module).items():
            if any(value is config for config in shared):
                replaced.append((module, name, value))

    for module, name, value in replaced:
        setattr(module, name, memo[id(value)])
    return replaced


def restore(replaced: list[tuple[nn.Module, str, Any]]) -> None:
    """Give modules back what ``separate`` replaced."""
    for module, name, value in replaced:
        setattr(module, name, value)
