"""Predict the memory of a training step from the model's sizes.

The memory may peak at five moments of a step (`Moments`). At each, three kinds of memory add up:

* the weights with the optimizer's state, and the gradients that exist by then;
* the activations that layers have kept, of all micro-batches in flight;
* temporary tensors: gathered weights, gradients before their reduction, and the logits or a layer's
  recomputed activations and inner gradients.

All are counted in bytes of the busiest rank, which is in a pipeline's first or last stage.
tests/planner compares them with rehearsals (planner/rehearsal.py) and with real steps.
"""

from typing import NamedTuple

from parallel.context.plan import Plan
from planner.layers.memory import (
    backward_bytes,
    fetched_ahead,
    kept_per_token,
    kinds,
    rotary_tables,
    slice_states,
)
from planner.optimizer_cost import stage_group, temporary_bytes
from planner.step_shape import Arrangement, StepShape


class Moments(NamedTuple):
    """Bytes at the moments of a step at which its memory may peak.

    A layer's moment is in the middle of its backward pass. The last layer is the last of the kind
    whose backward pass takes most, so a layer of another kind may already be done by then. Which
    moment is the peak depends on the model: logits are large for a large vocabulary; all
    activations exist during the last layer's backward pass, the gradients of all other layers
    during the first layer's, and all gradients during the optimizer step.
    """

    loss: float
    last_layer: float
    second_layer: float
    first_layer: float
    end: float


def memory_of(work: StepShape, plan: Plan, arrangement: Arrangement) -> dict[str, float]:
    """Return the bytes of the busiest rank at the peak of a step, keyed by cause.

    In a pipeline the moment of the loss is the last stage's, and the others are the first stage's.

    Args:
        work: the model and its micro-batches.
        plan: the attention over cp, of one micro-batch.
        arrangement: the other dimensions of the mesh, and the settings that save memory.
    """
    states, gradients, temporary_weights = weight_bytes(work, plan, arrangement)
    activations, temporary = _activations(work, plan, arrangement)
    memory_by_moment = []
    for gradient, activation, passing, rest in zip(
        gradients, activations, temporary_weights, temporary, strict=True
    ):
        memory_by_moment.append(
            {
                "weights, gradients, optimizer": states + gradient,
                "activations": activation,
                "a layer's backward, or the logits": passing + rest + work.workspaces,
            }
        )
    return max(memory_by_moment, key=lambda memory: sum(memory.values()))


class _Stage(NamedTuple):
    """Number of parameters of the busiest pipeline stage on a tensor-parallel rank."""

    layers: int
    per_layer: float
    outside: float
    """Number of parameters outside the layers: embeddings (first stage) or output (last stage)."""
    output: float
    """Number of parameters of the output projection."""

    @property
    def total(self) -> float:
        """Return the number of parameters of the whole stage."""
        return self.layers * self.per_layer + self.outside


def _stage(work: StepShape, arrangement: Arrangement) -> _Stage:
    tp = arrangement.tp
    output = work.vocab * work.hidden / tp
    outside = work.outside / tp
    split = (work.parameters - work.replicated) / tp
    per_layer = (split + work.replicated - outside) / work.layers
    if arrangement.pp > 1:
        outside = max(output, outside - output)
    return _Stage(arrangement.stage_layers(work), per_layer, outside, output)


def stage_states(work: StepShape, arrangement: Arrangement) -> float:
    """Return the bytes of the optimizer's state of the busiest pipeline stage, before sharding."""
    stage = _stage(work, arrangement)
    optimizer = arrangement.optimizer
    in_layers = optimizer.state_bytes * stage.layers * stage.per_layer
    return work.trained_share * (in_layers + optimizer.outside_state_bytes * stage.outside)


