"""AdamW with the kernel of NVIDIA's apex, and torch's state.

``apex.optimizers.FusedAdam`` takes parameters by their addresses, which a DTensor does not have,
and counts the steps of a whole group. So its kernel, ``multi_tensor_adam``, is called here over
each rank's shards, and every parameter has the same state as in torch's AdamW, so that checkpoints
are the same. Weights differ in the last bits from those of torch's kernel, because apex adds the
decay to the update before it subtracts both from the weight, and corrects the moments in float32.
No other module imports apex.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parallel.data import to_local
from runtime.errors import UserError

ADAM_W = 1
"""Kernel argument that selects decoupled weight decay; 0 would be L2 regularisation."""
BIAS_CORRECTION = 1
"""Kernel argument that makes it correct the moments for their start at zero."""
EMULATED = False
"""True if the kernel is an emulation on a CPU, as in tests."""
FIX = (
    "build apex on the machine of the run (APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install "
    "--no-build-isolation git+https://github.com/NVIDIA/apex; the package apex on PyPI is a "
    "different one), or leave out --optimizer-backend: torch's kernel does the same work"
)


def apex_kernel() -> Callable[..., None]:
    """Return the kernel, a function of (no-op flag, [gradients, weights, moments, squares], ...).

    Raises UserError if apex is not installed, is another package of that name, lacks its CUDA
    extensions, or was built for another torch.
    """
    try:
        import amp_C
        from apex.multi_tensor_apply import multi_tensor_applier

        return partial(multi_tensor_applier, amp_C.multi_tensor_adam)
    except Exception as error:  # another package or a build for another torch can raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            "optimizer_backend is apex, but NVIDIA's apex with its CUDA extensions cannot be "
            f"imported ({reason}); {FIX}"
        ) from error


class ApexAdamW(torch.optim.AdamW):
    """AdamW with apex's kernel; step counts are in host memory, so reading them needs no wait."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._kernel = apex_kernel()
        self._no_op: dict[torch.device, Tensor] = {}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; unlike AdamW's, it takes no closure."""
        for group in self.param_groups:
            # One launch takes only parameters with equal step counts.
            launches = defaultdict[int, list[tuple[Tensor, ...]]](list)
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not self.state[p]:
                    self.state[p] = {
                        "step": torch.zeros((), dtype=torch.float32, device="cpu"),
                        "exp_avg": torch.zeros_like(p),
                        "exp_avg_sq": torch.zeros_like(p),
                    }
                state = self.state[p]
                state["step"] += 1
                # An empty shard at a list's end would keep the kernel from its last launch.
                if to_local(p).numel():
                    tensors = (p.grad, p, state["exp_avg"], state["exp_avg_sq"])
                    launches[int(state["step"])].append(tuple(map(to_local, tensors)))

            for steps, parameters in launches.items():
                # [gradients, weights, first moments, second moments]
                lists = [list(tensors) for tensors in zip(*parameters, strict=True)]
                device = lists[0][0].device
                if device not in self._no_op:
                    self._no_op[device] = torch.zeros(1, dtype=torch.int, device=device)
                settings = (group["lr"], *group["betas"], group["eps"], steps)
                modes = (ADAM_W, BIAS_CORRECTION)
                self._kernel(self._no_op[device], lists, *settings, *modes, group["weight_decay"])
