"""Sizes of a model, of a training step and of its division over ranks, for the cost model."""

from dataclasses import dataclass, field

from kernels.loss import LOSS_CHUNK
from parallel.context.layout import Window
from parallel.context.plan import Plan
from parallel.data import Strategy
from parallel.pipeline.stages import PipelineConfig
from planner.layers.delta_cost import DeltaShape
from train.optimizers.base import NO_PIECE, MatrixCost, StepPiece


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """Sizes of a model and of one training step, before tensor parallelism."""

    layers: int
    hidden: int
    ffn: int
    gated: bool
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    parameters: int
    outside: int
    """Number of parameters of the embeddings, and of an output projection with its own weights."""
    matrix_weights: int
    """Number of weights in all matmuls, including the output projection."""
    element_size: int
    micro_batch: int
    micro_batches: int
    window: Window | None = None
    """Numbers of keys that a query sees before and after its own, in layers with a window."""
    windowed_layers: int = 0
    trained: int | None = None
    """Number of trained parameters; the others are frozen in the compute dtype. None means all."""
    softmax_layers: int = 0
    """Number of a hybrid's softmax layers; the plan describes them only beside a delta rule."""
    softmax_seconds: float = 0.0
    """Seconds of a softmax layer's attention forward and backward, in its own layout."""
    softmax_last: bool = False
    """True if the last layer beside a delta rule has softmax attention."""
    delta: DeltaShape | None = None
    """Gated delta rule of all layers but the softmax ones; the plan then describes both kinds."""
    gate: float = 0.0
    """Number of additional tensors of the queries' size that softmax attention keeps for its output
    gate and its norms.
    """
    residual: float = 6.0
    """Number of tensors of the residual stream's size that a layer keeps: residuals, and inputs of
    norms and matmuls.
    """
    norm_streams: float = 2.0
    """Number of tensors of the residual stream's size in the backward pass of the last norm."""
    normed: float = 0.0
    """Number of additional copies of a delta rule's output that its norm keeps if no kernel fuses
    it.
    """
    first_layer: float = 0.0
    """Number of additional tensors of the residual stream's size that the first layer keeps, since
    its queries and keys have twice the width.
    """
    modulated: int = 0
    """Number of tensors of the residual stream's size that hold per-token modulation: a DiT's
    shifts, scales and gates.
    """
    replicated: int = 0
    """Number of parameters that tensor parallelism does not split."""
    averages: int = 0
    """Bytes per parameter of the moving averages of the weights (EMA); 0 without them."""
    wide_logits: int = LOSS_CHUNK["cuda"]
    """Number of low-precision logits that exist in float32 at the same time."""
    workspaces: int = 0
    """Bytes of the workspaces of cuBLAS and cuBLASLt; 0 on a CPU."""

    def tokens(self, plan: Plan) -> int:
        """Return the number of tokens of a micro-batch on a context-parallel rank."""
        return self.micro_batch * plan.local_len

    @property
    def trained_share(self) -> float:
        """Return the share of the parameters that have gradients and an optimizer's state."""
        return 1.0 if self.trained is None else self.trained / self.parameters


@dataclass(frozen=True, kw_only=True)
class OptimizerShape:
    """State and work of an optimizer for a model, by default of one with two float32 states."""

    state_bytes: float = 8
    """Bytes of state per trained parameter of the layers, averaged over them."""
    outside_state_bytes: float = 8
    """The same for the parameters outside the layers."""
    matrices: tuple[MatrixCost, ...] = ()
    """Weights of the largest pipeline stage that a step takes whole."""
    piece: StepPiece = NO_PIECE
    """Elements of a shard that are updated at once, if this takes temporary tensors."""
    largest: int = 0
    """Number of elements of the largest weight that is updated in pieces."""


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """Division of the work over ranks in all dimensions but cp, and settings that save memory."""

    pp: int = 1
    dp: int = 1
    tp: int = 1
    strategy: Strategy = "zero3"
    copies: int = 1
    recompute: str = "none"
    offload: bool = False
    optimizer: OptimizerShape = OptimizerShape()
    moments_on_host: bool = False
    loss_chunk: int = 0
    ffn_chunk: int = 0
    layer_chunk: int = 0
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    compiled: bool = False
    float8_recipe: str = ""
    """Granularity of the scales of 8-bit matmuls, a key of ``planner.layers.float8.SPEEDUP``; empty
    for matmuls in the compute dtype.
    """

    def stage_layers(self, work: StepShape) -> int:
        """Return the number of layers of the largest pipeline stage."""
        return -(-work.layers // self.pp)

    def num_shards(self, plan: Plan) -> int:
        """Return the number of ranks that shard gradients and the optimizer's state."""
        if self.strategy in ("ddp", "legacy_ddp"):
            return 1
        return self.dp * plan.size // self.copies
