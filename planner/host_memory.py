"""Host memory of a training step: offloaded activations and the optimizer's moments.

The operating system kills a process that exceeds the host memory, without a message from torch, so
host memory has to be counted as carefully as a GPU's. torch pins blocks of a power of two bytes,
which may double the memory of a tensor; so tensors are cut from slabs (large blocks of pinned
memory, parallel/offload.py), and the slabs are counted.
"""

from functools import lru_cache
from math import ceil

from parallel.context.plan import Plan
from parallel.offload import SEVERAL, in_slabs
from planner.layers.memory import kept_per_token, kinds, num_outputs
from planner.step_memory import stage_states
from planner.step_shape import Arrangement, StepShape


def moments(work: StepShape, plan: Plan, arrangement: Arrangement) -> float:
    """Return the bytes of a rank's optimizer moments in host memory."""
    if not arrangement.moments_on_host:
        return 0.0
    return stage_states(work, arrangement) / arrangement.num_shards(plan)


def offloaded(work: StepShape, plan: Plan, arrangement: Arrangement) -> float:
    """Return the bytes of activations that a micro-batch keeps in host memory."""
    if not arrangement.offload:
        return 0.0
    layers = arrangement.stage_layers(work)
    return work.tokens(plan) * kept_per_token(work, plan, arrangement) * layers


def pinned(work: StepShape, plan: Plan, arrangement: Arrangement) -> float:
    """Return the bytes of host memory that torch pins for activations and moments.

    The unused end of the last slab (a block of pinned memory) of the moments does not count. In a
    pipeline the first stage pins most: the activations of all micro-batches in flight.
    """
    layers = arrangement.stage_layers(work)
    in_flight = ceil(arrangement.pipeline.in_flight(0, arrangement.pp, work.micro_batches))
    activations = 0
    for share, kind in kinds(work):
        tensors = _pinned_tensors(kind, plan, arrangement)
        activations += _in_slabs(tensors, round(share * layers) * in_flight)
    return activations + moments(work, plan, arrangement)


def _pinned_tensors(work: StepShape, plan: Plan, arrangement: Arrangement) -> tuple[int, ...]:
    """Return the bytes of each tensor that a layer keeps in host memory."""
    if not arrangement.offload:
        return ()

    # A layer keeps its input and, if all but the attention is recomputed, the attention's results.
    tokens = work.tokens(plan)
    per_channel = work.element_size / arrangement.tp
    bytes_per_token = [work.hidden * per_channel]
    if arrangement.recompute == "attention_boundary":
        if work.delta is not None:
            delta = work.delta.split(arrangement.tp)
            bytes_per_token += delta.results(plan, work.micro_batch, work.element_size)
        else:
            output = work.heads * work.head_dim * per_channel
            bytes_per_token += [output] * num_outputs(plan)
            bytes_per_token.append(4 * work.heads / arrangement.tp)  # the LSE
    return tuple(round(tokens * count) for count in bytes_per_token)


@lru_cache(maxsize=1024)
def _in_slabs(tensors: tuple[int, ...], times: int) -> int:
    """Return the bytes of the slabs (blocks of pinned memory) that hold ``times`` such tensors."""
    return in_slabs(tensors * times, SEVERAL)
