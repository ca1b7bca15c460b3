"""Count a training step's memory, and what of it lies on the host, for a model that is given by
numbers.
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from kernels.loss import LOSS_CHUNK
from parallel.context.layout import Window
from parallel.context.plan import Plan
from parallel.context.traffic import Sizes, sizes
from parallel.data import Strategy
from parallel.offload import FETCH_AHEAD, SEVERAL, in_slabs
from parallel.pipeline.stages import PipelineConfig
from planner.attention_cost import backward_buffers
from planner.delta_cost import DeltaShape
from train.optimizers.host import PIECE


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """A model and one step of it, before tensor parallelism."""

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
    """Parameters in no layer: the output projection, where it has weights of its own, and tables of
    embeddings.
    """
    matrix_weights: int
    """Weights of all matrix products, the output projection included."""
    element_size: int
    micro_batch: int
    micro_batches: int
    window: Window | None = None
    """Keys that a query of a layer with a window sees before and after its own."""
    windowed_layers: int = 0
    trained: int | None = None
    """Parameters that are trained, besides which the others lie frozen in element_size bytes; None:
    all.
    """
    softmax_layers: int = 0
    """Layers of a hybrid with softmax attention, which the plan is not of but beside a delta rule.
    """
    softmax_seconds: float = 0.0
    """Seconds of one of them forward and backward, in its own layout."""
    delta: DeltaShape | None = None
    """A gated delta rule, which all layers but the softmax ones have; their attention's plan is of
    both then.
    """
    gate: float = 0.0
    """Widths of the queries that softmax attention keeps more: an output gate's, and of norms in
    float32.
    """
    residual: float = 6.0
    """Widths of the residual stream that a layer keeps: residuals, inputs and outputs of norms and
    projections.
    """
    normed: float = 0.0
    """Widths of a delta rule's output that its norm keeps more, where it is no kernel."""
    first_layer: float = 0.0
    """Such widths that the first layer keeps more: queries and keys of twice the width."""
    modulated: int = 0
    """Widths of the residual stream that a layer looks up for every token: a DiT's shifts, scales
    and gates.
    """
    replicated: int = 0
    """Parameters that tensor parallelism does not divide."""
    averages: int = 0
    """Bytes per parameter of averages of the weights."""
    wide_logits: int = LOSS_CHUNK["cuda"]
    """Logits of a low precision that are there in float32 at once."""
    workspaces: int = 0
    """Bytes that libraries take to work in."""

    @property
    def trained_share(self) -> float:
        """Return the share of the parameters that have gradients and an optimizer's state."""
        return 1.0 if self.trained is None else self.trained / self.parameters


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """Division of the work among ranks, besides the attention's plan."""

    pp: int = 1
    dp: int = 1
    tp: int = 1
    strategy: Strategy = "zero3"
    copies: int = 1
    recompute: str = "none"
    offload: bool = False
    state_bytes: int = 8
    """Bytes of the optimizer's state for a trained parameter."""
    moments_on_host: bool = False
    loss_chunk: int = 0
    ffn_chunk: int = 0
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    compiled: bool = False


class Moments(NamedTuple):
    """Bytes at the moments of a step at one of which its memory peaks; of a layer, in the midst of
    its backward.
    """

    loss: float
    last_layer: float
    second_layer: float
    first_layer: float
    end: float


def memory_of(work: StepShape, plan: Plan, arranged: Arrangement) -> dict[str, float]:
    """Return the bytes of the busiest rank at the peak of a step, by cause.

    In a pipeline the loss is the last stage's and the rest the first one's.
    """
    states, gradients, passing = _weights(work, plan, arranged)
    activations, inside = _activations(work, plan, arranged)
    found = (
        {
            "weights, gradients, optimizer": states + there,
            "activations": held,
            "a layer's backward, or the logits": part + rest + work.workspaces,
        }
        for there, held, part, rest in zip(gradients, activations, passing, inside, strict=True)
    )
    return max(found, key=lambda memory: sum(memory.values()))


