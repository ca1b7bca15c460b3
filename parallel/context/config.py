"""Configuration of context parallelism."""

from dataclasses import dataclass
from typing import Any, Literal

from kernels.backends import BackendName, SoftmaxBackendName
from parallel.context.layout import BALANCED, ContextError
from parallel.context.methods import MethodName, SoftmaxMethodName, method_of
from parallel.context.plan import make_plan

HybridLayout = Literal["contiguous", "zigzag"]
HYBRID_LAYOUTS: tuple[HybridLayout, ...] = ("contiguous", "zigzag")


@dataclass(frozen=True, kw_only=True)
class ContextConfig:
    """Context parallelism: how ranks share the attention of one sequence."""

    context_parallel_method: MethodName = "striped"
    """Layout and communication of the attention; none is plain SDPA in one process, to compare
    with. exchange sends each rank just the keys that its queries see: for packed documents,
    windows and several nodes. For linear attention: lasp, or lasp2, which pass states on, or
    ulysses. auto takes the method that the cost model predicts fastest on the cluster, once, as
    the run starts (docs/concepts/planner.md)."""
    context_parallel_layout: Literal["auto", "contiguous", "striped", "zigzag", "balanced"] = "auto"
    """Layout, by which ranks own tokens, for the methods that take any; auto is zigzag if a
    causal mask must be balanced. balanced, the default of exchange, follows the documents of
    each micro-batch: equal tokens and work on every rank. Under full attention striped and
    zigzag bring nothing, as layouts and as methods, and run only if this names them."""
    context_parallel_team_size: int = 1
    """Number of ranks in a team of wallfacer (C), whose square must divide the context-parallel
    size; 1 is a plain ring.
    """
    context_parallel_placement: Literal["collect_intra", "p2p_intra"] = "collect_intra"
    """Ranks that are neighbours, and so share a node, in wallfacer: a team's members, or a
    ring's."""
    context_parallel_ranks_per_node: int | None = None
    """Context-parallel ranks in a node, the inner ring of double_ring; by default as launched,
    or all if unknown."""
    ulysses_degree: int = 1
    """Number of neighbouring ranks that split the heads among them; the method runs over such
    groups. For ulysses it is all ranks."""
    ulysses_head_chunks: int = 1
    """Number of stages (UPipe): each exchanges and attends with a part of the heads, which divides
    the memory of the exchanged q, k, v and out by this number; it must divide the query heads of a
    rank. Softmax attention only."""
    delta_rule_schedule: Literal["auto", "chain", "tree"] = "auto"
    """Rounds by which the states of a delta rule pass between ranks: one rank after the other, or
    in a tree; auto takes the one predicted fastest."""
    cluster: str | None = None
    """TOML file of the cluster that auto chooses for, as in configs/clusters; by default by the
    kind of device.
    """
    attention_backend: BackendName = "auto"
    """Kernel of one attention block; on Hopper and Blackwell auto takes cudnn, for documents and
    where cuDNN is older than 9.15.1 FlashAttention 3 or 4 if installed, else aten, which is
    FlashAttention 2. triton is our kernel for a GPU, which takes all tiles at once. Of linear
    attention: chunked or triton; auto takes triton on a GPU in bfloat16, else chunked."""

    @property
    def title(self) -> str:
        """The method, team size and Ulysses degree in a few words."""
        words = [self.context_parallel_method]
        if self.context_parallel_team_size > 1:
            words.append(f"teams of {self.context_parallel_team_size}")
        if self.ulysses_degree > 1:
            words.append(f"ulysses degree {self.ulysses_degree}")
        if self.ulysses_head_chunks > 1:
            words.append(f"{self.ulysses_head_chunks} stages of heads")
        return ", ".join(words)

    def plan_arguments(self, ranks_per_node: int | None) -> dict[str, Any]:
        """Return the keyword arguments for ``make_plan`` and ``context_parallel``.

        ``ranks_per_node`` is the launcher's; the configuration's own value has precedence.
        """
        if self.context_parallel_ranks_per_node is not None:
            ranks_per_node = self.context_parallel_ranks_per_node
        return {
            "team_size": self.context_parallel_team_size,
            "layout": self.context_parallel_layout,
            "placement": self.context_parallel_placement,
            "ranks_per_node": ranks_per_node,
            "ulysses_degree": self.ulysses_degree,
            "ulysses_head_chunks": self.ulysses_head_chunks,
            "delta_rule_schedule": self.delta_rule_schedule,
        }

    def check(
        self,
        *,
        seq_len: int,
        size: int,
        heads: int,
        kv_heads: int,
        ranks_per_node: int | None,
        causal: bool = True,
    ) -> None:
        """Check that ``size`` ranks with these heads support this. Needs no processes.

        Under full attention (not ``causal``) a method with a layout for causal masks must be
        forced.

        Raises:
            ContextError: they cannot, with the reason and the fix.
        """
        method = self.context_parallel_method
        if self.cluster is not None and method != "auto":
            raise ContextError(
                f"cluster is {self.cluster}, but context_parallel_method is {method}, which leaves "
                "nothing to choose; leave out --cluster, use method auto, or give --allow-resize"
            )
        defaults = ContextConfig().plan_arguments(None)
        if method in ("none", "auto") and self.plan_arguments(None) != defaults:
            reason = "chooses them itself" if method == "auto" else "takes none"
            raise ContextError(
                f"context_parallel_method is {method}, which {reason}: layout, team size, "
                "placement, ranks per node, ulysses_degree, ulysses_head_chunks and "
                "delta_rule_schedule; leave them out, or choose a method"
            )
        if not causal and self.delta_rule_schedule != "auto":
            raise ContextError(
                f"delta_rule_schedule is {self.delta_rule_schedule}, but full attention has no "
                "delta rule; leave out delta_rule_schedule"
            )
        if method in ("none", "auto"):
            return

        if not causal:
            self._check_full_layout()
        arguments = self.plan_arguments(ranks_per_node) | {"causal": causal}
        plan = make_plan(method, seq_len=seq_len, size=size, **arguments)
        plan.geometry.check_heads(heads, kv_heads)

    def _check_full_layout(self) -> None:
        """Raise ContextError if the layout only balances a causal mask, unless it was forced."""
        method = self.context_parallel_method
        layout = method_of(method).layout(causal=False)
        if layout not in ("contiguous", BALANCED) and self.context_parallel_layout == "auto":
            raise ContextError(
                f"context_parallel_method is {method}, whose layout balances a causal mask, and "
                "this attention is full: every rank has the same work in any layout, and "
                f"{layout} brings nothing; use ring, wallfacer, double_ring, allgather or ulysses, "
                f"or force it with context_parallel_layout {layout}"
            )


