"""The gated delta rule by heads (DeepSpeed Ulysses): an exchange gives a rank the whole sequence of some heads.

Value heads follow their key heads. Bytes grow with the tokens, where those of states do not.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.delta.rule import forgetting
from parallel.context.errors import ContextError
from parallel.context.heads import HeadExchange
from parallel.context.linear.segments import state_plan
from runtime.tensors import Handles


@dataclass(eq=False)
class DeltaHeads:
    """The gated delta rule of one rank that exchanges heads with all others, for any plan of one contiguous geometry.

    Raises:
        ContextError: another method than ulysses, or a layout whose exchanged tokens are not in order.
    """

    exchange: HeadExchange
    backend: str

    def __post_init__(self) -> None:
        self.geometry = self.exchange.transport.geometry
        method, layout = self.geometry.method, self.geometry.options.layout
        if not method.splits_heads or layout != "contiguous":
            raise ContextError(
                f"delta_rule_schedule is ulysses with context_parallel_method {method.name} in the layout {layout}; it "
                "needs method ulysses in the layout contiguous; auto passes states, which any method does"
            )
        self.handle = _heads.add(self)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, plan: Tensor) -> Tensor:
        """Return out ``[B, T, H, E]`` in v's dtype, zero in padding; arguments as of ``DeltaAttention.attend``."""
        ranks, (key_heads, heads) = self.geometry.size, (k.shape[2], v.shape[2])
        if key_heads % ranks:
            raise ContextError(
                f"attend_delta: delta_rule_schedule ulysses splits key heads, and {ranks} ranks cannot split the "
                f"{key_heads} of {heads} value heads; use a number of ranks that divides them, or auto to pass states"
            )
        gates = torch.cat([g.view(*g.shape[:3], -1), beta[..., None]], -1)
        length = self.geometry.seq_len
        q, k, v, gates = (self.exchange.to_heads(x)[:, :length] for x in (q, k, v, gates))
        begins = torch.ops.longmesh.document_begins(q.detach(), self.handle, plan)
        decays = gates[..., :-1].masked_fill(begins[:, None, None], -torch.inf).to(g.dtype)
        decays = decays if g.ndim == 4 else decays[..., 0]
        out = torch.ops.longmesh.delta_rule(q, k, v, decays, gates[..., -1].to(beta.dtype), None, self.backend)[0]
        return self.exchange.to_tokens(F.pad(out, (0, 0, 0, 0, 0, self.geometry.padded_len - length)))


_heads: Handles[DeltaHeads] = Handles()


@torch.library.custom_op("longmesh::document_begins", mutates_args=())
def _begins(like: Tensor, handle: int, plan: Tensor) -> Tensor:
    """Return whether a document begins at a token after the first, bool ``[T]``; in an op, as only here is a plan."""
    found = state_plan("attend_delta", plan, _heads[handle].geometry)
    return forgetting(torch.zeros(1, like.shape[1], device=like.device), found.documents)[0].isinf()


@_begins.register_fake
def _(like: Tensor, handle: int, plan: Tensor) -> Tensor:
    return like.new_empty(like.shape[1], dtype=torch.bool)
