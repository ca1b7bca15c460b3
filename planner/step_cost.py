"""Predict the time of a training step on a cluster. Needs no process.

A model is given by numbers: this package imports none.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from parallel.context.plan import Plan
from parallel.context.traffic import Sizes
from planner.attention_cost import BACKWARD, FORWARD, GB, MICRO, AttentionCost, Links
from planner.cluster import Cluster
from planner.delta_cost import DeltaCost, fastest_schedule
from planner.step_memory import (
    Arrangement,
    StepShape,
    fetched_ahead,
    memory_of,
    moments,
    offloaded,
    own_sizes,
    pinned,
)

POINTWISE, COMPILED = 42.0, 28.0
"""Times that a layer's forward reads or writes the residual stream and half the feed-forward's
width between its matrix products, as it is and compiled; a backward does twice. Fitted to
papers/tables/public_runs.csv, with memory by data sheets."""


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step, and bytes of the busiest rank's memory, each by cause."""

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


def predict(work: StepShape, plan: Plan, arranged: Arrangement, cluster: Cluster) -> Prediction:
    """Predict time and memory of one step of ``work``, with the attention's ``plan`` over cp."""
    seconds, links = step_seconds(work, plan, arranged, cluster)
    return Prediction(seconds, memory_of(work, plan, arranged), links, pinned(work, plan, arranged))


