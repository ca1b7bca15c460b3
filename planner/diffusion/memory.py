"""Memory of a training step on clips: activations are counted from the recorded forward pass.

Weights are counted as for any model, and memory may peak at any of the moments in
planner/step_memory.py. With checkpointing, a block keeps only its inputs until its backward pass,
which computes the block again; without, it keeps all tensors that autograd saves.
"""

from parallel.context import Plan
from planner.diffusion.parts import Tokens
from planner.diffusion.run import ClipRun, Traces
from planner.diffusion.transformer import Transformer
from planner.step_memory import Moments, weight_bytes
from planner.step_shape import Arrangement, StepShape

LOSS_COPIES = 6
"""Number of float32 tensors of the prediction's size: latents, noise, target, prediction, and two
of the loss."""
TABLES = 2
"""Number of float32 tables of rotary positions: cosine and sine."""


def step_memory(
    run: ClipRun,
    model: Transformer,
    tokens: Tokens,
    traces: Traces,
    work: StepShape,
    plan: Plan,
    arrangement: Arrangement,
) -> dict[str, float]:
    """Return the bytes of the busiest rank at the peak of a step, keyed by cause."""
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
    """Return the bytes of frozen weights' copies, which ``weight_bytes`` counts but no run makes.

    Frozen bfloat16 weights that are not sharded need no copy in the dtype of the computation.
    """
    is_whole = run.strategy in ("ddp", "legacy_ddp")
    if not is_whole or run.element_size == 4:
        return 0.0
    frozen = traces.parameters - traces.trained
    return run.element_size * frozen / run.tp


def _largest_block_bytes(run: ClipRun, traces: Traces) -> float:
    """Return the bytes by which two gathered blocks may exceed two blocks of mean size.

    While a block runs, the next one is gathered already; both may be as large as the largest.
    """
    if run.strategy != "zero3" or run.gpus == run.tp:
        return 0.0
    counts = [block.parameters for block in traces.blocks]
    excess = max(counts) - sum(counts) / len(counts)
    return 2 * run.element_size * excess / run.tp


def _activations(
    run: ClipRun, model: Transformer, tokens: Tokens, traces: Traces
) -> tuple[Moments, Moments]:
    """Return the bytes kept for the backward pass at each moment, and those of temporary tensors.

    The temporary tensors are those of the loss or of a block's backward pass.
    """
    blocks = traces.blocks
    waiting = waiting_bytes(run, traces)
    whole_rows = tokens.samples * tokens.whole_image
    clip = LOSS_COPIES * 4 * whole_rows * model.out_width

    # The last block's backward pass runs first, with all kept tensors in memory; the first block's
    # runs last, with only its own.
    outside = clip + outside_bytes(run, model, tokens, traces)
    activations = Moments(
        loss=outside + sum(waiting),
        last_layer=outside + sum(waiting),
        second_layer=outside + sum(waiting[:2]),
        first_layer=outside + waiting[0],
        end=outside,
    )

    # A block's backward pass, without its bytes that are already counted as kept.
    first = blocks[0].peak / run.tp - waiting[0]
    last = blocks[-1].peak / run.tp - waiting[-1]
    # At the end: the gradient of all embedded tokens, and the tensor into which a rank's is put.
    embedded = run.element_size * whole_rows * model.hidden
    return activations, Moments(clip, last, first, first, 2 * embedded)


def outside_bytes(run: ClipRun, model: Transformer, tokens: Tokens, traces: Traces) -> float:
    """Return the bytes kept for the backward pass outside the blocks and the loss."""
    tables = TABLES * 4 * model.head_dim * tokens.image
    shared = max(block.shared for block in traces.blocks)
    saved = sum(part.saved for part in traces.outside)
    return tables + (shared + saved) / run.tp


def waiting_bytes(run: ClipRun, traces: Traces) -> list[float]:
    """Return the bytes that each block keeps from its forward pass to its backward pass."""
    waiting = []
    for index, block in enumerate(traces.blocks):
        is_recomputed = index < run.recomputed
        num_bytes = block.inputs if is_recomputed else block.saved
        waiting.append(num_bytes / run.tp)
    return waiting
