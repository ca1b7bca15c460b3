"""Context parallelism: one sequence's attention shared by several ranks, by a layout, a plan and one executor.

plan = make_plan("striped", seq_len=4096, size=4)          # no processes needed
cp = context_parallel("striped", seq_len=4096, group=group)
out = cp.attend(q, k, v)                                    # [B, T_local, H, D], differentiable
"""

from parallel.context.api import ContextParallel, context_parallel
from parallel.context.config import ContextConfig
from parallel.context.errors import ContextError
from parallel.context.plan import Cost, Plan, Round, make_plan
from parallel.context.registry import METHODS

__all__ = [
    "METHODS",
    "ContextConfig",
    "ContextError",
    "ContextParallel",
    "Cost",
    "Plan",
    "Round",
    "context_parallel",
    "make_plan",
]