def step_seconds(
    work: StepShape, plan: Plan, arranged: Arrangement, cluster: Cluster
) -> tuple[dict[str, float], Links]:
    """Return the seconds of a step by cause, and the bytes of a layer's attention."""
    tp = arranged.tp
    of = own_sizes(work, plan, tp)
    layers = -(-work.layers // arranged.pp)
    rows = work.micro_batch * plan.local_len
    rate = 1e12 * cluster.peak_tflops * cluster.matmul_fraction
    output = work.vocab * work.hidden
    products = (
        2 * rows * (work.matrix_weights - output) / work.layers / tp / rate
    )  # a layer's seconds forward
    head = 2 * rows * output / tp / rate
    between = 0.0  # a layer's norms, activations, rotations and sums forward
    if cluster.memory_gb_per_s:
        passed = (
            (COMPILED if arranged.compiled else POINTWISE) * rows * (work.hidden + work.ffn / 2)
        )
        between = passed * work.element_size / tp / (cluster.memory_gb_per_s * GB)
    layer = products + between
    forward, backward, links = _mean_attention(work, plan, of, cluster, tp)
    passes = 2 + work.trained_share  # forward, and backward to the inputs and to the weights
    linear = layers * (products * passes + 3 * between) + head * passes
    again = layers * (layer if arranged.recompute in ("full", "attention_boundary") else 0.0)
    again += layers * (forward if arranged.recompute in ("full", "selective") else 0.0)
    inside = (
        (3 if work.gated else 2)
        * work.hidden
        * work.ffn
        * work.layers
        / (work.matrix_weights - output)
    )
    again += layers * (
        layer * inside if arranged.ffn_chunk else 0.0
    )  # the share inside the feed-forward
    # 4 all-gathers and reduce-scatters of a layer forward, and as many backward (sequence
    # parallelism)
    sent = rows * work.hidden * work.element_size * (tp - 1) / tp
    shared = 8 * _ring_seconds(sent, tp, 1, cluster) if tp > 1 else 0.0
    steps = work.micro_batches + arranged.pp - 1  # fills and drains the pipeline
    seconds = {
        "attention": steps * layers * (forward + backward),
        "linear": steps * linear,
        "recompute": steps * again,
        "tensor parallel": steps * layers * shared,
        "pipeline": steps * _pipeline(work, plan, arranged, cluster),
    }
    if arranged.offload and cluster.host_gb_per_s:
        copy = offloaded(work, plan, arranged) / (
            cluster.host_gb_per_s * GB
        )  # each way, beside the computation
        there = max(0.0, copy - layers * (layer + forward))
        behind = layers * (products * (passes - 1) + 2 * between + backward) + again
        back = max(0.0, copy - behind) if fetched_ahead(work, plan, arranged) else copy
        seconds["offload"] = work.micro_batches * (there + back)
    if arranged.moments_on_host and cluster.host_gb_per_s:
        seconds["optimizer offload"] = moments(work, plan, arranged) / (
            cluster.host_gb_per_s * GB
        )  # each way, alone
    exchanged = _data(work, plan, arranged, cluster)
    hidden = 0.0 if arranged.strategy == "legacy_ddp" else seconds["linear"] + seconds["attention"]
    seconds["data parallel"] = max(cluster.exposed_share * exchanged, exchanged - hidden)
    return seconds, links


def _mean_attention(
    work: StepShape, plan: Plan, of: Sizes, cluster: Cluster, tp: int
) -> tuple[float, float, Links]:
    """Return the mean seconds of all layers, forward and backward, and the bytes of one, without a
    window if any is.
    """
    whole = _attention(plan, of, cluster, tp)
    if work.delta is not None:
        others = replace(work, delta=None, layers=work.softmax_layers, softmax_layers=0)
        ahead, back, links = _mean_attention(others, plan, of, cluster, tp)
        share = work.softmax_layers / work.layers
        delta = _delta(delta_cost(work, plan, cluster, tp))
        return share * ahead + (1 - share) * delta[0], share * back + (1 - share) * delta[1], links
    if work.softmax_layers:
        share, forward = work.softmax_layers / work.layers, FORWARD / (FORWARD + BACKWARD)
        softmax = share * work.softmax_seconds
        ahead, back = ((1 - share) * seconds for seconds in whole[:2])
        return ahead + forward * softmax, back + (1 - forward) * softmax, whole[2]
    if work.window is None:
        return whole
    windowed, share = (
        _attention(plan.windowed(work.window), of, cluster, tp),
        work.windowed_layers / work.layers,
    )
    forward, backward = (
        share * a + (1 - share) * b for a, b in zip(windowed[:2], whole[:2], strict=True)
    )
    return forward, backward, whole[2] if share < 1 else windowed[2]


@lru_cache(maxsize=4096)
def _attention(plan: Plan, of: Sizes, cluster: Cluster, tp: int) -> tuple[float, float, Links]:
    """Return seconds forward and backward, and bytes; the same for all pipelines and recompute
    policies.
    """
    cost = AttentionCost(plan, of, cluster, tp)
    return cost.forward(), cost.backward(), cost.links()


def delta_cost(work: StepShape, plan: Plan, cluster: Cluster, tp: int) -> DeltaCost:
    """Return the cost of a layer's delta rule, which the work must have."""
    assert work.delta is not None
    return DeltaCost(plan, work.delta.split(tp), work.micro_batch, work.element_size, cluster, tp)


@lru_cache(maxsize=4096)
def _delta(cost: DeltaCost) -> tuple[float, float]:
    """Return seconds of a layer's delta rule forward and backward."""
    if cost.plan.geometry.options.delta_rule_schedule == "auto":
        cost = replace(cost, schedule=fastest_schedule(cost))
    return cost.forward(), cost.backward()


def _pipeline(work: StepShape, plan: Plan, arranged: Arrangement, cluster: Cluster) -> float:
    """Time a micro-batch's activations to the next stage, and their gradients back."""
    if arranged.pp == 1:
        return 0.0
    count = work.micro_batch * plan.local_len * work.hidden * work.element_size / arranged.tp
    inside = arranged.pp * arranged.dp * plan.size * arranged.tp <= cluster.gpus_per_node
    rate = cluster.inside_gb_per_s if inside else cluster.node_gb_per_s / cluster.gpus_per_node
    latency = cluster.inside_latency_us if inside else cluster.between_latency_us
    return 2 * (count / (rate * GB) + latency * MICRO)


def _data(work: StepShape, plan: Plan, arranged: Arrangement, cluster: Cluster) -> float:
    """Time a step's weight gathers and gradient sums over dp x cp."""
    ranks = arranged.dp * plan.size
    if ranks == 1:
        return 0.0
    share = work.parameters / (arranged.tp * arranged.pp) * (ranks - 1) / ranks
    weights = _ring_seconds(share * work.element_size, ranks, arranged.tp, cluster)
    gradients = _ring_seconds(share * 4 * work.trained_share, ranks, arranged.tp, cluster)
    if arranged.strategy in ("ddp", "legacy_ddp"):
        return 2 * gradients
    gathers = 2 * work.micro_batches if arranged.strategy == "zero3" else 1
    sums = 1 if arranged.strategy == "zero1" else work.micro_batches
    return gathers * weights + sums * gradients


def _ring_seconds(count: float, ranks: int, stride: int, cluster: Cluster) -> float:
    """Time ``count`` bytes around a ring of every ``stride``-th rank; parallel groups share the
    links.
    """
    if ranks * stride <= cluster.gpus_per_node:
        return (
            count / (cluster.inside_gb_per_s * GB) + (ranks - 1) * cluster.inside_latency_us * MICRO
        )
    rate = min(cluster.inside_gb_per_s, cluster.node_gb_per_s / min(stride, cluster.gpus_per_node))
    return count / (rate * GB) + (ranks - 1) * cluster.between_latency_us * MICRO
