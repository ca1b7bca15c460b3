"""The functions that a gated delta rule layer calls on one rank's shard of every sequence."""

from torch import Tensor

from kernels.delta.convolution import check as check_convolution
from kernels.delta.rule import check
from parallel.context.layout import ContextError
from parallel.context.linear.delta import DeltaExecutor
from parallel.context.linear.halo import Convolution
from parallel.context.ops import context_convolution, delta_attention
from parallel.context.plan import PLANS, Plan, PlanHandle


class DeltaAttention:
    """Gated delta rule and its convolution, for any layout whose ranks hold consecutive tokens.

    Ranks pass states on, whatever the method of the softmax attention: the delta rule needs only
    the layout. A document that lies on one rank needs no communication.
    """

    def __init__(
        self, executor: DeltaExecutor, convolution: Convolution, plan: Plan, handle: PlanHandle
    ) -> None:
        """Bind the operators of one rank to a plan and its handle."""
        self._executor = executor
        self._convolution = convolution
        self._local_len = plan.local_len
        self._handle = handle

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        mask: PlanHandle | None = None,
    ) -> Tensor:
        """Compute the gated delta rule over the whole sequence; differentiable, collective.

        ``with_state`` also returns the final state.

        Args:
            q, k, v, g, beta: as for ``kernels.ops.delta_rule``, with T_local tokens.
            mask: handle of the plan for these sequences; by default the bound plan.

        Returns:
            ``[B, T_local, H, E]`` in v's dtype, zero in padding.

        Raises:
            ContextError: the layout is striped; the mask is full or has a window; or shapes, dtypes
                or heads do not fit.
        """
        plan = self._checked(q, k, v, g, beta, mask)
        out, _ = delta_attention(self._executor, q, k, v, g, beta, plan)
        return out

    def with_state(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute ``attend`` and the final state, without a gradient.

        Returns:
            out, and the state ``[B, H, D, E]`` after the last document on the rank where that
            document ends; zeros on the other ranks.
        """
        plan = self._checked(q, k, v, g, beta, None)
        out, saved = delta_attention(self._executor, q, k, v, g, beta, plan)
        return out, self._executor.final(PLANS[plan], saved, k, v)

    def _checked(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, mask: PlanHandle | None
    ) -> Tensor:
        self._check_length("attend_delta", "q", q)
        try:
            check((q, k, v, g, beta))
        except ValueError as error:
            raise ContextError(f"attend_delta: {error}") from error
        return (mask or self._handle).tensor

    def convolve(self, x: Tensor, weight: Tensor, mask: PlanHandle | None = None) -> Tensor:
        """Compute a short causal convolution in each document; differentiable, collective.

        The result equals ``causal_convolution`` of kernels/delta/convolution.py on the whole
        sequence.

        Args:
            x: ``[B, T_local, C]``.
            weight: ``[C, K]``; the last number of each row is for the token itself.
            mask: as for ``attend``.

        Returns:
            ``[B, T_local, C]`` in x's dtype, zero in padding.

        Raises:
            ContextError: for the same reasons as ``attend``.
        """
        self._check_length("convolve", "x", x)
        try:
            check_convolution(x, weight)
        except ValueError as error:
            raise ContextError(f"convolve: {error}") from error
        plan = (mask or self._handle).tensor
        return context_convolution(self._convolution, x, weight, plan)

    def _check_length(self, called: str, name: str, x: Tensor) -> None:
        if x.shape[1] != self._local_len:
            raise ContextError(
                f"{called}: {name} {tuple(x.shape)} does not fit a plan of {self._local_len} local "
                "positions; pass [B, T_local, heads, D], or [B, T_local, channels] to a convolution"
            )