def _weights(work: StepShape, plan: Plan, arranged: Arrangement) -> tuple[float, Moments, Moments]:
    """Count weights with the optimizer's state; at each moment gradients, and what is on its way to
    them.

    Gradients of one micro-batch come layer by layer; those of several are there from the second on.
    In a pipeline the first stage has the tables, and the last the output.
    """
    tp, size, trained = arranged.tp, work.element_size, work.trained_share
    output = work.vocab * work.hidden / tp
    outside, layers = work.outside / tp, -(-work.layers // arranged.pp)
    each = ((work.parameters - work.replicated) / tp + work.replicated - outside) / work.layers
    if arranged.pp > 1:
        outside = max(output, outside - output)
    own, shards = layers * each + outside, _shards(plan, arranged)
    moments_here = 0 if arranged.moments_on_host else arranged.state_bytes
    states = (4 + moments_here + work.averages) * own * trained + size * own * (1 - trained)
    copied = shards > 1 or size < 4
    copies = (outside + each if arranged.strategy == "zero3" else own) * size * copied
    gradients = (
        4
        * own
        * trained
        / (1 if arranged.strategy == "zero1" and work.micro_batches > 1 else shards)
    )
    there, waiting = Moments._make([gradients] * 5), 0.0
    if work.micro_batches == 1:  # the output's waits for what else is in no layer
        done = (0, 0, max(0, layers - 2), layers - 1)
        there = Moments._make(
            [*(4 * number * each * trained / shards for number in done), gradients]
        )
        waiting = size * output * trained
    summed = 4 * each * trained * copied  # of the layer after, until the next are summed over ranks
    gathered = (
        size * each * (arranged.strategy == "zero3" and shards > 1)
    )  # of the layer before, ahead
    last = 4 * (1 + 1 / shards) * outside * trained * copied
    if arranged.strategy == "legacy_ddp":
        last = 4 * own * trained  # all in one piece
    pieces = min(2 * PIECE, own / shards) * arranged.state_bytes * arranged.moments_on_host
    passing = Moments(
        loss=0,
        last_layer=waiting + gathered,
        second_layer=waiting + gathered + summed,
        first_layer=waiting + summed,
        end=max(last, pieces) - copies,
    )
    return states / shards + copies, there, passing  # at the end the whole weights are let go of


def _activations(work: StepShape, plan: Plan, arranged: Arrangement) -> tuple[Moments, Moments]:
    """Count what layers keep at each moment, and what the loss or a layer's backward takes besides."""
    tokens, layers = work.micro_batch * plan.local_len, -(-work.layers // arranged.pp)
    stream = tokens * work.hidden * work.element_size / arranged.tp
    flying, ends = (
        arranged.pipeline.in_flight(rank, arranged.pp, work.micro_batches)
        for rank in (0, arranged.pp - 1)
    )
    sent = stream * flying * (arranged.pp > 1)
    one, held = tokens * _kept(work, plan, arranged), layers
    if arranged.offload:  # what is on its way; the layer that runs is counted with its inside
        one, held = one * (layers > 1 and fetched_ahead(work, plan, arranged)), 1
    every, again = one * held, stream * work.first_layer
    two, first = one * min(2, held), one
    if arranged.recompute in ("none", "selective"):
        every, two, first, again = every + again, two + again, first + again, 0.0
    waiting = (flying - 1) * every + sent
    layer = max(_backward_bytes(kind, plan, arranged) for _, kind in _kinds(work))
    others = every + _loss_kept(work, tokens, arranged) * (
        arranged.pipeline.pipeline_schedule == "GPipe"
    )
    activations = Moments(
        loss=every + 2 * stream + (ends - 1) * others,
        last_layer=every + waiting,
        second_layer=waiting + two,
        first_layer=waiting + first,
        end=0,
    )
    # The logits and their gradients, of a low precision in float32 a few rows at a time.
    scores, size = min(tokens, arranged.loss_chunk or tokens), work.element_size
    width = max(1, work.vocab / arranged.tp)
    rows = min(scores, work.wide_logits / width)
    loss = width * ((2 * size * scores + 8 * rows) if size < 4 else (size + 4) * scores)
    loss += _loss_kept(work, tokens, arranged) if arranged.loss_chunk else 0
    return activations, Moments(loss, layer, layer, layer + again, 0)


def _loss_kept(work: StepShape, tokens: int, arranged: Arrangement) -> float:
    """Count what a loss keeps until its backward: logits, or the gradients that came with it."""
    width = max(1, work.vocab / arranged.tp)
    if arranged.loss_chunk:
        return work.hidden * (4 * width + tokens * work.element_size / arranged.tp)
    return width * work.element_size * tokens


def _backward_bytes(work: StepShape, plan: Plan, arranged: Arrangement) -> float:
    """Count what a layer's backward takes besides what is kept: what is computed again, and
    gradients inside.

    It is most in the feed-forward, or in the attention, when what the feed-forward held is gone and
    the gradients of its weights are there.
    """
    of, tokens = own_sizes(work, plan, arranged.tp), work.micro_batch * plan.local_len
    size, split = work.element_size / arranged.tp, arranged.tp > 1
    kept, inside = _layer_activations(work, plan, arranged)
    matrices, rows = 3 if work.gated else 2, min(tokens, arranged.ffn_chunk or tokens)
    stream, wide, matrix = (
        tokens * work.hidden * size,
        rows * work.ffn * size,
        work.hidden * work.ffn * size,
    )
    ffn, gone = (matrices - 1) * wide + matrix + stream, work.residual / 2 * stream
    whole = stream * arranged.tp  # of all tokens, where ranks share them
    if arranged.ffn_chunk:  # its gradients of weights are summed in float32
        ffn += matrices * (wide + matrix * (1 + 4 / work.element_size)) + (
            2 * whole if split else stream
        )
    else:
        ffn, gone = ffn + whole * split, gone + matrices * wide
    if work.delta is None:
        buffers: float = backward_buffers(plan, of, plan.backward_moves(of))
    else:
        buffers = work.delta.split(arranged.tp).buffers(
            work.micro_batch, plan.local_len, work.element_size
        )
    attention = buffers + 2 * stream - gone + matrices * matrix
    return tokens * (inside - kept * (not arranged.offload)) + max(attention, ffn)


def _kinds(work: StepShape) -> list[tuple[float, StepShape]]:
    """Return the kinds of layers, each with its share of them."""
    if work.delta is None:
        return [(1.0, work)]
    share = work.softmax_layers / work.layers
    return [(share, replace(work, delta=None)), (1 - share, work)]


def _kept(work: StepShape, plan: Plan, arranged: Arrangement) -> float:
    """Return the bytes per token that a layer keeps for its backward, of all kinds on average."""
    return sum(share * _layer_activations(kind, plan, arranged)[0] for share, kind in _kinds(work))


def _layer_activations(work: StepShape, plan: Plan, arranged: Arrangement) -> tuple[float, float]:
    """Return bytes per token that a layer keeps for its backward, and that it holds then.

    Counted module by module: residuals, inputs of norms and projections; queries, keys and values,
    the output and its lse; gate, up and product of a gated feed-forward, input and activation of
    another.
    """
    queries, keys = work.heads * work.head_dim, work.kv_heads * work.head_dim
    ffn = 0 if arranged.ffn_chunk else (3 if work.gated else 2) * work.ffn
    per_channel, lse = work.element_size / arranged.tp, 4 * work.heads / arranged.tp
    gathered = 2 * (1 - 1 / arranged.tp) * work.hidden * work.element_size  # outputs of norms
    outputs = queries * _outputs(plan)
    if work.delta is None:
        attention = (queries + outputs + 2 * keys + work.gate * queries) * per_channel + lse
        results = outputs * per_channel + lse
    else:
        delta, of = work.delta.split(arranged.tp), (plan, work.micro_batch, work.element_size)
        attention, results = delta.activations(*of, work.normed), sum(delta.results(*of))
    everything = (
        ((work.residual + work.modulated) * work.hidden + ffn) * per_channel + attention + gathered
    )
    if arranged.recompute == "full":
        return work.hidden * per_channel, everything
    if arranged.recompute == "attention_boundary":
        return work.hidden * per_channel + results, everything
    return everything, everything


def _outputs(plan: Plan) -> int:
    """Return how often the attention's output is kept: by Ulysses before its exchange and after,
    but in stages.
    """
    return (
        2
        if plan.geometry.ulysses_degree > 1 and plan.geometry.options.ulysses_head_chunks == 1
        else 1
    )


def moments(work: StepShape, plan: Plan, arranged: Arrangement) -> float:
    """Return the bytes of a rank's moments in host memory."""
    own = (
        work.trained_share * work.parameters / (arranged.tp * arranged.pp) / _shards(plan, arranged)
    )
    return arranged.state_bytes * own if arranged.moments_on_host else 0.0


def _shards(plan: Plan, arranged: Arrangement) -> int:
    return (
        1
        if arranged.strategy in ("ddp", "legacy_ddp")
        else arranged.dp * plan.size // arranged.copies
    )


def offloaded(work: StepShape, plan: Plan, arranged: Arrangement) -> float:
    """Return the bytes that a micro-batch keeps in host memory."""
    kept = _kept(work, plan, arranged)
    return (
        work.micro_batch * plan.local_len * kept * -(-work.layers // arranged.pp)
        if arranged.offload
        else 0.0
    )


def pinned(work: StepShape, plan: Plan, arranged: Arrangement) -> float:
    """Return the bytes of host memory that torch pins for both, but for what is left of the
    moments' last slab.

    Of a pipeline the first stage has most there: of all micro-batches in flight.
    """
    layers = -(-work.layers // arranged.pp)
    flying = ceil(arranged.pipeline.in_flight(0, arranged.pp, work.micro_batches))
    counts = [
        (round(share * layers) * flying, _pinned_tensors(kind, plan, arranged))
        for share, kind in _kinds(work)
    ]
    return sum(_in_slabs(tensors, times) for times, tensors in counts) + moments(
        work, plan, arranged
    )


def _pinned_tensors(work: StepShape, plan: Plan, arranged: Arrangement) -> tuple[int, ...]:
    """Return the bytes of each tensor that a layer keeps in host memory."""
    tokens, part = work.micro_batch * plan.local_len, work.element_size / arranged.tp
    kept = [work.hidden * part] if arranged.offload else []
    if arranged.offload and arranged.recompute == "attention_boundary":
        if work.delta is not None:
            kept += work.delta.split(arranged.tp).results(plan, work.micro_batch, work.element_size)
        else:
            kept += [work.heads * work.head_dim * part] * _outputs(plan) + [
                4 * work.heads / arranged.tp
            ]
    return tuple(round(tokens * count) for count in kept)


@lru_cache(maxsize=1024)
def _in_slabs(tensors: tuple[int, ...], times: int) -> int:
    """Return the bytes of the slabs of tensors that are kept so many times."""
    return in_slabs(tensors * times, SEVERAL)


def fetched_ahead(work: StepShape, plan: Plan, arranged: Arrangement) -> bool:
    """Return whether offloaded activations come back while the layer after theirs runs."""
    kept = max(_layer_activations(kind, plan, arranged)[0] for _, kind in _kinds(work))
    return work.micro_batch * plan.local_len * kept <= FETCH_AHEAD


def own_sizes(work: StepShape, plan: Plan, tp: int) -> Sizes:
    """Return the attention's sizes of a rank's heads."""
    heads, kv_heads = work.heads // tp, max(1, work.kv_heads // tp)
    return sizes(plan.geometry, work.micro_batch, heads, kv_heads, work.head_dim, work.element_size)
