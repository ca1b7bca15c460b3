"""Predict the memory of one layer: what it keeps, and what its backward pass needs.

All is counted on the busiest rank, for the tokens of one micro-batch. With ``--layer-chunk-size``
inner activations exist for one slice of these tokens at a time (planner/layers/slice_cost.py).
"""

from dataclasses import replace

from parallel.context.plan import Plan
from parallel.context.traffic import Sizes, sizes
from parallel.offload import FETCH_AHEAD
from planner.layers.buffers import backward_buffers
from planner.layers.slice_cost import SliceCost
from planner.step_shape import Arrangement, StepShape

ROTARY = 4
"""Bytes of a token's rotary tables for each channel of a head: half a sine and half a cosine.

All layers share the tables. They count where little else exists of all tokens.
"""


def backward_bytes(work: StepShape, plan: Plan, arrangement: Arrangement) -> float:
    """Count the bytes that a layer's backward pass adds to those that its forward pass kept.

    These are recomputed activations and inner gradients, of all tokens or of a slice of them.
    """
    saved_bytes, needed_bytes = _layer_activations(work, plan, arrangement)
    if arrangement.layer_chunk:
        return _slices_bytes(work, plan, arrangement, saved_bytes, needed_bytes)

    if not arrangement.offload:
        needed_bytes -= saved_bytes
    tp = arrangement.tp
    tokens = work.tokens(plan)
    if work.delta is None:
        sizes_of_rank = rank_sizes(work, plan, tp)
        moves = plan.backward_moves(sizes_of_rank)
        buffers: float = backward_buffers(plan, sizes_of_rank, moves)
    else:
        buffers = work.delta.split(tp).buffers(work.micro_batch, plan.local_len, work.element_size)
    return tokens * needed_bytes + _inner_gradients(work, arrangement, tokens, buffers)


def _inner_gradients(
    work: StepShape, arrangement: Arrangement, tokens: int, buffers: float
) -> float:
    """Count the largest gradients inside a layer, given the buffers of its attention.

    The peak is in the feed-forward or in the attention; by then the feed-forward's activations are
    freed, but its weights' gradients exist.
    """
    tp = arrangement.tp
    size = work.element_size / tp

    # Sizes: hidden states of the tokens, a chunk's inner activations, a weight matrix.
    num_matrices = 3 if work.gated else 2
    rows = min(tokens, arrangement.ffn_chunk or tokens)
    stream = tokens * work.hidden * size
    inner = rows * work.ffn * size
    matrix = work.hidden * work.ffn * size
    all_tokens = stream * tp  # gathered from all tensor-parallel ranks

    # The peak in the feed-forward, and the bytes freed before the attention's backward pass.
    ffn = (num_matrices - 1) * inner + matrix + stream
    freed_bytes = work.residual / 2 * stream
    if arrangement.ffn_chunk:  # the weights' gradients are summed in float32
        weight_gradients = matrix * (1 + 4 / work.element_size)
        gathered = stream
        if tp > 1:
            gathered = 2 * all_tokens
        ffn += num_matrices * (inner + weight_gradients) + gathered
    else:
        ffn = ffn + all_tokens * (tp > 1)
        freed_bytes = freed_bytes + num_matrices * inner

    if work.delta is not None:
        # The output before and after its norm, its gate and the gated output are freed; the
        # gradients of the output and of the gate exist.
        freed_bytes += 2 * tokens * work.delta.split(tp).outputs * work.element_size
    attention = buffers + 2 * stream - freed_bytes + num_matrices * matrix
    return max(attention, ffn)


def _slices_bytes(
    work: StepShape, plan: Plan, arrangement: Arrangement, saved_bytes: float, needed_bytes: float
) -> float:
    """Count ``backward_bytes`` of a layer that takes its sequence slice by slice.

    Of all tokens there are the gradients of the layer's output and input, the keys, and the tables
    of rotary positions; inner activations are those of a slice. The weights' gradients are summed
    in float32.
    """
    tp = arrangement.tp
    slices = slice_cost(work, plan, arrangement)
    stream = work.tokens(plan) * work.hidden * work.element_size / tp
    of_all_tokens = 2 * stream + rotary_tables(work, plan, arrangement)
    if arrangement.offload:
        of_all_tokens += work.tokens(plan) * saved_bytes
    if work.delta is None:
        of_all_tokens += slices.key_bytes()
        buffers = slices.attention_bytes()
    else:
        delta = work.delta.split(tp)
        buffers = delta.buffers(work.micro_batch, slices.length, work.element_size)

    weights = (work.parameters - work.outside) / work.layers / tp
    weight_sums = 4 * weights * work.trained_share
    inner = _inner_gradients(work, arrangement, slices.tokens, buffers)
    return of_all_tokens + weight_sums + slices.tokens * (needed_bytes - saved_bytes) + inner


