"""Predict the time of a training step on a cluster, without running it.

FLOPs are divided by the rate that the cluster's kernels reach, bytes by the rate of the link that
carries them, and each message adds a latency. The causes of a step's time are:

* attention: rounds of computing and transfers; the longer hides the shorter (planner/layers);
* linear: matmuls, and the pointwise work between them at the memory's rate;
* recompute, tensor parallel, pipeline: added in full;
* slices: launches of a layer in slices, and sums of its keys' gradients (planner/layers);
* offload: copies that the layers of a pass do not hide;
* data parallel: the exchange of weights and gradients that linear and attention do not hide;
* optimizer: work on whole matrices, added in full (planner/optimizer_cost.py). The pointwise update
  of weights is part of the other causes, whose constants are fitted to whole steps.

The model is described by its sizes (`StepShape`): this file builds no model.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from parallel.context.plan import Plan
from parallel.context.traffic import Sizes
from planner.cluster import GB, MICRO, Cluster
from planner.host_memory import moments, offloaded, pinned
from planner.layers.attention_cost import BACKWARD, FORWARD, AttentionCost, Links
from planner.layers.delta_cost import DeltaCost, fastest_schedule
from planner.layers.float8 import float8_speedup
from planner.layers.memory import fetched_ahead, rank_sizes, slice_cost
from planner.optimizer_cost import stage_group, whole_matrix_seconds
from planner.step_memory import memory_of
from planner.step_shape import Arrangement, StepShape

POINTWISE = 42.0
"""Number of times that the pointwise work of a layer's forward pass reads or writes activations.

Each time covers the residual stream and half of the feed-forward's inner activations; the work is
the norms, activations, rotations and sums between the matmuls. The backward pass does twice as
much. Fitted to papers/tables/public_runs.csv, with the memory rates of data sheets.
"""
COMPILED = 28.0
"""The same number for a compiled layer, which fuses some of the reads and writes."""


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step, and bytes of the busiest rank's memory, each keyed by cause."""

    seconds: dict[str, float]
    memory: dict[str, float]
    links: Links
    host: float = 0.0
    """Bytes of host memory that torch pins for the busiest rank."""

    @property
    def time(self) -> float:
        """Return the seconds of a step."""
        return sum(self.seconds.values())

    @property
    def bytes(self) -> float:
        """Return the bytes of memory at the peak."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of one layer for one micro-batch on a rank."""

    products: float
    """Seconds of the forward pass's matmuls."""
    pointwise: float
    """Seconds of the forward pass's norms, activations, rotations and sums."""
    attention: float
    attention_backward: float


def predict(work: StepShape, plan: Plan, arrangement: Arrangement, cluster: Cluster) -> Prediction:
    """Predict time and memory of one step of ``work``, with the attention's ``plan`` over cp."""
    seconds, links = step_seconds(work, plan, arrangement, cluster)
    return Prediction(
        seconds, memory_of(work, plan, arrangement), links, pinned(work, plan, arrangement)
    )


def step_seconds(
    work: StepShape, plan: Plan, arrangement: Arrangement, cluster: Cluster
) -> tuple[dict[str, float], Links]:
    """Return a step's seconds keyed by cause, and the bytes that a layer's attention sends.

    A pipeline takes ``micro_batches + pp - 1`` turns: it fills and drains. The exchange of weights
    and gradients overlaps with computing, except for the cluster's ``exposed_share``.

    Args:
        work: the model and its micro-batches.
        plan: the attention over cp, of one micro-batch.
        arrangement: the other dimensions of the mesh, and the settings that save memory.
        cluster: rates of computing and links.
    """
    layer, links = layer_seconds(work, plan, arrangement, cluster)
    return seconds_of_layers(layer, work, plan, arrangement, cluster), links


def layer_seconds(
    work: StepShape, plan: Plan, arrangement: Arrangement, cluster: Cluster
) -> tuple[LayerSeconds, Links]:
    """Return the seconds of a layer of one micro-batch, and the bytes that its attention sends."""
    tp = arrangement.tp
    tokens = work.tokens(plan)
    products = 2 * tokens * (work.matrix_weights - work.vocab * work.hidden) / work.layers / tp
    pointwise = _pointwise_seconds(work, tokens, arrangement, cluster)
    sizes = rank_sizes(work, plan, tp)
    forward, backward, links = _mean_attention(work, plan, sizes, cluster, tp)
    products_rate = cluster.products_flops_per_s * float8_speedup(arrangement)
    layer = LayerSeconds(products / products_rate, pointwise, forward, backward)
    return layer, links


