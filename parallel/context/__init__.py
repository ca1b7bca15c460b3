"""Context parallelism: attention over a sequence that ranks share.

    plan = make_plan("striped", seq_len=4096, size=4)          # no processes needed
    cp = context_parallel("striped", seq_len=4096, group=group)
    out = cp.attend(q, k, v)                                    # [B, T_local, H, D], differentiable

The code has layers, and each layer knows only the layers before it in this list. A *layout* says
which rank owns which tokens, a *method* is a layout and rounds of sends, a *geometry* is a method
for one length and number of ranks, and a *plan* adds the mask: which tiles each rank computes in
each round. All of this is arithmetic on the CPU, so a plan can be tested, costed and printed
without processes. A *transport* moves tensors, an *executor* runs a plan over it, an *operator*
wraps the executor for autograd and torch.compile, and the *API* checks arguments. A new method is
therefore a few lines of data, and all methods have the same numerics, since one executor runs them.
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
