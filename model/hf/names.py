"""Which of their weights holds one of ours: names of modules, and several linear layers as one."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Read = Callable[[str], Tensor]
"""A parameter's name -> its tensor; each call may read a file."""
Change = Callable[[str, Tensor], Tensor]
"""Our name and a weight in one layout -> in the other; by default both have the same."""


def unchanged(name: str, weight: Tensor) -> Tensor:
    """Return the weight."""
    return weight


@dataclass(frozen=True)
class Names:
    """A family's names; a module that is in neither table has ours."""

    top: Mapping[str, str]
    """Of modules outside of the layers, by ours."""
    layers: str
    """What their layers' names begin with, before the number."""
    layer: Mapping[str, str]
    """Of modules of a layer, by ours."""
    fused: str = ""
    """A module of theirs that holds ``parts`` of ours, joined along ``dim`` of their weight."""
    parts: tuple[str, ...] = ()
    dim: int = 0

    def of(self, name: str) -> tuple[str, int | None]:
        """Return their name of our parameter, and for a fused one which part it is."""
        module, kind = name.rsplit(".", 1)
        if not module.startswith("layers."):
            return f"{self.top.get(module, module)}.{kind}", None
        _, layer, module = module.split(".", 2)
        part = self.parts.index(module) if module in self.parts else None
        inside = self.layer.get(module, module) if part is None else self.fused
        return f"{self.layers}.{layer}.{inside}.{kind}", part

    def to_ours(self, theirs: Read, names: Iterable[str], change: Change = unchanged) -> dict[str, Tensor]:
        """Return our state dict of ``names``: the same tensors or views of them, but for what ``change`` copies."""
        ours = {}
        for name in names:
            their_name, part = self.of(name)
            weight = theirs(their_name)
            ours[name] = change(name, weight if part is None else weight.chunk(len(self.parts), self.dim)[part])
        return ours

    def to_theirs(self, ours: Mapping[str, Tensor], change: Change = unchanged) -> dict[str, Tensor]:
        """Return their state dict: the same tensors, but for those that are fused, and what ``change`` copies."""
        theirs = {}
        for name, weight in ours.items():
            their_name, part = self.of(name)
            if part == 0:
                weight = torch.cat([ours[name.replace(self.parts[0], one)] for one in self.parts])
            if not part:
                theirs[their_name] = change(name, weight)
        return theirs
