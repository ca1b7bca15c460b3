"""Context parallelism: attention to one sequence sharded over ranks, by a layout, a plan and an
executor.

plan = make_plan("striped", seq_len=4096, size=4)          # no processes needed
cp = context_parallel("striped", seq_len=4096, group=group)
out = cp.attend(q, k, v)                                    # [B, T_local, H, D], differentiable
"""

from parallel.context.api import ContextParallel, context_parallel
from parallel.context.config import ContextConfig
from parallel.context.geometry import Geometry, PlanOptions
from parallel.context.layout import ContextError
from parallel.context.methods import LINEAR_METHODS, METHODS, STATE_METHODS
from parallel.context.methods.base import Round
from parallel.context.plan import Plan, make_plan
from parallel.context.traffic import Cost, Traffic

__all__ = [
    "LINEAR_METHODS",
    "METHODS",
    "STATE_METHODS",
    "ContextConfig",
    "ContextError",
    "ContextParallel",
    "Cost",
    "Geometry",
    "Plan",
    "PlanOptions",
    "Round",
    "Traffic",
    "context_parallel",
    "make_plan",
]