def slice_cost(work: StepShape, plan: Plan, arrangement: Arrangement) -> SliceCost:
    """Return the cost of a layer's slices; ``arrangement`` must have a ``layer_chunk``."""
    return SliceCost(plan, rank_sizes(work, plan, arrangement.tp), arrangement.layer_chunk)


def rotary_tables(work: StepShape, plan: Plan, arrangement: Arrangement) -> float:
    """Return the bytes of rotary tables, which count only if layers take the sequence in slices."""
    return ROTARY * work.head_dim * work.tokens(plan) * (arrangement.layer_chunk > 0)


def slice_states(work: StepShape, plan: Plan, arrangement: Arrangement) -> float:
    """Return the bytes of states that the slices of all layers keep until the backward pass."""
    if work.delta is None or not arrangement.layer_chunk:
        return 0.0
    slices = slice_cost(work, plan, arrangement)
    share = 1 - work.softmax_layers / work.layers
    num_layers = share * arrangement.stage_layers(work)
    return num_layers * slices.state_bytes(work.delta.split(arrangement.tp))


def kinds(work: StepShape) -> list[tuple[float, StepShape]]:
    """Return the kinds of layers (two beside a delta rule), each with its share of all layers."""
    if work.delta is None:
        return [(1.0, work)]
    share = work.softmax_layers / work.layers
    return [(share, replace(work, delta=None)), (1 - share, work)]


def kept_per_token(work: StepShape, plan: Plan, arrangement: Arrangement) -> float:
    """Return the bytes per token that a layer keeps for its backward pass, averaged over kinds."""
    return sum(
        share * _layer_activations(kind, plan, arrangement)[0] for share, kind in kinds(work)
    )


def _layer_activations(
    work: StepShape, plan: Plan, arrangement: Arrangement
) -> tuple[float, float]:
    """Return the bytes per token that a layer keeps, and those that its backward pass needs.

    Counted module by module: residuals, inputs of norms and projections; queries, keys and values,
    the output and its LSE; gate, up and product of a gated feed-forward, or input and activation of
    a plain one.
    """
    tp = arrangement.tp
    per_channel = work.element_size / tp

    # The attention; the policy attention_boundary keeps only its results.
    queries = work.heads * work.head_dim
    keys = work.kv_heads * work.head_dim
    lse = 4 * work.heads / tp
    outputs = queries * num_outputs(plan)
    if work.delta is None:
        attention = (queries + outputs + 2 * keys + work.gate * queries) * per_channel + lse
        results = outputs * per_channel + lse
    else:
        delta = work.delta.split(tp)
        batch = work.micro_batch
        length = None
        if arrangement.layer_chunk:
            length = slice_cost(work, plan, arrangement).length
        attention = delta.activations(plan, batch, work.element_size, work.normed, length)
        results = sum(delta.results(plan, batch, work.element_size, length))

    # The feed-forward, the residual stream, and the norms' outputs, which are gathered over tp.
    ffn = 0
    if not arrangement.ffn_chunk:
        ffn = (3 if work.gated else 2) * work.ffn
    norm_outputs = 2 * (1 - 1 / tp) * work.hidden * work.element_size
    stream = (work.residual + work.modulated) * work.hidden
    everything = (stream + ffn) * per_channel + attention + norm_outputs
    if arrangement.recompute == "full":
        return work.hidden * per_channel, everything
    if arrangement.recompute == "attention_boundary":
        return work.hidden * per_channel + results, everything
    return everything, everything


def num_outputs(plan: Plan) -> int:
    """Return the number of copies of the attention's output that are kept.

    Ulysses keeps the output before and after its exchange, except in stages of heads.
    """
    geometry = plan.geometry
    exchanges = geometry.ulysses_degree > 1 and geometry.options.ulysses_head_chunks == 1
    if exchanges:
        return 2
    return 1


def fetched_ahead(work: StepShape, plan: Plan, arrangement: Arrangement) -> bool:
    """Return True if offloaded activations come back during the next layer's backward pass."""
    per_token = max(_layer_activations(kind, plan, arrangement)[0] for _, kind in kinds(work))
    return work.tokens(plan) * per_token <= FETCH_AHEAD


def rank_sizes(work: StepShape, plan: Plan, tp: int) -> Sizes:
    """Return the attention's sizes for one rank's heads."""
    heads = work.heads // tp
    kv_heads = max(1, work.kv_heads // tp)
    return sizes(plan.geometry, work.micro_batch, heads, kv_heads, work.head_dim, work.element_size)
