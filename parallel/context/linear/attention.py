"""Calls of a layer of the gated delta rule, over one rank's shard of every sequence, by states or by heads."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.delta.convolution import check as check_convolution
from kernels.delta.rule import check, gates_with_resets
from parallel.context.layout import ContextError
from parallel.context.linear.delta import DeltaExecutor
from parallel.context.linear.halo import Convolution
from parallel.context.linear.segments import state_plan
from parallel.context.plan import PLANS, Plan, PlanHandle
from parallel.context.transport import HeadExchange
from runtime.tensors import Handles


@dataclass(eq=False)
class DeltaHeads:
    """The rule of one rank that exchanges heads with all others (DeepSpeed Ulysses), for any plan of one geometry.

    Each gets the whole sequence of some value heads with their key heads. Bytes grow with the tokens, where those of
    states do not.

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
    return gates_with_resets(torch.zeros(1, like.shape[1], device=like.device), found.documents)[0].isinf()


@_begins.register_fake
def _(like: Tensor, handle: int, plan: Tensor) -> Tensor:
    return like.new_empty(like.shape[1], dtype=torch.bool)


class DeltaAttention:
    """The gated delta rule and its convolution, for any layout whose ranks hold consecutive tokens.

    Ranks pass states on, whatever the method of the softmax attention; a document that lies on one rank sends nothing.
    Or, where asked, they exchange heads.
    """

    def __init__(
        self, executor: DeltaExecutor | DeltaHeads, convolution: Convolution, plan: Plan, handle: PlanHandle
    ) -> None:
        """Bind the operators of one rank to a plan and its handle."""
        self._executor, self._convolution = executor, convolution
        self._local_len, self._handle = plan.local_len, handle

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, mask: PlanHandle | None = None
    ) -> Tensor:
        """Compute the gated delta rule over the whole sequence; differentiable, collective.

        ``with_state`` also returns the final state.

        Args:
            q, k, v, g, beta: as for ``kernels.delta.rule.delta_rule``, with T_local tokens.
            mask: the plan of these sequences, another ``handle``; by default the one bound.

        Returns:
            ``[B, T_local, H, E]`` in v's dtype, zero in padding.

        Raises:
            ContextError: a striped layout, a window or a full mask; shapes, dtypes or heads that do not fit.
        """
        plan = self._checked(q, k, v, g, beta, mask)
        if isinstance(self._executor, DeltaHeads):
            return self._executor.attend(q, k, v, g, beta, plan)
        out: Tensor = torch.ops.longmesh.delta_attention(q, k, v, g, beta, self._executor.handle, plan)[0]
        return out

    def with_state(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, mask: PlanHandle | None = None
    ) -> tuple[Tensor, Tensor]:
        """Do as ``attend`` without a gradient, for ranks that pass states on.

        Returns:
            Out, and the state ``[B, H, D, E]`` after the last document on the rank that ends it, zeros on the others.
        """
        assert isinstance(self._executor, DeltaExecutor), "ranks that exchange heads know no state of all"
        plan = self._checked(q, k, v, g, beta, mask)
        out, kept = torch.ops.longmesh.delta_attention(q, k, v, g, beta, self._executor.handle, plan)
        return out, self._executor.final(PLANS[plan], kept, k, v)

    def _checked(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, mask: PlanHandle | None) -> Tensor:
        self._check_length("attend_delta", "q", q)
        try:
            check((q, k, v, g, beta))
        except ValueError as error:
            raise ContextError(f"attend_delta: {error}") from error
        return (mask or self._handle).tensor

    def convolve(self, x: Tensor, weight: Tensor, mask: PlanHandle | None = None) -> Tensor:
        """Compute ``causal_convolution`` of kernels/delta/convolution.py in each document; differentiable, collective.

        Args:
            x: ``[B, T_local, C]``.
            weight: ``[C, K]``, the last of each row for the token itself.
            mask: as for ``attend``.

        Returns:
            ``[B, T_local, C]`` in x's dtype, zero in padding.

        Raises:
            ContextError: as ``attend``.
        """
        self._check_length("convolve", "x", x)
        try:
            check_convolution(x, weight)
        except ValueError as error:
            raise ContextError(f"convolve: {error}") from error
        plan = (mask or self._handle).tensor
        out: Tensor = torch.ops.longmesh.context_convolution(x, weight, self._convolution.handle, plan)[0]
        return out

    def _check_length(self, called: str, name: str, x: Tensor) -> None:
        if x.shape[1] != self._local_len:
            raise ContextError(
                f"{called}: {name} {tuple(x.shape)} does not fit a plan of {self._local_len} local positions; "
                "pass [B, T_local, heads, D], or channels"
            )
