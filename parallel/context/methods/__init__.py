"""Context-parallel methods, keyed by name."""

from typing import TYPE_CHECKING, Literal, TypeAlias

from parallel.context.layout import ContextError
from parallel.context.methods.base import Method
from parallel.context.methods.exchange import Exchange
from parallel.context.methods.one_round import AllGather, AllGatherQ, Lasp, Lasp2, Ulysses
from parallel.context.methods.ring import DoubleRing, Ring, Striped, Zigzag
from parallel.context.methods.wallfacer import WallFacer


def _by_name(*methods: Method) -> dict[str, Method]:
    return {method.name: method for method in methods}


METHODS = _by_name(
    Ring(),
    Striped(),
    Zigzag(),
    AllGather(),
    AllGatherQ(),
    WallFacer(),
    Ulysses(),
    DoubleRing(),
    Exchange(),
)
"""Methods for softmax attention."""
STATE_METHODS = _by_name(Lasp(), Lasp2())
"""Methods for linear attention only."""
LINEAR_METHODS = STATE_METHODS | _by_name(
    *(method for method in METHODS.values() if method.splits_heads)
)
"""All methods for linear attention: they pass states on, or give each rank some heads of the whole
sequence.
"""

if TYPE_CHECKING:
    MethodName: TypeAlias = str
    SoftmaxMethodName: TypeAlias = str
else:  # the choices of a flag
    MethodName = Literal[(*METHODS, *STATE_METHODS, "none", "auto")]
    SoftmaxMethodName = Literal[(*METHODS, "none", "auto")]


def method_of(name: str) -> Method:
    """Return the method of this name; raise ContextError if there is none."""
    methods = METHODS | STATE_METHODS
    if name not in methods:
        raise ContextError(
            f"context_parallel_method {name!r} does not exist; use one of {', '.join(methods)}"
        )
    return methods[name]
