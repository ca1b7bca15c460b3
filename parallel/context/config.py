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
    """Method: layout and communication of the attention. none is plain SDPA in one process, as a
    baseline. exchange sends each rank only the keys that its queries see, for packed documents,
    windows and several nodes. allgather_q sends queries to keys that stay, for layers in slices on
    more ranks than heads. Linear attention runs with lasp or lasp2, which pass states on, or
    with ulysses. auto takes the method that the cost model predicts to be the fastest on the
    cluster, once, when the run starts (docs/concepts/planner.md)."""
    context_parallel_layout: Literal["auto", "contiguous", "striped", "zigzag", "balanced"] = "auto"
    """Layout: which rank owns which tokens, for methods that support several layouts; auto is
    zigzag if a causal mask must be balanced. balanced, the default of exchange, follows the
    documents of each micro-batch and gives all ranks the same number of tokens and equal work.
    Under full attention striped and zigzag have no advantage, as layouts or as methods, so they
    run only if this option names them."""
    context_parallel_team_size: int = 1
    """Number of ranks per wallfacer team (C); its square must divide the context-parallel size.
    1 is a plain ring.
    """
    context_parallel_placement: Literal["collect_intra", "p2p_intra"] = "collect_intra"
    """Ranks of wallfacer that are neighbours, and therefore share a node: the members of a team
    (collect_intra) or of a ring (p2p_intra)."""
    context_parallel_ranks_per_node: int | None = None
    """Number of context-parallel ranks per node, for double_ring and exchange; by default the
    launcher's number, or all ranks if it is unknown."""
    ulysses_degree: int = 1
    """Number of neighbouring ranks that split the heads among themselves. The method treats each
    such group as one rank. Method ulysses uses all ranks."""
    ulysses_head_chunks: int = 1
    """Number of stages (UPipe). Each stage exchanges and attends with a part of the heads, so the
    memory of the exchanged q, k, v and out is divided by this number. It must divide the number of
    query heads of a rank after the exchange. For softmax attention only."""
    delta_rule_schedule: Literal["auto", "chain", "tree"] = "auto"
    """Schedule for passing the states of a delta rule between ranks: from each rank to the next
    (chain), or in a tree (tree); auto takes the schedule that is predicted to be faster."""
    cluster: str | None = None
    """TOML file that describes the cluster for which auto chooses, such as one of configs/clusters;
    by default the file for this kind of device.
    """
    attention_backend: BackendName = "auto"
    """Kernel that computes one attention block. On Hopper and Blackwell GPUs auto takes cudnn or,
    for packed documents or a cuDNN older than 9.15.1, FlashAttention 3 or 4 if it is installed;
    otherwise it takes aten, which is FlashAttention 2. triton is Longmesh's own GPU kernel, which
    computes all tiles at once. Linear attention has chunked and triton; auto takes triton on a
    GPU with a 16-bit dtype, otherwise chunked."""

    @property
    def title(self) -> str:
        """The method in a few words, with the team size, Ulysses degree and stages above 1."""
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

        ``ranks_per_node`` is the launcher's value; the configuration's own value takes precedence.
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
        """Check that ``size`` ranks can run this configuration with these heads.

        No processes are needed. Under full attention (not ``causal``), a method whose layout
        balances a causal mask is refused, unless the configuration names a layout.

        Raises:
            ContextError: the ranks cannot run it; the message has the reason and the fix.
        """
        method = self.context_parallel_method
        if self.cluster is not None and method != "auto":
            raise ContextError(
                f"cluster is {self.cluster}, but it only serves to choose a method, and "
                f"context_parallel_method is already {method}; leave out --cluster, set "
                "--context-parallel-method auto, or give --allow-resize"
            )
        defaults = ContextConfig().plan_arguments(None)
        if method in ("none", "auto") and self.plan_arguments(None) != defaults:
            reason = "chooses by itself" if method == "auto" else "does not use"
            raise ContextError(
                f"context_parallel_method is {method}, but an option is set that it {reason}: "
                "layout, team size, placement, ranks per node, ulysses_degree, ulysses_head_chunks "
                "or delta_rule_schedule; leave these options out, or set context_parallel_method "
                "to a specific method"
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
        """Raise ContextError if the layout only balances a causal mask and no option forces it."""
        method = self.context_parallel_method
        layout = method_of(method).layout(causal=False)
        if layout not in ("contiguous", BALANCED) and self.context_parallel_layout == "auto":
            raise ContextError(
                f"context_parallel_method is {method}, but its layout balances a causal mask, and "
                "under full attention every rank has the same work in any layout; use ring, "
                f"wallfacer, double_ring, allgather or ulysses, or force {method} with "
                f"context_parallel_layout {layout}"
            )


@dataclass(frozen=True, kw_only=True)
class FullContextConfig(ContextConfig):
    """Context parallelism of full attention: how ranks share one sequence.

    Every token attends to all tokens.
    """

    context_parallel_method: SoftmaxMethodName = "ring"
    """Communication of the attention; none is plain SDPA in one process, as a baseline. striped
    and zigzag, which balance a causal mask, have no advantage here. auto takes the method that
    the cost model predicts to be the fastest on the cluster, once, when the run starts
    (docs/concepts/planner.md)."""
    attention_backend: SoftmaxBackendName = "auto"
    """Kernel that computes one attention block. On Hopper and Blackwell GPUs auto takes cudnn or,
    for packed documents or a cuDNN older than 9.15.1, FlashAttention 3 or 4 if it is installed;
    otherwise it takes aten, which is FlashAttention 2. triton is Longmesh's own GPU kernel, which
    computes all tiles at once."""


@dataclass(frozen=True, kw_only=True)
class HybridConfig:
    """Context parallelism of the softmax attention layers in a model with linear attention.

    Both kinds of layers work on the same tokens and ranks, but need different layouts: states pass
    in the fewest hops if each rank has one contiguous block, and zigzag balances a causal mask.
    """

    hybrid_softmax_method: Literal["ring", "allgather", "ulysses"] = "ring"
    """Communication of the softmax attention layers; context_parallel_method is for the linear
    attention layers."""
    hybrid_softmax_layout: Literal["auto", "contiguous", "zigzag"] = "auto"
    """Layout of the softmax attention layers. If the linear attention layers have contiguous
    tokens, a causal mask would give the last rank the most work; zigzag balances the work, and an
    all-to-all before and after the attention changes the layout. auto takes the layout that the
    cost model predicts to be faster on the cluster. With context_parallel_layout zigzag all layers
    have the zigzag layout, and no tokens move."""

    def context(self, layout: HybridLayout) -> ContextConfig:
        """Return the configuration of the softmax attention layers in the given layout."""
        zigzag_ring = self.hybrid_softmax_method == "ring" and layout == "zigzag"
        method = "zigzag" if zigzag_ring else self.hybrid_softmax_method
        return ContextConfig(context_parallel_method=method, context_parallel_layout=layout)

    def layouts(self, linear: str) -> tuple[HybridLayout, ...]:
        """Return the layouts that the softmax attention may choose from.

        ``linear`` is the context_parallel_layout of the linear attention layers.
        """
        if linear == "zigzag":
            return ("zigzag",)
        if self.hybrid_softmax_method == "ulysses":
            return ("contiguous",)
        if self.hybrid_softmax_layout == "auto":
            return HYBRID_LAYOUTS
        return (self.hybrid_softmax_layout,)

    def check(self, linear: str, *, seq_len: int, size: int, heads: int, kv_heads: int) -> None:
        """Check that ``size`` ranks support this configuration.

        ``linear`` is the context_parallel_layout of the linear attention layers.

        Raises:
            ContextError: the ranks do not support it; the message has the reason and the fix.
        """
        method = self.hybrid_softmax_method
        layout = self.hybrid_softmax_layout
        if linear == "zigzag" and (layout == "contiguous" or method == "ulysses"):
            raise ContextError(
                "context_parallel_layout is zigzag for all layers, but hybrid_softmax_layout is "
                f"{layout} and hybrid_softmax_method is {method}; set hybrid_softmax_layout to "
                "auto or zigzag and hybrid_softmax_method to ring or allgather, or "
                "context_parallel_layout to contiguous"
            )
        if layout == "zigzag" and method == "ulysses":
            raise ContextError(
                "hybrid_softmax_layout is zigzag, but hybrid_softmax_method is ulysses, with which "
                "every rank has the whole sequence and the same work in any layout; set "
                "hybrid_softmax_layout to contiguous or auto, or hybrid_softmax_method to ring or "
                "allgather"
            )
        for candidate in self.layouts(linear):
            self.context(candidate).check(
                seq_len=seq_len, size=size, heads=heads, kv_heads=kv_heads, ranks_per_node=None
            )