def seconds_of_layers(
    layer: LayerSeconds, work: StepShape, plan: Plan, arrangement: Arrangement, cluster: Cluster
) -> dict[str, float]:
    """Return the seconds of a step, keyed by cause, from those of a layer; see ``step_seconds``."""
    tp = arrangement.tp
    layers = arrangement.stage_layers(work)
    tokens = work.tokens(plan)
    head = head_seconds(work, tokens, tp, cluster)

    # A micro-batch has a forward pass, and backward passes to the inputs and the trained weights.
    passes = 2 + work.trained_share
    linear = layers * (layer.products * passes + 3 * layer.pointwise) + head * passes
    recompute = _recompute_seconds(work, layers, arrangement, layer)
    turns = work.micro_batches + arrangement.pp - 1
    seconds = {
        "attention": turns * layers * (layer.attention + layer.attention_backward),
        "linear": turns * linear,
        "recompute": turns * recompute,
        "tensor parallel": turns * layers * _tensor_seconds(work, tokens, tp, cluster),
        "pipeline": turns * _pipeline_seconds(work, plan, arrangement, cluster),
    }
    if arrangement.layer_chunk:
        layer_seconds = (linear - head * passes + recompute) / layers
        layer_seconds += layer.attention + layer.attention_backward
        seconds["slices"] = (
            turns * layers * _slice_seconds(work, plan, arrangement, cluster, layer_seconds)
        )
    if arrangement.offload and cluster.host_gb_per_s:
        exposed_seconds = offload_seconds(work, plan, arrangement, cluster, layer, recompute)
        seconds["offload"] = work.micro_batches * sum(exposed_seconds)
    if arrangement.moments_on_host and cluster.host_gb_per_s:
        # Copies in both directions run at the same time; no computing is assumed to hide them.
        moment_bytes = moments(work, plan, arrangement)
        seconds["optimizer offload"] = moment_bytes / cluster.host_bytes_per_s

    exchange_seconds = data_seconds(work, plan, arrangement, cluster)
    overlap_seconds = seconds["linear"] + seconds["attention"]
    if arrangement.strategy == "legacy_ddp":
        overlap_seconds = 0.0
    seconds["data parallel"] = max(
        cluster.exposed_share * exchange_seconds, exchange_seconds - overlap_seconds
    )
    if arrangement.optimizer.matrices:
        group = stage_group(plan, arrangement)
        seconds["optimizer"] = whole_matrix_seconds(arrangement.optimizer.matrices, group, cluster)
    return seconds


def head_seconds(work: StepShape, tokens: int, tp: int, cluster: Cluster) -> float:
    """Return the seconds of the output projection's forward pass over a rank's tokens."""
    return 2 * tokens * work.vocab * work.hidden / tp / cluster.products_flops_per_s


def _pointwise_seconds(
    work: StepShape, tokens: int, arrangement: Arrangement, cluster: Cluster
) -> float:
    """Predict the time of a layer's pointwise work; 0 if the memory's rate is unknown."""
    if not cluster.memory_gb_per_s:
        return 0.0
    passes = COMPILED if arrangement.compiled else POINTWISE
    elements = passes * tokens * (work.hidden + work.ffn / 2)
    return elements * work.element_size / arrangement.tp / cluster.memory_bytes_per_s


def _recompute_seconds(
    work: StepShape, layers: int, arrangement: Arrangement, layer: LayerSeconds
) -> float:
    """Predict the time of the forward work that a stage's layers repeat in the backward pass."""
    policy = arrangement.recompute
    without_attention = layer.products + layer.pointwise
    seconds = 0.0
    if policy in ("full", "attention_boundary"):
        seconds += layers * without_attention
    if policy in ("full", "selective"):
        seconds += layers * layer.attention
    if arrangement.ffn_chunk:
        matrices = 3 if work.gated else 2
        all_products = work.matrix_weights - work.vocab * work.hidden
        ffn_share = matrices * work.hidden * work.ffn * work.layers / all_products
        seconds += layers * (without_attention * ffn_share)
    return seconds