def weight_bytes(
    work: StepShape, plan: Plan, arrangement: Arrangement
) -> tuple[float, Moments, Moments]:
    """Count the weights with the optimizer's state, their gradients, and temporary copies of both.

    Returns:
        Bytes of weights and state; bytes of gradients at each moment; bytes of gathered weights and
        unreduced gradients at each moment.
    """
    size = work.element_size
    trained_share = work.trained_share
    stage = _stage(work, arrangement)
    shards = arrangement.num_shards(plan)

    # Trained weights are in float32, beside the optimizer's state and averages; frozen ones are in
    # the dtype of the computation.
    states = (4 + work.averages) * stage.total * trained_share
    states += size * stage.total * (1 - trained_share)
    if not arrangement.moments_on_host:
        states += stage_states(work, arrangement)

    # Gathered copies of the weights in the dtype of the computation: with zero3, of one layer
    # at a time and of the parameters outside the layers; else of the whole stage, all the time.
    # FSDP gathers them on a single process too.
    is_reduced = shards > 1 or size < 4
    is_gathered = arrangement.strategy == "zero3"
    copied_parameters = stage.total
    if is_gathered:
        copied_parameters = stage.outside + stage.per_layer
    copies = copied_parameters * size

    num_done = _done_before_last(work, plan, arrangement)
    gradients, waiting_bytes = _gradients(work, shards, arrangement, stage, num_done)

    # While the backward pass is in layer n: the gradients of layer n + 1, which are freed only when
    # those of layer n are reduced, and the weights of layer n - 1, gathered ahead.
    unreduced_bytes = 4 * stage.per_layer * trained_share * is_reduced
    gathered = size * stage.per_layer * (is_gathered and shards > 1)

    # At the end: the gradients of the parameters outside the layers, before and after their
    # reduction (legacy_ddp reduces all gradients at once), or the optimizer's temporary tensors.
    last = 4 * (1 + 1 / shards) * stage.outside * trained_share * is_reduced
    if arrangement.strategy == "legacy_ddp":
        last = 4 * stage.total * trained_share
    step = temporary_bytes(arrangement.optimizer, stage_group(plan, arrangement))

    temporary = Moments(
        loss=0,
        last_layer=waiting_bytes + gathered + unreduced_bytes * num_done,
        second_layer=waiting_bytes + gathered + unreduced_bytes,
        first_layer=waiting_bytes + unreduced_bytes,
        end=max(last, step) - copies,  # gathered weights are freed at the end
    )
    return states / shards + copies, gradients, temporary


def _gradients(
    work: StepShape, shards: int, arrangement: Arrangement, stage: _Stage, done_before_last: int
) -> tuple[Moments, float]:
    """Count the gradients at each moment, and the output projection's while it waits to be reduced.

    With one micro-batch, gradients appear layer by layer; with several, all exist from the second
    micro-batch on, and zero1 does not shard their sums.
    """
    trained_share = work.trained_share
    if work.micro_batches > 1:
        if arrangement.strategy == "zero1":
            shards = 1
        gradients = 4 * stage.total * trained_share / shards
        return Moments._make([gradients] * 5), 0.0

    # The output's gradient waits for those of the other parameters outside the layers.
    waiting_bytes = work.element_size * stage.output * trained_share
    num_done = (0, done_before_last, max(0, stage.layers - 2), stage.layers - 1)
    by_moment = [4 * layers * stage.per_layer * trained_share / shards for layers in num_done]
    at_end = 4 * stage.total * trained_share / shards
    return Moments._make([*by_moment, at_end]), waiting_bytes


