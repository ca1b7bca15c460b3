"""Options of a plan besides its method, sequence and mask."""

from dataclasses import dataclass, replace
from typing import Literal

from parallel.context.errors import ContextError
from parallel.context.layout import PLACEMENTS
from parallel.context.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Keyword arguments of ``make_plan`` and ``context_parallel`` that do not depend on the mask."""

    team_size: int = 1
    """Ranks per team, for methods with teams."""
    ulysses_degree: int = 1
    """Neighbouring ranks that split the heads; the method runs over such groups."""
    ulysses_head_chunks: int = 1
    """Stages in which heads are exchanged and attended with."""
    multiple: int = 1
    """Pad each rank to a multiple of this many positions, for tensor parallelism."""
    layout: str = "auto"
    """Layout, for methods that take any; ``auto`` balances the work under the mask."""
    placement: str = "collect_intra"
    """Placement of a team: its ranks are neighbours (``collect_intra``) or a ring's (``p2p_intra``)."""
    ranks_per_node: int | None = None
    """Consecutive ranks per node, for ``double_ring``; None is all."""
    backward: Literal["auto", "kv", "queries"] = "auto"
    """Operands that the backward circulates; ``auto`` moves fewer bytes for the given heads."""

    def resolved(self, method: Method, seq_len: int, size: int, causal: bool) -> "PlanOptions":
        """Resolve the layout, and the degree if the method decides it, for a method and a sequence.

        Raises:
            ContextError: a combination that the method does not support, with the reason and the fix.
        """
        self._check_least(seq_len, size)
        degree = size if method.splits_heads and self.ulysses_degree == 1 else self.ulysses_degree
        if size % degree:
            fitting = ", ".join(str(degree) for degree in range(1, size + 1) if size % degree == 0)
            raise ContextError(
                f"ulysses_degree is {degree}, which does not divide the context-parallel size {size}; "
                f"degrees that do: {fitting}"
            )
        if degree == 1 and self.ulysses_head_chunks > 1:
            raise ContextError(
                f"ulysses_head_chunks is {self.ulysses_head_chunks}, and no ranks exchange heads; leave it out, or use "
                "a ulysses_degree of 2 or more"
            )
        if method.nodes and self.ranks_per_node and min(self.ranks_per_node, size) % degree:
            raise ContextError(
                f"context_parallel_ranks_per_node is {self.ranks_per_node}, not a multiple of ulysses_degree {degree}: "
                "ranks that split heads share a node; use a degree that divides it"
            )
        if method.states:
            self._check_state_method(method.name)
        self._check_choices(method)
        layout = method.layout(causal) if self.layout == "auto" else self.layout
        return replace(self, ulysses_degree=degree, layout=layout)

    def _check_least(self, seq_len: int, size: int) -> None:
        least = {
            "seq_len": seq_len,
            "context_parallel_size": size,
            "context_parallel_team_size": self.team_size,
            "multiple": self.multiple,
            "ulysses_degree": self.ulysses_degree,
            "ulysses_head_chunks": self.ulysses_head_chunks,
            "context_parallel_ranks_per_node": 1 if self.ranks_per_node is None else self.ranks_per_node,
        }
        for name, value in least.items():
            if value < 1:
                raise ContextError(f"{name} is {value}; it must be 1 or more")

    def _check_state_method(self, method: str) -> None:
        if self.layout not in ("auto", "contiguous"):
            raise ContextError(
                f"context_parallel_layout is {self.layout!r} with method {method}, whose one state sums up all tokens "
                "of the ranks before, so that a rank's tokens must follow those of the one before it; use contiguous "
                "or auto"
            )
        if self.ulysses_degree > 1:
            raise ContextError(
                f"ulysses_degree is {self.ulysses_degree} with method {method}, which splits no heads; use 1: what it "
                "sends does not grow with the sequence"
            )

    def _check_choices(self, method: Method) -> None:
        layouts = ("auto", *method.layouts)
        if self.layout not in layouts:
            raise ContextError(
                f"context_parallel_layout is {self.layout!r} with method {method.name}, which takes "
                f"{', '.join(layouts)}"
            )
        if self.placement not in PLACEMENTS:
            raise ContextError(f"context_parallel_placement is {self.placement!r}; use one of {', '.join(PLACEMENTS)}")
        if self.backward not in ("auto", "kv", "queries"):
            raise ContextError(f"backward is {self.backward!r}; use one of auto, kv, queries")
        if self.placement != "collect_intra" and not method.teams:
            raise ContextError(
                f"context_parallel_placement is {self.placement} and method {method.name} has no teams to place; "
                "use collect_intra"
            )