def _slice_seconds(
    work: StepShape, plan: Plan, arrangement: Arrangement, cluster: Cluster, layer_seconds: float
) -> float:
    """Predict the time that slices add to the passes of a layer over one micro-batch.

    Layers with a delta rule have no keys. Of layers with a window, slices see the keys in it.
    """
    slices = slice_cost(work, plan, arrangement)
    launches = slices.launch_seconds(layer_seconds, cluster)
    launches += slices.latency_seconds(cluster, arrangement.tp)
    keys = slices.key_seconds(work.hidden, cluster)
    tiles = slices.tile_seconds(cluster) + slices.sum_seconds(cluster)
    if work.window is not None:
        windowed = replace(slices, plan=plan.windowed(work.window))
        share = work.windowed_layers / work.layers
        of_window = windowed.tile_seconds(cluster) + windowed.sum_seconds(cluster)
        tiles = share * of_window + (1 - share) * tiles
    with_keys = 1.0
    if work.delta is not None:
        with_keys = work.softmax_layers / work.layers
    return launches + with_keys * (keys + tiles)


def _tensor_seconds(work: StepShape, tokens: int, tp: int, cluster: Cluster) -> float:
    """Predict the time of a layer's tensor-parallel collectives, with sequence parallelism.

    There are 4 all-gathers and reduce-scatters in the forward pass, and 4 in the backward pass.
    """
    if tp == 1:
        return 0.0
    sent = tokens * work.hidden * work.element_size * (tp - 1) / tp
    return 8 * ring_seconds(sent, tp, 1, cluster)


def offload_seconds(
    work: StepShape,
    plan: Plan,
    arrangement: Arrangement,
    cluster: Cluster,
    layer: LayerSeconds,
    recompute: float,
) -> tuple[float, float]:
    """Predict the seconds of a micro-batch's activation copies that computing does not hide.

    Returns:
        Seconds of the copies to the host, in the forward pass, and back, in the backward pass.
    """
    layers = arrangement.stage_layers(work)
    copy = offloaded(work, plan, arrangement) / cluster.host_bytes_per_s
    forward = layers * (layer.products + layer.pointwise + layer.attention)
    to_host = max(0.0, copy - forward)
    if not fetched_ahead(work, plan, arrangement):
        return to_host, copy
    passes = 2 + work.trained_share  # as in step_seconds
    backward = (
        layers * (layer.products * (passes - 1) + 2 * layer.pointwise + layer.attention_backward)
        + recompute
    )
    return to_host, max(0.0, copy - backward)


def _mean_attention(
    work: StepShape, plan: Plan, sizes: Sizes, cluster: Cluster, tp: int
) -> tuple[float, float, Links]:
    """Return the mean seconds of all layers' attention, forward and backward, and a layer's bytes.

    The bytes are those of a layer without a window, if the model has any such layer. A model has
    layers of one or two kinds: softmax attention beside a delta rule, beside linear attention, or
    with and without a window.
    """
    forward, backward, links = attention_seconds(plan, sizes, cluster, tp)

    # Softmax layers beside a delta rule have the same plan as the delta rule's layers.
    if work.delta is not None:
        softmax_only = replace(work, delta=None, layers=work.softmax_layers, softmax_layers=0)
        forward, backward, links = _mean_attention(softmax_only, plan, sizes, cluster, tp)
        share = work.softmax_layers / work.layers
        delta_forward, delta_backward = _delta(delta_cost(work, plan, cluster, tp))
        return (
            share * forward + (1 - share) * delta_forward,
            share * backward + (1 - share) * delta_backward,
            links,
        )

    # Beside linear attention, softmax layers have another layout; ``work`` gives their seconds.
    if work.softmax_layers:
        share = work.softmax_layers / work.layers
        forward_share = FORWARD / (FORWARD + BACKWARD)
        softmax = share * work.softmax_seconds
        return (
            (1 - share) * forward + forward_share * softmax,
            (1 - share) * backward + (1 - forward_share) * softmax,
            links,
        )

    if work.window is None:
        return forward, backward, links
    share = work.windowed_layers / work.layers
    windowed = attention_seconds(plan.windowed(work.window), sizes, cluster, tp)
    if work.windowed_layers == work.layers:
        links = windowed[2]
    return (
        share * windowed[0] + (1 - share) * forward,
        share * windowed[1] + (1 - share) * backward,
        links,
    )