def _activations(work: StepShape, plan: Plan, arrangement: Arrangement) -> tuple[Moments, Moments]:
    """Count the activations kept at each moment, and temporary tensors of the loss or a layer.

    In a pipeline with 1F1B the first stage has most micro-batches in flight, and the last has one.
    GPipe runs all forward passes first, so every stage has all micro-batches in flight, and the
    last stage their logits.
    """
    pp = arrangement.pp
    tokens = work.tokens(plan)
    layers = arrangement.stage_layers(work)
    stream = tokens * work.hidden * work.element_size / arrangement.tp
    in_flight = arrangement.pipeline.in_flight(0, pp, work.micro_batches)
    in_flight_last = arrangement.pipeline.in_flight(pp - 1, pp, work.micro_batches)
    sent = stream * in_flight * (pp > 1)
    states = slice_states(work, plan, arrangement)

    # Activations that the layers keep. With offload only those on their way to or from the host
    # count here; those of the running layer count in its backward pass.
    per_layer = tokens * kept_per_token(work, plan, arrangement)
    kept_layers = layers
    if arrangement.offload:
        per_layer = per_layer * (layers > 1 and fetched_ahead(work, plan, arrangement))
        kept_layers = 1

    # A TransNormer's first layer has more activations. They are kept, or with recomputation exist
    # only while the layer is recomputed.
    all_layers = per_layer * kept_layers
    two_layers = per_layer * min(2, kept_layers)
    first_layer = per_layer
    recomputed_bytes = stream * work.first_layer
    if arrangement.recompute in ("none", "selective"):
        all_layers = all_layers + recomputed_bytes
        two_layers = two_layers + recomputed_bytes
        first_layer = first_layer + recomputed_bytes
        recomputed_bytes = 0.0

    # Every other micro-batch in flight keeps the activations of all its layers and, in GPipe, the
    # tensors of its loss.
    waiting_bytes = (in_flight - 1) * (all_layers + states) + sent
    keeps_loss = arrangement.pipeline.pipeline_schedule == "GPipe"
    other_micro_batches = all_layers + _loss_kept(work, tokens, arrangement) * keeps_loss
    done_bytes = per_layer * min(kept_layers - 1, _done_before_last(work, plan, arrangement))
    activations = Moments(
        loss=all_layers + states + 2 * stream + (in_flight_last - 1) * other_micro_batches,
        last_layer=all_layers + states - done_bytes + waiting_bytes,
        second_layer=waiting_bytes + two_layers,
        first_layer=waiting_bytes + first_layer,
        end=0,
    )

    # The logits are freed when the last norm runs back.
    loss = max(_loss_bytes(work, tokens, arrangement), (work.norm_streams - 2) * stream)
    loss += rotary_tables(work, plan, arrangement)
    layer = max(backward_bytes(kind, plan, arrangement) for _, kind in kinds(work))
    return activations, Moments(loss, layer, layer, layer + recomputed_bytes, 0)


def _done_before_last(work: StepShape, plan: Plan, arrangement: Arrangement) -> int:
    """Return the layers (0 or 1) that are done when the last layer of the largest kind begins.

    A hybrid's last layer may have softmax attention, while layers with a delta rule take more. The
    stages of a pipeline end with layers of any kind, so there the last one counts as the largest.
    """
    if not work.softmax_last or arrangement.pp > 1:
        return 0
    softmax, delta = [backward_bytes(kind, plan, arrangement) for _, kind in kinds(work)]
    return int(delta > softmax)


def _loss_bytes(work: StepShape, tokens: int, arrangement: Arrangement) -> float:
    """Count the logits and their gradients; low-precision logits are cast to float32 a few rows at
    a time.
    """
    size = work.element_size
    scored_tokens = min(tokens, arrangement.loss_chunk or tokens)
    width = max(1, work.vocab / arrangement.tp)
    float32_rows = min(scored_tokens, work.wide_logits / width)
    if size < 4:
        loss = width * (2 * size * scored_tokens + 8 * float32_rows)
    else:
        loss = width * ((size + 4) * scored_tokens)
    if arrangement.loss_chunk:
        loss += _loss_kept(work, tokens, arrangement)
    return loss


def _loss_kept(work: StepShape, tokens: int, arrangement: Arrangement) -> float:
    """Count the tensors a loss keeps until its backward pass: logits, or gradients if in chunks.

    A loss in chunks computes its gradients already in the forward pass.
    """
    width = max(1, work.vocab / arrangement.tp)
    if arrangement.loss_chunk:
        return work.hidden * (4 * width + tokens * work.element_size / arrangement.tp)
    return width * work.element_size * tokens
