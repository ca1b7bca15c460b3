"""From what a user asks for to a plan, or to the reason why there is none."""

from functools import lru_cache
from itertools import pairwise
from typing import Literal

from parallel.context.errors import ContextError
from parallel.context.methods.base import Method
from parallel.context.methods.registry import method_of
from parallel.context.placement import PLACEMENTS
from parallel.context.plan import Plan

_plan = lru_cache(maxsize=1024)(Plan)


def make_plan(
    method: str,
    *,
    seq_len: int,
    size: int,
    team_size: int = 1,
    ulysses_degree: int = 1,
    causal: bool = True,
    documents: tuple[int, ...] | None = None,
    multiple: int = 1,
    layout: str = "auto",
    placement: str = "collect_intra",
    ranks_per_node: int | None = None,
    backward: Literal["auto", "kv", "queries"] = "auto",
) -> Plan:
    """The plan of a method; no processes needed, and cached.

    Args:
        method: a name in ``METHODS``.
        seq_len: tokens of the sequence; lengths that do not divide are padded at the end.
        size: ranks that share the sequence.
        team_size: ranks of a team, for the methods that have teams.
        ulysses_degree: neighbouring ranks that split the heads among them; the method runs over such groups.
        causal: position p sees positions up to p (of its own document); otherwise all of its document.
        documents: cumulative lengths of packed documents, (0, l1, l1 + l2, ..., seq_len).
        multiple: pad until each rank's number of positions is a multiple of this, which tensor parallelism needs.
        layout: for the methods that take any; ``auto`` balances the work under the mask.
        placement: whether a team's members are neighbours (``collect_intra``) or a ring's (``p2p_intra``).
        ranks_per_node: consecutive ranks that share a node, for ``double_ring``; None is all.
        backward: what circulates in it; ``auto`` is what moves fewer bytes for the heads at hand.

    Raises:
        ContextError: unknown method, or a combination that the method refuses, with the reason and the fix.
    """
    chosen = method_of(method)
    least = {"seq_len": seq_len, "context_parallel_size": size, "context_parallel_team_size": team_size}
    least |= {"multiple": multiple, "ulysses_degree": ulysses_degree}
    least |= {"context_parallel_ranks_per_node": 1 if ranks_per_node is None else ranks_per_node}
    for name, value in least.items():
        if value < 1:
            raise ContextError(f"{name} is {value}; it must be 1 or more")
    if chosen.capabilities().splits_heads and ulysses_degree == 1:
        ulysses_degree = size
    if size % ulysses_degree:
        fitting = ", ".join(str(degree) for degree in range(1, size + 1) if size % degree == 0)
        raise ContextError(
            f"ulysses_degree is {ulysses_degree}, which does not divide the context-parallel size {size}; "
            f"degrees that do: {fitting}"
        )
    if chosen.capabilities().nodes and ranks_per_node and min(ranks_per_node, size) % ulysses_degree:
        raise ContextError(
            f"context_parallel_ranks_per_node is {ranks_per_node}, not a multiple of ulysses_degree {ulysses_degree}: "
            "ranks that split heads share a node; use a degree that divides it"
        )
    if chosen.capabilities().states:
        _check_state_method(method, layout, ulysses_degree)
    _check_choices(chosen, layout, placement, backward)
    documents = _checked(documents, seq_len)
    plan = _plan(
        chosen,
        seq_len,
        size,
        team_size,
        causal,
        documents,
        multiple,
        ulysses_degree,
        layout,
        placement,
        ranks_per_node,
        backward,
    )
    chosen.check(plan.shape, causal)
    return plan


def _check_state_method(method: str, layout: str, ulysses_degree: int) -> None:
    if layout not in ("auto", "contiguous"):
        raise ContextError(
            f"context_parallel_layout is {layout!r} with method {method}, whose one state sums up all tokens of "
            "the ranks before, so that a rank's tokens must follow those of the one before it; use contiguous or auto"
        )
    if ulysses_degree > 1:
        raise ContextError(
            f"ulysses_degree is {ulysses_degree} with method {method}, which splits no heads; use 1: what it sends "
            "does not grow with the sequence"
        )


def _check_choices(method: Method, layout: str, placement: str, backward: str) -> None:
    layouts = ("auto", *method.capabilities().layouts)
    if layout not in layouts:
        raise ContextError(
            f"context_parallel_layout is {layout!r} with method {method.name}, which takes {', '.join(layouts)}"
        )
    if placement not in PLACEMENTS:
        raise ContextError(f"context_parallel_placement is {placement!r}; use one of {', '.join(PLACEMENTS)}")
    if backward not in ("auto", "kv", "queries"):
        raise ContextError(f"backward is {backward!r}; use one of auto, kv, queries")
    if placement != "collect_intra" and not method.capabilities().teams:
        raise ContextError(
            f"context_parallel_placement is {placement} and method {method.name} has no teams to place; "
            "use collect_intra"
        )


def _checked(documents: tuple[int, ...] | None, seq_len: int) -> tuple[int, ...] | None:
    """Boundaries as integers, so that plans of the same ones are one."""
    if documents is not None:
        documents = tuple(int(x) for x in documents)
        ascending = all(a < b for a, b in pairwise(documents))
        if len(documents) < 2 or documents[0] != 0 or documents[-1] != seq_len or not ascending:
            raise ContextError(f"documents must ascend from 0 to seq_len {seq_len} and are {documents}")
    return documents
