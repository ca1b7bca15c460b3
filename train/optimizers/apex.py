"""AdamW with the kernel of NVIDIA's apex, and torch's state.

``apex.optimizers.FusedAdam`` takes parameters by their addresses, which a DTensor does not have,
and counts the steps of a whole group. So its kernel, ``multi_tensor_adam``, is called here over
each rank's shards, and every parameter has the state that torch's AdamW gives it: checkpoints are
the same. The kernel adds the decay to the update before it takes both off the weight, and corrects
the moments in float32: the last bits are not those of torch's kernel. No other module imports
apex.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parallel.data import to_local
from runtime.errors import UserError

ADAM_W, BIAS_CORRECTION = 1, 1
"""Decoupled weight decay (0 is L2 regularisation), and moments corrected for their start."""
EMULATED = False
"""If set, the kernel runs on a CPU: that of tests does."""
FIX = (
    "build it where the run is (APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation "
    "git+https://github.com/NVIDIA/apex; the index's package of that name is another one), or "
    "leave optimizer_backend out, whose torch does the same work"
)


def apex_kernel() -> Callable[..., None]:
    """Return the kernel, for (no-op flag, [gradients, weights, moments, squares], settings...).

    Raises:
        UserError: apex is missing, another package, without its CUDA extensions, or built for
            another torch.
    """
    try:
        import amp_C
        from apex.multi_tensor_apply import multi_tensor_applier

        return partial(multi_tensor_applier, amp_C.multi_tensor_adam)
    except Exception as error:  # of a build for another torch, or of another package: anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"optimizer_backend is apex, and NVIDIA's apex with its CUDA extensions is not here ({reason}); {FIX}"
        ) from error


class ApexAdamW(torch.optim.AdamW):
    """AdamW with apex's kernel; the counts of steps lie in host memory, read without waiting."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._kernel, self._no_op = apex_kernel(), dict[torch.device, Tensor]()

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; unlike AdamW's, it takes no closure."""
        for group in self.param_groups:
            # A launch has one count of steps.
            launches = defaultdict[int, list[tuple[Tensor, ...]]](list)
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not self.state[p]:
                    moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                    count = torch.zeros((), dtype=torch.float32, device="cpu")
                    self.state[p] = {"step": count} | moments
                state = self.state[p]
                state["step"] += 1
                # An empty shard at a list's end would keep the kernel from its last launch.
                if to_local(p).numel():
                    tensors = (p.grad, p, state["exp_avg"], state["exp_avg_sq"])
                    launches[int(state["step"])].append(tuple(map(to_local, tensors)))

            for steps, parameters in launches.items():
                lists = [list(alike) for alike in zip(*parameters, strict=True)]
                device = lists[0][0].device
                if device not in self._no_op:
                    self._no_op[device] = torch.zeros(1, dtype=torch.int, device=device)
                settings = (group["lr"], *group["betas"], group["eps"], steps)
                modes = (ADAM_W, BIAS_CORRECTION)
                self._kernel(self._no_op[device], lists, *settings, *modes, group["weight_decay"])