@dataclass(frozen=True, kw_only=True)
class FullContextConfig(ContextConfig):
    """Context parallelism of full attention: how ranks share one sequence.

    Every token attends to all.
    """

    context_parallel_method: SoftmaxMethodName = "ring"
    """Communication of the attention; none is plain SDPA in one process, to compare with.
    striped and zigzag, which balance a causal mask, bring nothing here. auto takes the method
    that the cost model predicts fastest on the cluster, once, as the run starts
    (docs/concepts/planner.md)."""
    attention_backend: SoftmaxBackendName = "auto"
    """Kernel of one attention block; on Hopper and Blackwell auto takes cudnn, for documents and
    where cuDNN is older than 9.15.1 FlashAttention 3 or 4 if installed, else aten, which is
    FlashAttention 2. triton is our kernel for a GPU, which takes all tiles at once."""


@dataclass(frozen=True, kw_only=True)
class HybridConfig:
    """Context parallelism of the softmax attention layers in a model with linear attention.

    Both kinds of layers work on the same tokens and ranks, but want different layouts: states pass
    in the fewest hops along contiguous blocks, and a causal mask is balanced by zigzag.
    """

    hybrid_softmax_method: Literal["ring", "allgather", "ulysses"] = "ring"
    """Communication of the layers of softmax attention; context_parallel_method is for the
    layers of linear attention."""
    hybrid_softmax_layout: Literal["auto", "contiguous", "zigzag"] = "auto"
    """Layout of the layers of softmax attention. If linear attention has contiguous tokens, a
    causal mask gives the last rank most work; zigzag balances it, and an all-to-all before and
    after the attention goes from one layout to the other. auto takes the layout that the cost
    model predicts faster on the cluster. With context_parallel_layout zigzag all layers have
    it, and no token moves."""

    def context(self, layout: HybridLayout) -> ContextConfig:
        """Return the configuration of the softmax attention layers in the given layout."""
        zigzag_ring = self.hybrid_softmax_method == "ring" and layout == "zigzag"
        method = "zigzag" if zigzag_ring else self.hybrid_softmax_method
        return ContextConfig(context_parallel_method=method, context_parallel_layout=layout)

    def layouts(self, linear: str) -> tuple[HybridLayout, ...]:
        """Return the layouts that the softmax attention may choose from.

        ``linear`` is the context_parallel_layout of the layers of linear attention.
        """
        if linear == "zigzag":
            return ("zigzag",)
        if self.hybrid_softmax_method == "ulysses":
            return ("contiguous",)
        if self.hybrid_softmax_layout == "auto":
            return HYBRID_LAYOUTS
        return (self.hybrid_softmax_layout,)

    def check(self, linear: str, *, seq_len: int, size: int, heads: int, kv_heads: int) -> None:
        """Check that ``size`` ranks support this configuration beside a ``linear`` layout.

        Raises:
            ContextError: they cannot, with the reason and the fix.
        """
        method = self.hybrid_softmax_method
        layout = self.hybrid_softmax_layout
        if linear == "zigzag" and (layout == "contiguous" or method == "ulysses"):
            raise ContextError(
                "context_parallel_layout is zigzag, which all layers have, and "
                f"hybrid_softmax_layout is {layout} with hybrid_softmax_method {method}; use auto "
                "or zigzag with ring or allgather, or context_parallel_layout contiguous"
            )
        if layout == "zigzag" and method == "ulysses":
            raise ContextError(
                "hybrid_softmax_layout is zigzag and hybrid_softmax_method is ulysses, after whose "
                "exchange of heads every rank has the whole sequence and the same work in any "
                "layout; use contiguous or auto, or method ring or allgather"
            )
        for candidate in self.layouts(linear):
            self.context(candidate).check(
                seq_len=seq_len, size=size, heads=heads, kv_heads=kv_heads, ranks_per_node=None
            )