@lru_cache(maxsize=4096)
def attention_seconds(
    plan: Plan, sizes: Sizes, cluster: Cluster, tp: int
) -> tuple[float, float, Links]:
    """Return the seconds of a layer's attention, forward and backward, and the bytes that it sends.

    The results are cached, since they are the same for all pipelines and recompute policies.
    """
    cost = AttentionCost(plan, sizes, cluster, tp)
    return cost.forward(), cost.backward(), cost.links()


def delta_cost(work: StepShape, plan: Plan, cluster: Cluster, tp: int) -> DeltaCost:
    """Return the cost of a layer's delta rule; ``work`` must have one."""
    assert work.delta is not None
    return DeltaCost(plan, work.delta.split(tp), work.micro_batch, work.element_size, cluster, tp)


@lru_cache(maxsize=4096)
def _delta(cost: DeltaCost) -> tuple[float, float]:
    """Return the seconds of a layer's delta rule in the forward and in the backward pass."""
    if cost.plan.geometry.options.delta_rule_schedule == "auto":
        cost = replace(cost, schedule=fastest_schedule(cost))
    return cost.forward(), cost.backward()


def _pipeline_seconds(
    work: StepShape, plan: Plan, arrangement: Arrangement, cluster: Cluster
) -> float:
    """Predict the time to send activations to the next stage, and their gradients back."""
    if arrangement.pp == 1:
        return 0.0
    num_bytes = work.micro_batch * plan.local_len * work.hidden * work.element_size / arrangement.tp

    # Between nodes all ranks of a node share its links.
    world_size = arrangement.pp * arrangement.dp * plan.size * arrangement.tp
    rate = cluster.node_gb_per_s / cluster.gpus_per_node
    latency = cluster.between_latency_us
    if world_size <= cluster.gpus_per_node:
        rate = cluster.inside_gb_per_s
        latency = cluster.inside_latency_us
    return 2 * (num_bytes / (rate * GB) + latency * MICRO)


def data_seconds(work: StepShape, plan: Plan, arrangement: Arrangement, cluster: Cluster) -> float:
    """Predict the time of a step's weight gathers and gradient sums over dp x cp ranks."""
    num_ranks = arrangement.dp * plan.size
    if num_ranks == 1:
        return 0.0
    tp = arrangement.tp
    sent = work.parameters / (tp * arrangement.pp) * (num_ranks - 1) / num_ranks
    weights = ring_seconds(sent * work.element_size, num_ranks, tp, cluster)
    gradients = ring_seconds(sent * 4 * work.trained_share, num_ranks, tp, cluster)

    # An all-reduce sends as much as a reduce-scatter and an all-gather. zero3 gathers weights in
    # every forward and backward pass, zero1 and zero2 once after the update. zero1 sums gradients
    # once a step, zero2 and zero3 once per micro-batch.
    if arrangement.strategy in ("ddp", "legacy_ddp"):
        return 2 * gradients
    num_gathers = 2 * work.micro_batches if arrangement.strategy == "zero3" else 1
    num_sums = 1 if arrangement.strategy == "zero1" else work.micro_batches
    return num_gathers * weights + num_sums * gradients


def ring_seconds(num_bytes: float, num_ranks: int, stride: int, cluster: Cluster) -> float:
    """Predict the time to send bytes around a ring of every ``stride``-th rank.

    The other rings of the same kind share the links.
    """
    if num_ranks * stride <= cluster.gpus_per_node:
        rate = cluster.inside_gb_per_s
        latency = cluster.inside_latency_us
    else:
        groups_per_node = min(stride, cluster.gpus_per_node)
        rate = min(cluster.inside_gb_per_s, cluster.node_gb_per_s / groups_per_node)
        latency = cluster.between_latency_us
    return num_bytes / (rate * GB) + (num_ranks - 1) * latency * MICRO
