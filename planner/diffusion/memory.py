"""Memory of a training step on clips: weights as of any model, and activations by the record.

The moments at which it may peak are those of planner/step_memory.py. With checkpointing a block's
inputs wait for its backward, in which the block is computed again; without it all that autograd
saves waits.
"""

from parallel.context import Plan
from planner.diffusion.parts import Tokens
from planner.diffusion.run import ClipRun, Traces
from planner.diffusion.transformer import Transformer
from planner.step_memory import Moments, weight_bytes
from planner.step_shape import Arrangement, StepShape

LOSS_COPIES = 6
"""Copies of the prediction in float32: latents, noise, target, prediction and the loss's two."""
TABLES = 2
"""Tables of rotary positions, cosine and sine, in float32."""


def step_memory(
    run: ClipRun,
    model: Transformer,
    tokens: Tokens,
    traces: Traces,
    work: StepShape,
    plan: Plan,
    arrangement: Arrangement,
) -> dict[str, float]:
    """Return the bytes of the busiest rank at the peak of a step, by cause."""
    states, gradients, passing = weight_bytes(work, plan, arrangement)
    states -= _uncopied_bytes(run, traces)
    largest_block = _largest_block_bytes(run, traces)
    activations, temporary = _activations(run, model, tokens, traces)

    # The peak is at the moment with the largest sum.
    memory_by_moment = []
    for gradient, activation, weights, rest in zip(
        gradients, activations, passing, temporary, strict=True
    ):
        memory_by_moment.append(
            {
                "weights, gradients, optimizer": states + gradient,
                "activations": activation,
                "a block's backward, or the loss": weights + largest_block + rest + work.workspaces,
            }
        )
    return max(memory_by_moment, key=lambda memory: sum(memory.values()))


def _uncopied_bytes(run: ClipRun, traces: Traces) -> float:
    """Return the bytes of copies of frozen weights, which whole ones in bfloat16 do not need."""
    is_whole = run.strategy in ("ddp", "legacy_ddp")
    if not is_whole or run.element_size == 4:
        return 0.0
    frozen = traces.parameters - traces.trained
    return run.element_size * frozen / run.tp


def _largest_block_bytes(run: ClipRun, traces: Traces) -> float:
    """Return by how much two gathered blocks, the running and the next, exceed the mean."""
    if run.strategy != "zero3" or run.gpus == run.tp:
        return 0.0
    counts = [block.parameters for block in traces.blocks]
    excess = max(counts) - sum(counts) / len(counts)
    return 2 * run.element_size * excess / run.tp


def _activations(
    run: ClipRun, model: Transformer, tokens: Tokens, traces: Traces
) -> tuple[Moments, Moments]:
    """Return the bytes that wait at each moment, and those of a block's backward or the loss."""
    blocks = traces.blocks
    waiting = waiting_bytes(run, traces)
    whole_rows = tokens.samples * tokens.whole_image
    clip = LOSS_COPIES * 4 * whole_rows * model.out_width

    # The last block's backward sees all that waits, the first's almost nothing but gradients.
    outside = clip + outside_bytes(run, model, tokens, traces)
    activations = Moments(
        loss=outside + sum(waiting),
        last_layer=outside + sum(waiting),
        second_layer=outside + sum(waiting[:2]),
        first_layer=outside + waiting[0],
        end=outside,
    )

    # A block's backward, without the bytes of it that are counted as waiting.
    first = blocks[0].peak / run.tp - waiting[0]
    last = blocks[-1].peak / run.tp - waiting[-1]
    # At the end the gradient of all embedded tokens exists, and the copy that is scattered to it.
    embedded = run.element_size * whole_rows * model.hidden
    return activations, Moments(clip, last, first, first, 2 * embedded)


def outside_bytes(run: ClipRun, model: Transformer, tokens: Tokens, traces: Traces) -> float:
    """Return the bytes that wait for the backward, but those of the blocks and of the loss."""
    tables = TABLES * 4 * model.head_dim * tokens.image
    shared = max(block.shared for block in traces.blocks)
    saved = sum(part.saved for part in traces.outside)
    return tables + (shared + saved) / run.tp


def waiting_bytes(run: ClipRun, traces: Traces) -> list[float]:
    """Return the bytes of each block that wait from its forward for its backward."""
    waiting = []
    for index, block in enumerate(traces.blocks):
        is_recomputed = index < run.recomputed
        num_bytes = block.inputs if is_recomputed else block.saved
        waiting.append(num_bytes / run.tp)
    return waiting
