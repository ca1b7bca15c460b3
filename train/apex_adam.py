"""AdamW that steps by NVIDIA apex's kernel; the one module that imports apex.

``apex.optimizers.FusedAdam`` takes parameters by their addresses, which a DTensor has none of, and counts the steps of
a whole group. So its kernel, ``multi_tensor_adam``, is called here over each rank's own shards, and every parameter has
the state that torch's AdamW gives it: checkpoints are the same. The kernel adds the decay to the update before it takes
both off the weight, and corrects the moments in float32: the last bits are not those of torch's kernel.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from parallel.data import to_local
from runtime.errors import UserError

Backend = Literal["torch", "apex"]
ADAM_W, BIAS_CORRECTION = 1, 1
"""The kernel's mode of decoupled weight decay, where 0 is L2 regularisation, and moments corrected for their start."""
EMULATED = False
"""If set, the kernel runs on a CPU: that of tests does."""
FIX = (
    "build it where the run is (APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation "
    "git+https://github.com/NVIDIA/apex; the index's package of that name is another one), or leave optimizer_backend "
    "out, whose torch does the same work"
)


def load() -> Callable[..., None]:
    """Return the kernel, for (no-op flag, [gradients, weights, moments, squares], settings...).

    Raises:
        UserError: apex is missing, another package, without its CUDA extensions, or built for another torch.
    """
    try:
        import amp_C
        from apex.multi_tensor_apply import multi_tensor_applier

        return partial(multi_tensor_applier, amp_C.multi_tensor_adam)
    except Exception as error:  # a build for another torch raises ImportError or OSError, another package anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"optimizer_backend is apex, and NVIDIA's apex with its CUDA extensions is not here ({reason}); {FIX}"
        ) from error


class ApexAdamW(torch.optim.AdamW):
    """AdamW with apex's kernel and torch's state, but for the counts of steps, which lie in host memory.

    There they are read without waiting for the device.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._kernel, self._no_op = load(), dict[torch.device, Tensor]()

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; a closure, which AdamW would call, is not taken."""
        for group in self.param_groups:
            launches = defaultdict[int, list[tuple[Tensor, ...]]](list)  # a launch has one count of steps
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not self.state[p]:
                    moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                    self.state[p] = {"step": torch.zeros((), dtype=torch.float32, device="cpu")} | moments
                state = self.state[p]
                state["step"] += 1
                if to_local(p).numel():  # an empty shard, at a list's end, would keep the kernel from its last launch
                    own = (p.grad, p, state["exp_avg"], state["exp_avg_sq"])
                    launches[int(state["step"])].append(tuple(map(to_local, own)))
            for count, tensors in launches.items():
                self._launch(group, count, [list(alike) for alike in zip(*tensors, strict=True)])

    def _launch(self, group: dict[str, Any], count: int, lists: list[list[Tensor]]) -> None:
        device, settings = lists[0][0].device, (*group["betas"], group["eps"])
        if device not in self._no_op:
            self._no_op[device] = torch.zeros(1, dtype=torch.int, device=device)
        decay = group["weight_decay"]
        self._kernel(self._no_op[device], lists, group["lr"], *settings, count, ADAM_W, BIAS_CORRECTION, decay)
